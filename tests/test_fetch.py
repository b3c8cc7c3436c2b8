"""`fetch_to_host`: results arrive in order, as they were, a bounded number ahead, and nothing is held for long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import fetch, fetch_to_host
from jaxprefetch.device import fetch as device_fetch
from jaxprefetch.device.fetch import local_part

MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
step = jax.jit(lambda x: x + 1)
donating = jax.jit(lambda x: x * 2, donate_argnums=0)


def placed(array: Any, *axes: Any) -> jax.Array:
    return jax.device_put(np.asarray(array), NamedSharding(MESH, PartitionSpec(*axes)))


class Outputs:
    """Outputs that can be told by their values; counts those taken, may fail at one, and knows whether it is closed."""

    def __init__(self, length: int, fail_at: int | None = None, rows: int = 4):
        self.pulled = 0
        self.closed = False
        self.length, self.fail_at, self.rows = length, fail_at, rows
        self.refs: list[weakref.ref[Any]] = []

    def __iter__(self) -> Outputs:
        return self

    def __next__(self) -> Any:
        if self.pulled == self.fail_at:
            raise OSError(f"disk {self.pulled}")
        if self.pulled == self.length:
            raise StopIteration
        self.pulled += 1
        array = step(jnp.full(self.rows, self.pulled - 2, jnp.float32))
        self.refs.append(weakref.ref(array))
        return {"x": array}

    def close(self) -> None:
        self.closed = True


def values(results: Any) -> list[int]:
    return [int(np.unique(result["x"]).item()) for result in results]


# ---- what arrives


@pytest.mark.parametrize("axes", [(), ("data",), ("data", "model"), (None, "model"), (("model", "data"),), ("model",)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_arrays_arrive_whole_however_they_are_sharded(axes: Any, dtype: str) -> None:
    """Split, replicated and partly replicated arrays arrive as NumPy arrays with all of their rows, read-only."""
    whole = (np.arange(8 * 6).reshape(8, 6) % 7).astype(jnp.dtype(dtype))
    (result,) = fetch_to_host([placed(whole, *axes)])
    assert type(result) is np.ndarray
    assert result.dtype == whole.dtype
    np.testing.assert_array_equal(result, whole)
    assert not result.flags.writeable


def test_a_tree_keeps_its_form_and_what_is_no_array() -> None:
    """Nodes, scalars, empty arrays, and leaves that are no `jax.Array` arrive in their places."""
    own = np.arange(3)
    output = {
        "a": [jnp.float32(2.5), jnp.zeros((0, 3))],
        "b": (own, "name", 7, None),
        "c": placed(np.arange(8), "data"),
    }
    (result,) = fetch_to_host([output])
    assert result["b"][0] is own
    assert result["b"][1:] == ("name", 7, None)
    assert (result["a"][0].shape, result["a"][0].item()) == ((), 2.5)
    assert result["a"][1].shape == (0, 3)
    np.testing.assert_array_equal(result["c"], np.arange(8))


def test_a_large_sharded_array_is_put_together_by_several_threads() -> None:
    """An array of many megabytes arrives whole, and the copying threads end with the fetcher."""
    whole = np.arange(8 << 20, dtype=np.uint8).reshape(8, -1)
    with fetch_to_host([placed(whole, "data"), placed(whole + 1, "data", "model")]) as results:
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result, whole + i)


@pytest.mark.parametrize("how", ["delete", "donate"])
def test_outputs_may_go_as_soon_as_the_next_is_asked_for(how: str) -> None:
    """A loop that deletes or donates its state right after yielding it gets the values as they were."""

    def states() -> Iterator[jax.Array]:
        for axes in [(), ("data",), ("data", "model")]:
            state = placed(np.ones((8, 6), np.float32), *axes)
            for _ in range(5):
                yield state
                old, state = state, donating(state) if how == "donate" else state * 2
                if how == "delete":
                    old.delete()

    results = list(fetch_to_host(states()))
    assert [np.unique(result).item() for result in results] == [1, 2, 4, 8, 16] * 3


def test_results_stay_as_they_are() -> None:
    """Results that are kept do not change when memory is used again."""
    results = list(fetch_to_host(Outputs(50)))
    for _ in range(50):
        step(jnp.full(4, -7, jnp.float32)).block_until_ready()
    assert values(results) == list(range(50))


def test_transfers_are_explicit() -> None:
    """A loop that forbids implicit transfers may fetch."""
    outputs = [{"x": jnp.full(4, i, jnp.float32)} for i in range(3)] + [{"x": placed(np.full(8, 3.0), "data")}]
    with jax.transfer_guard("disallow"):
        assert values(fetch_to_host(outputs)) == [0, 1, 2, 3]


# ---- how far ahead


@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_are_taken_size_ahead(size: int) -> None:
    """While result k is in the loop's hands, the outputs up to k + size - 1 have been taken, and no more."""
    outputs = Outputs(12)
    for k, _ in enumerate(fetch_to_host(outputs, size)):
        assert outputs.pulled == min(k + size, 12)


