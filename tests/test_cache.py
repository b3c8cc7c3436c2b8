"""`DeviceCache`: what was inserted is what is taken, in place, on the device that has it; bytes and state."""

from __future__ import annotations

import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached import PLACES, SPEC, SPLIT, content, examples, numbers
from gated import InThread, wait
from jax.sharding import AxisType

from jaxprefetch import DeviceCache, store
from jaxprefetch.device import resident

# ---- what is in it


@pytest.mark.parametrize("place", PLACES)
def test_slots_are_taken_as_they_were_filled(place: str) -> None:
    """Whatever the sharding: rows are the examples of the slots asked for, placed as the cache is, and committed so."""
    with DeviceCache(16, examples(*range(16)), sharding=PLACES[place]) as cache:
        each = cache._layout.each
        slots = [first + own for first in range(0, 16, each) for own in (each - 1, 0)]
        batch = cache.take(slots)
        assert numbers(batch) == slots
        expected = jax.device_put(examples(*slots), PLACES[place])
        for name in batch:
            assert batch[name].sharding.is_equivalent_to(expected[name].sharding, batch[name].ndim)
            assert batch[name].committed == expected[name].committed
        assert len(cache) == cache.capacity == 16


@pytest.mark.parametrize("place", PLACES)
def test_examples_are_replaced_in_place(place: str) -> None:
    """An insert writes into the same device memory, and what was taken before stays as it was."""
    with DeviceCache(16, examples(*range(16)), sharding=PLACES[place]) as cache:

        def addresses() -> list[int]:
            arrays = cache._store.resident.arrays
            return [shard.data.unsafe_buffer_pointer() for a in arrays for shard in a.addressable_shards]

        before, slots = addresses(), np.arange(0, 16, 2)
        batch = cache.take(slots)
        cache.insert(examples(*range(100, 108)), slots)
        assert addresses() == before
        assert numbers(batch) == slots.tolist()
        assert content(cache)[::2] == list(range(100, 108))
        assert content(cache)[1::2] == list(range(1, 16, 2))


def test_the_oldest_go_first() -> None:
    """Inserts fill the cache and then go round; a named slot is young again."""
    with DeviceCache(4, SPEC) as cache:
        assert len(cache) == 0
        cache.insert(examples(1, 2, 3))
        assert (content(cache), len(cache)) == ([1, 2, 3, 0], 3)
        cache.insert(examples(11), [0])
        cache.insert(examples(4, 5))
        assert (content(cache), len(cache)) == ([11, 5, 3, 4], 4)
        cache.insert(examples(6, 7))
        assert content(cache) == [7, 5, 6, 4]


def test_many_examples_are_written_in_pieces(monkeypatch: Any) -> None:
    """More rows than go at once arrive in the same slots, also when they are more than fit before the end."""
    monkeypatch.setattr(store, "PIECE_BYTES", 60)  # three rows
    with DeviceCache(40, examples(*range(32)), sharding=SPLIT) as cache:
        each = [range(8 * d, 8 * d + 8) for d in range(4)]
        assert content(cache) == [n for own in each for n in (*own, 0, 0)]
        cache.insert(examples(*range(100, 116)))
        assert content(cache)[:10] == [102, 103, 2, 3, 4, 5, 6, 7, 100, 101]


def test_host_arrays_may_change_after_the_insert() -> None:
    """The source's buffer can be used again at once, whatever its alignment."""
    raw = np.zeros(64 * 17, np.uint8)
    with DeviceCache(64, {"x": jax.ShapeDtypeStruct((4,), jnp.float32)}) as cache:
        for offset in (0, 4, 16, 64):
            start = -raw.ctypes.data % 64 + offset
            buffer = raw[start : start + 256].view(np.float32).reshape(16, 4)
            buffer[:] = offset + 1
            cache.insert({"x": buffer})
            buffer[:] = -1
        assert np.unique(np.asarray(cache._store.resident.arrays[0])).tolist() == [1, 5, 17, 65]


def test_arrays_on_devices_are_inserted_and_stay() -> None:
    """`jax.Array` leaves go in without the host, and are the caller's as before."""
    given = jax.device_put(examples(*range(8)), SPLIT)
    with DeviceCache(16, SPEC, sharding=SPLIT) as cache:
        cache.insert(given)
        cache.insert(jax.tree.map(lambda leaf: leaf + leaf.dtype.type(50), given))
        assert content(cache)[:4] == [0, 1, 50, 51]
        assert numbers(given) == list(range(8))


def test_indices_on_devices_are_clipped_to_what_each_has() -> None:
    """Indices that stay on the devices are not checked: one out of a device's filled slots is the nearest of these."""
    with DeviceCache(16, examples(*range(1, 9)), sharding=SPLIT) as cache:
        indices = jax.device_put(np.array([-5, 1, 4, 99, 0, 8, 15, 13], np.int32), SPLIT)
        assert numbers(cache.take(indices)) == [1, 2, 3, 4, 5, 5, 8, 8]
        with jax.enable_x64(True):
            wide = jnp.array([0, 1, 4, 5, 8, 9, 12, 13], jnp.int64)
        assert numbers(cache.take(wide)) == list(range(1, 9))


def test_dtypes_follow_jax() -> None:
    """64-bit rows become 32-bit where JAX makes them so, and what would wrap is an error."""
    with DeviceCache(2, {"n": np.array([1, 2])}) as cache:
        assert cache.element_spec == {"n": jax.ShapeDtypeStruct((), jnp.int32)}
        cache.insert({"n": np.array([3])})
        with pytest.raises(OverflowError, match="insert, leaf n: 4294967296 does not fit int32"):
            cache.insert({"n": np.array([1 << 32])})
        assert content(cache) == [3, 2]


