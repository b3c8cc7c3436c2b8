"""Random batches from a cache: which examples come, in which order, and that a key determines them."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprefetch import DeviceCache

SPLIT = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"))
SPEC = jax.ShapeDtypeStruct((), jnp.int32)
KEY = jax.random.key(7)


def full(n: int, sharding: Any = None, capacity: int | None = None) -> DeviceCache:
    """A cache of the numbers from 0 on."""
    return DeviceCache(capacity or n, np.arange(n, dtype=np.int32), sharding=sharding)


def numbers(batches: Any, count: int | None = None) -> list[list[int]]:
    """So many batches, or all."""
    return [np.asarray(batch).tolist() for batch in itertools.islice(batches, count)]


# ---- epochs


@given(
    shape=st.sampled_from([(1, 1, 0, 1), (1, 9, 0, 2), (1, 6, 3, 4), (4, 5, 2, 2), (4, 4, 0, 4), (4, 2, 0, 3)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_epoch_has_every_example_once(shape: tuple[int, int, int, int], seed: int) -> None:
    """Against a sampler of plain sets: no example twice in an epoch, none left out but the rest."""
    shards, each, free, rows = shape  # devices; filled slots, others, and rows of a batch on each
    filled = np.array([d * (each + free) + place for d in range(shards) for place in range(each)])
    with full(each * shards, SPLIT if shards > 1 else None, (each + free) * shards) as cache:
        slots = dict(zip(np.asarray(cache.take(filled)).tolist(), filled.tolist(), strict=True))
        batches = cache.batches(rows * shards, jax.random.key(seed), replace=False, epochs=3)
        if rows > each:
            with pytest.raises(ValueError, match=f"{rows * shards} rows are more than the {each * shards} examples"):
                next(batches)
            return
        per_epoch, seen = each // rows, numbers(batches)
        assert len(seen) == 3 * per_epoch
        for epoch in range(3):
            dealt = seen[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert len({n for batch in dealt for n in batch}) == per_epoch * rows * shards
            for batch in dealt:  # each row is an example of its own device
                assert [slots[n] // (each + free) for n in batch] == [d for d in range(shards) for _ in range(rows)]


def test_epochs_differ_and_the_key_determines_them() -> None:
    """Every epoch has another order; the same key gives the same, another key another."""
    with full(64, SPLIT) as cache:
        first, again, other = (
            numbers(cache.batches(16, key, replace=False, epochs=3)) for key in (KEY, KEY, jax.random.key(8))
        )
        assert first == again != other
        assert len(first) == 12
        assert first[:4] != first[4:8] != first[8:]
        for epoch in (first[:4], first[4:8], first[8:]):
            assert sorted(n for batch in epoch for n in batch) == list(range(64))


def test_the_same_key_draws_different_rows_on_each_device() -> None:
    """Devices do not draw in step."""
    with full(64, SPLIT) as cache:
        (batch,) = numbers(cache.batches(64, KEY, replace=False), 1)
        own = [[n % 16 for n in batch[16 * d : 16 * d + 16]] for d in range(4)]
        assert len({tuple(order) for order in own}) == 4


def test_epochs_go_on_without_an_end() -> None:
    """Without a number of them there is always another one; zero of them is none."""
    with full(8) as cache:
        assert len(numbers(cache.batches(8, KEY, replace=False), 5)) == 5
        assert numbers(cache.batches(8, KEY, replace=False, epochs=0)) == []


def test_what_is_inserted_joins_the_next_epoch() -> None:
    """An epoch goes through the slots that were filled when it began; new content of a slot shows at once."""
    with full(4, capacity=8) as cache:
        batches = cache.batches(2, KEY, replace=False)
        first = numbers(batches, 1)[0]
        cache.insert(np.arange(4, 8, dtype=np.int32))
        assert sorted(first + numbers(batches, 1)[0]) == [0, 1, 2, 3]
        assert sorted(n for batch in numbers(batches, 4) for n in batch) == list(range(8))


# ---- with replacement


def test_draws_with_replacement_are_uniform_over_what_is_filled() -> None:
    """Only filled slots are drawn, each about as often as the others, and every batch is another."""
    with full(40, SPLIT, capacity=80) as cache:
        seen = numbers(cache.batches(400, KEY), 50)
    counts = collections.Counter(n for batch in seen for n in batch)
    assert sorted(counts) == list(range(40))
    expected = 50 * 400 / 40
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 80  # 39 degrees of freedom: less than one key in 5,000 has more
    assert len({tuple(batch) for batch in seen}) == 50


def test_the_key_determines_the_draws() -> None:
    """The same key gives the same batches, whatever else is taken between; another key others."""
    with full(64, SPLIT) as cache:
        alone, other = numbers(cache.batches(16, KEY), 5), numbers(cache.batches(16, jax.random.key(8)), 5)
        batches, between = cache.batches(16, KEY), []
        for _ in range(5):
            between += numbers(batches, 1)
            next(cache.batches(8, KEY))
            cache.take([0, 16, 32, 48])
        assert alone == between != other
        assert cache.takes == 25


@pytest.mark.parametrize("key", [jax.random.PRNGKey(7), jax.random.key(7, impl="rbg"), KEY])
@pytest.mark.parametrize("replace", [True, False])
def test_all_kinds_of_keys_do(key: Any, replace: bool) -> None:
    """Old keys, and those of another implementation, determine batches as well."""
    with full(64, SPLIT) as cache:
        assert numbers(cache.batches(16, key, replace=replace), 4) == numbers(
            cache.batches(16, key, replace=replace), 4
        )


# ---- state


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("before", [0, 1, 3, 4, 6])
def test_a_saved_position_is_restored(replace: bool, before: int) -> None:
    """Batches go on where they were saved, in other objects over a restored cache."""
    with full(24, SPLIT, capacity=32) as cache, DeviceCache(32, SPEC, sharding=SPLIT) as other:
        batches = cache.batches(8, KEY, replace=replace)
        numbers(batches, before)
        other.set_state(cache.get_state())
        state = batches.get_state()
        expected = numbers(batches, 7)
        restored = other.batches(8, jax.random.key(0), replace=replace)
        restored.set_state(state)
        assert numbers(restored, 7) == expected


def test_an_epoch_that_was_saved_keeps_its_slots() -> None:
    """What was filled when the epoch began is what it goes through, also after it was restored."""
    with full(4, capacity=8) as cache:
        batches = cache.batches(2, KEY, replace=False)
        first, state = numbers(batches, 1)[0], batches.get_state()
        cache.insert(np.arange(4, 8, dtype=np.int32))
        restored = cache.batches(2, KEY, replace=False)
        restored.set_state(state)
        assert sorted(first + numbers(restored, 1)[0]) == [0, 1, 2, 3]
        assert sorted(n for batch in numbers(restored, 4) for n in batch) == list(range(8))


@pytest.mark.parametrize("state", [{}, {"taken": 1}, {"taken": -1, "epoch": 0, "position": 0, "filled": 8}, None])
def test_what_is_no_state_is_refused(state: Any) -> None:
    """Anything else than a state is an error, and the batches go on as before."""
    with full(8) as cache:
        batches = cache.batches(4, KEY)
        if state and len(state) > 1:
            state = {**batches.get_state(), **state}
        with pytest.raises(ValueError, match="state: "):
            batches.set_state(state)
        assert numbers(batches, 2) == numbers(cache.batches(4, KEY), 2)


# ---- arguments


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": 0}, ValueError, "batch_size: expected an integer of at least 1"),
        ({"batch_size": 6}, ValueError, "batch_size: expected a multiple of the 4 devices of the cache, got 6"),
        ({"epochs": 2}, ValueError, "drawing with replacement has no epochs"),
        ({"epochs": -1, "replace": False}, ValueError, "epochs: expected an integer of at least 0"),
        ({"key": 0}, TypeError, r"key: expected one key, such as jax.random.key\(0\), got 0"),
        ({"key": jax.random.split(KEY, 3)}, TypeError, "key: expected one key"),
        ({"key": jnp.ones(3)}, TypeError, "key: expected one key"),
    ],
)
def test_wrong_arguments_are_errors(options: dict[str, Any], error: type[Exception], text: str) -> None:
    """They are told at the call."""
    with full(8, SPLIT) as cache, pytest.raises(error, match=text):
        cache.batches(**{"batch_size": 4, "key": KEY, **options})