@pytest.mark.parametrize(("max_bytes", "ahead"), [(1, 1), (16, 1), (47, 2), (48, 3), ("1KiB", 4)])
def test_max_bytes_holds_copies_back(max_bytes: Any, ahead: int) -> None:
    """No more than `max_bytes` are on their way, but one output is; one more may have been taken."""
    outputs = Outputs(12)
    for k, _ in enumerate(fetch_to_host(outputs, 4, max_bytes=max_bytes)):
        taken = outputs.pulled - k
        assert taken == min(ahead + (ahead < 4), 12 - k)


def test_arrays_are_let_go_of_when_their_copies_have_been_started() -> None:
    """What is on its way keeps no array of the loop's alive."""
    outputs = Outputs(10)
    results = fetch_to_host(outputs)
    next(results)
    assert [ref() for ref in outputs.refs] == [None] * 4


def test_nothing_is_taken_before_the_first_result_is_asked_for() -> None:
    """Making the fetcher runs no step."""
    outputs = Outputs(10)
    fetch_to_host(outputs)
    assert outputs.pulled == 0


@given(
    length=st.integers(0, 12),
    size=st.integers(1, 5),
    max_bytes=st.none() | st.integers(1, 100),
    fail_at=st.none() | st.integers(0, 12),
)
def test_it_is_a_map_over_the_outputs(length: int, size: int, max_bytes: int | None, fail_at: int | None) -> None:
    """Whatever the bounds: the values of the outputs in order, then the end or the iterator's error."""
    outputs = Outputs(length, fail_at)
    fails = fail_at is not None and fail_at <= length
    results, seen = fetch_to_host(outputs, size, max_bytes=max_bytes), []
    try:
        for result in results:
            seen += values([result])
            assert outputs.pulled - len(seen) <= size
    except OSError:
        assert fails
    else:
        assert not fails
    assert seen == list(range(fail_at if fails else length))


# ---- errors


def test_the_iterators_error_comes_after_the_results_before_it() -> None:
    """An error of the iterator is raised in its place, as what it was, again and again, with a note."""
    results = fetch_to_host(Outputs(10, fail_at=3))
    assert values(next(results) for _ in range(3)) == [0, 1, 2]
    lengths = []
    for _ in range(3):
        with pytest.raises(OSError, match="disk 3") as caught:
            next(results)
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1
    assert caught.value.__notes__ == ["jaxprefetch: raised by the outputs' iterator while it made result 3"]


def test_a_typed_key_has_no_host_form() -> None:
    """A typed PRNG key is an error that names the leaf and the cure, after the results before it."""
    results = fetch_to_host([{"x": jnp.ones(2)}, {"rng": jax.random.key(0)}])
    next(results)
    with pytest.raises(TypeError, match=r"Result 1, leaf rng: a typed PRNG key .*key_data"):
        next(results)


def test_an_output_that_was_donated_before_it_came_is_an_error() -> None:
    """An array that is dead when it is yielded is named."""
    dead = jnp.ones(3)
    dead.delete()
    with pytest.raises(ValueError, match="Result 0, leaf metrics/loss: this array has been deleted or donated"):
        next(fetch_to_host([{"metrics": {"loss": dead}}]))