def test_it_works_under_any_context() -> None:
    """Another mesh in force, a transfer guard, disabled jit and another default device change nothing."""
    key = jax.random.key(0)
    with DeviceCache(16, examples(*range(8)), sharding=SPLIT) as cache:
        plain = numbers(next(cache.batches(8, key)))
        slots = [4 * d + own for d in range(4) for own in (0, 1)]
        with (
            jax.set_mesh(jax.make_mesh((8,), ("other",), axis_types=(AxisType.Auto,))),
            jax.transfer_guard_host_to_device("disallow"),
            jax.disable_jit(),
            jax.default_device(jax.devices()[5]),
        ):
            assert numbers(cache.take(slots)) == list(range(8))
            assert numbers(next(cache.batches(8, key))) == plain
            next(cache.batches(8, key, replace=False))
            cache.insert(examples(*range(20, 28)))
        assert content(cache) == [0, 1, 20, 21, 2, 3, 22, 23, 4, 5, 24, 25, 6, 7, 26, 27]


# ---- bytes


@pytest.mark.parametrize(("place", "shards"), [("default", 1), ("split", 4), ("replicated", 1), ("inner axis, too", 4)])
def test_bytes_are_those_of_the_arrays(place: str, shards: int) -> None:
    """`nbytes` is what the arrays take on a device, and an insert needs no memory beside its rows."""
    with DeviceCache(16, SPEC, sharding=PLACES[place]) as cache:
        assert cache.nbytes == sum(a.addressable_shards[0].data.nbytes for a in cache._store.resident.arrays)
        memory = resident._write(cache._layout, 4).memory_analysis()
        assert memory.alias_size_in_bytes >= cache.nbytes
        assert memory.temp_size_in_bytes < 1000


def test_too_many_for_max_bytes_is_an_error() -> None:
    """The limit is checked before anything is allocated, and the error says how many would fit."""
    text = r"capacity: 1,000 examples take 20,000 bytes on a device, max_bytes is 1,024, in which 51 examples would fit"
    with pytest.raises(ValueError, match=text):
        DeviceCache(1000, SPEC, max_bytes="1KiB")
    with pytest.raises(ValueError, match="take 5,000 bytes on a device, max_bytes is 1,024, in which 204"):
        DeviceCache(1000, SPEC, sharding=SPLIT, max_bytes="1KiB")


def test_too_many_for_the_device_is_an_error() -> None:
    """More than the memory that is free is an error before it is asked for."""
    with pytest.raises(ValueError, match=r"take .* bytes on a device, .* has free .*smaller capacity"):
        DeviceCache(1 << 50, SPEC)


def test_close_gives_the_memory_back() -> None:
    """A closed cache holds no device memory; batches live on; any use of it is an error."""
    cache = DeviceCache(8, {"n": np.arange(8, dtype=np.int32), "x": np.ones((8, 1237), np.float32)})
    batches = cache.batches(4, jax.random.key(0))
    batch = cache.take([1, 2])
    cache.close()
    cache.close()
    gc.collect()
    assert not [a for a in jax.live_arrays() if a.shape == (8, 1237)]
    assert np.asarray(batch["n"]).tolist() == [1, 2]
    for use in (lambda: cache.take([0]), lambda: next(batches), lambda: cache.insert(batch), cache.get_state):
        with pytest.raises(ValueError, match="this cache is closed"):
            use()


def test_one_thread_at_a_time(monkeypatch: Any) -> None:
    """A call while another thread is inside one is refused, with the way out."""
    with DeviceCache(8, examples(*range(8))) as cache:
        inside, leave = threading.Event(), threading.Event()
        take = type(cache._store.resident).take

        def slow(self: Any, slots: Any) -> Any:
            inside.set()
            wait(leave)
            return take(self, slots)

        monkeypatch.setattr(type(cache._store.resident), "take", slow)
        thread = InThread(lambda: numbers(cache.take([5])))
        wait(inside)
        with pytest.raises(RuntimeError, match=r"insert\(\) was called while another call runs.*refresh"):
            cache.insert(examples(1))
        leave.set()
        assert thread.result() == [5]


# ---- state


@pytest.mark.parametrize("place", ["default", "split"])
def test_a_saved_cache_is_restored(place: str) -> None:
    """Examples, their ages and the counts come back, into another cache of the same form."""
    with DeviceCache(16, examples(*range(8)), sharding=PLACES[place]) as cache:
        cache.insert(examples(*range(20, 24)))
        first = cache._layout.each
        cache.insert(examples(30, 31, 32, 33), np.arange(4) if place == "default" else np.arange(4) * first)
        next(cache.batches(4, jax.random.key(0)))
        state = jax.tree.map(np.array, cache.get_state())
        with DeviceCache(16, SPEC, sharding=PLACES[place]) as other:
            other.set_state(state)
            for leaf in jax.tree.leaves(state):
                leaf.fill(0)  # what was passed is nobody's but the caller's
            assert (len(other), other.takes, content(other)) == (12, 1, content(cache))
            for both in (cache, other):
                both.insert(examples(*range(40, 56)))
                both.insert(examples(*range(60, 64)))
            assert content(other) == content(cache)


def test_a_state_of_another_cache_is_an_error() -> None:
    """Another capacity or split is refused, and nothing is changed."""
    with DeviceCache(8, examples(*range(8))) as small, DeviceCache(16, examples(*range(16))) as cache:
        with pytest.raises(ValueError, match=r"state: expected that of a cache of 16 slots on 1 devices, got 8"):
            cache.set_state(small.get_state())
        state = cache.get_state()
        state["by_age"] = np.zeros_like(state["by_age"])
        with pytest.raises(ValueError, match="state: expected that of a cache of 16 slots"):
            cache.set_state(state)
        assert content(cache) == list(range(16))