def test_a_step_that_fails_on_the_device_fails_at_its_result(monkeypatch: Any) -> None:
    """The failure of a step that was dispatched long ago is raised in the place of its result, and again."""

    def failing(copy: jax.Array) -> np.ndarray:
        if copy[0] == 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: no such token")
        return np.asarray(copy)

    monkeypatch.setattr(fetch, "to_host", failing)
    results = fetch_to_host(Outputs(5))
    assert values([next(results)]) == [0]
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no such token") as caught:
            next(results)
    assert caught.value.__notes__ == ["jaxprefetch: raised while result 1 was on its way to the host"]


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
def test_size_is_a_positive_integer(size: Any) -> None:
    """Anything else is an error at the call."""
    with pytest.raises(ValueError, match="size: expected an integer of at least 1"):
        fetch_to_host([], size)


def test_outputs_that_cannot_be_iterated_are_an_error() -> None:
    """A single output is no iterable."""
    with pytest.raises(TypeError, match="outputs: expected an iterable of pytrees, got int 3"):
        fetch_to_host(3)  # pyright: ignore[reportArgumentType]


# ---- the end


def test_close_drops_what_is_on_its_way() -> None:
    """Closing closes the iterator; results in the loop's hands stay; afterwards there are no more."""
    outputs = Outputs(10)
    with fetch_to_host(outputs) as results:
        kept = next(results)
    assert outputs.closed
    assert values([kept]) == [0]
    assert list(results) == []
    results.close()


def test_an_abandoned_fetcher_closes_its_generator() -> None:
    """A loop that breaks and drops the fetcher ends the generator, and holds no array."""
    ended = []

    def outputs() -> Iterator[jax.Array]:
        try:
            while True:
                yield step(jnp.zeros(12_345, jnp.float32))
        finally:
            ended.append(True)

    for _ in fetch_to_host(outputs()):
        break
    del _
    gc.collect()
    assert ended == [True]
    assert not [array for array in jax.live_arrays() if array.shape == (12_345,)]


def test_the_end_stays_the_end() -> None:
    """After the last result there is none, and the outputs are not asked again."""
    results = fetch_to_host(iter([jnp.ones(1)]))
    assert len(list(results)) == 1
    assert list(results) == []


# ---- without pinned memory


def test_without_pinned_memory_results_are_the_same(monkeypatch: Any) -> None:
    """On a device that has none, JAX's own copies are taken."""
    monkeypatch.setattr(device_fetch, "_has_pinned", lambda device: False)
    outputs = [{"x": placed(np.full((8, 6), i, np.float32), "data")} for i in range(5)]
    with jax.transfer_guard("disallow"):
        assert values(fetch_to_host(outputs)) == list(range(5))


def test_without_pinned_memory_left_results_are_the_same(monkeypatch: Any) -> None:
    """Where pinned memory runs out, JAX's own copies are taken; another failure is an error."""
    put, text = jax.device_put, ["RESOURCE_EXHAUSTED: out of pinned memory"]

    def refusing(x: Any, device: Any = None, **options: Any) -> Any:
        if options.get("may_alias") is False:
            raise jax.errors.JaxRuntimeError(text[0])
        return put(x, device, **options)

    monkeypatch.setattr(jax, "device_put", refusing)
    assert values(fetch_to_host(Outputs(5))) == list(range(5))
    text[0] = "INTERNAL: broken"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        next(fetch_to_host(Outputs(5)))


# ---- this process's part


class Scattered:
    """A sharding of which this process has only some shards."""

    def __init__(self, *indices: tuple[slice, ...]):
        self.indices = indices

    def addressable_devices_indices_map(self, shape: Any) -> Any:
        return dict(enumerate(self.indices))


def test_the_part_of_a_process_is_its_block() -> None:
    """Rows 4 to 8 on two devices, each twice, are four rows; the first shard of each content is taken."""
    first, second = (slice(4, 6),), (slice(6, None),)
    part = local_part(Scattered(second, first, second, first), (8,))  # pyright: ignore[reportArgumentType]
    assert part.shape == (4,)
    assert dict(zip(part.shards, part.places, strict=True)) == {0: (slice(2, 4),), 1: (slice(0, 2),)}


def test_a_part_that_is_no_block_is_an_error() -> None:
    """Rows from two places cannot be one array."""
    with pytest.raises(ValueError, match=r"are no block of an array of shape \(8,\)"):
        local_part(Scattered((slice(0, 2),), (slice(6, 8),)), (8,))  # pyright: ignore[reportArgumentType]
