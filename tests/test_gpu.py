"""What only a GPU shows: memory right after every issue, landing, fences, and steps that nobody waits for."""

from __future__ import annotations

import functools
import mmap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxprefetch import prefetch_to_device

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 4096, 4096  # 64 MiB of float32
BATCH_BYTES = ROWS * COLUMNS * 4


@functools.cache
def pinned_batches(n: int = 6) -> list[np.ndarray]:
    """Random batches in memory registered with the driver; the source never writes to them again."""
    memory = mmap.mmap(-1, n * BATCH_BYTES)
    data = np.frombuffer(memory, np.float32).reshape(n, ROWS, COLUMNS)
    data[:] = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    data[:, 0, 0] = np.arange(n)
    client = jax.local_devices()[0].client
    if hasattr(client, "dma_map"):
        client.dma_map(data.__array_interface__["data"][0], n * BATCH_BYTES)
    return list(data)


def source(n: int):
    """`n` batches, which a step can tell apart by their first element."""
    batches = pinned_batches()
    for i in range(n):
        yield batches[i % len(batches)]


@functools.partial(jax.jit, donate_argnums=0)
def step(total, batch):
    """About 1 ms, without temporaries: one row at a time."""

    def add_row(i, total):
        return total + batch[i % ROWS, 0] * 0.5

    return jax.lax.fori_loop(0, 400, add_row, total) + batch[0, 0]


first = jax.jit(lambda batch: batch[0, 0])


def bytes_in_use() -> int:
    return jax.local_devices()[0].memory_stats()["bytes_in_use"]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("delete_used", [False, True])
def test_memory_right_after_every_issue_is_within_the_bound(size, delete_used):
    """Right after next() has issued, with the last batch still bound, no more than the bound is in use."""
    bound = size if delete_used else size + 1
    step(jnp.float32(0), jax.device_put(pinned_batches()[0])).block_until_ready()
    before = bytes_in_use()
    most, total = 0, jnp.float32(0)
    with prefetch_to_device(source(40), size, delete_used=delete_used, fresh_buffers=True) as batches:
        batch = next(batches)
        for _ in range(39):
            total = step(total, batch)
            new = next(batches)
            most = max(most, bytes_in_use() - before)
            batch = new
        assert batches.statistics().peak_in_flight <= bound
    del new, batch
    total.block_until_ready()
    assert most <= bound * BATCH_BYTES + (1 << 20)
    assert most >= min(bound, 2) * BATCH_BYTES - (1 << 20)


@pytest.mark.parametrize(("cap", "delete_used"), [(2, False), (3, False), (1, True), (2, True)])
def test_max_bytes_is_never_exceeded(cap, delete_used):
    """With a tight cap fewer batches go ahead, and the device never holds more."""
    step(jnp.float32(0), jax.device_put(pinned_batches()[0])).block_until_ready()
    before = bytes_in_use()
    most, total = 0, jnp.float32(0)
    options = {"max_bytes": cap * BATCH_BYTES, "delete_used": delete_used, "fresh_buffers": True}
    with prefetch_to_device(source(30), 3, **options) as batches:
        batch = None
        for _ in range(30):
            new = next(batches)
            most = max(most, bytes_in_use() - before)
            batch = new
            total = step(total, batch)
        statistics = batches.statistics()
    assert statistics.peak_bytes_in_flight <= cap * BATCH_BYTES
    assert most <= cap * BATCH_BYTES + (1 << 20), statistics
    assert np.isfinite(float(total))


def test_a_thousand_steps_that_nobody_waits_for_keep_memory_flat():
    """The loop runs ahead of the device as far as it may; memory stays at the bound of size + 1."""
    step(jnp.float32(0), jax.device_put(pinned_batches()[0])).block_until_ready()
    before, total, use = bytes_in_use(), jnp.float32(0), []
    with prefetch_to_device(source(1000), 2, fresh_buffers=True) as batches:
        for batch in batches:
            total = step(total, batch)
            use.append(bytes_in_use() - before)
    del batch
    assert max(use) <= 3 * BATCH_BYTES + (1 << 20)
    assert max(use[500:]) <= max(use[:500])
    assert np.isfinite(float(total))


@pytest.mark.parametrize("delete_used", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_deleting_each_batch_gives_right_values(size, delete_used):
    """A loop that deletes every batch right after its step gets every batch, and nothing crashes."""
    seen = []
    with prefetch_to_device(source(60), size, delete_used=delete_used, fresh_buffers=True) as batches:
        for batch in batches:
            seen.append(first(batch))
            batch.delete()
    assert [float(x) for x in seen] == [i % 6 for i in range(60)]


@pytest.mark.parametrize("delete_used", [False, True])
def test_donating_each_batch_gives_right_values(delete_used):
    """A step that takes over the batch's memory is no trouble."""
    take_over = jax.jit(lambda batch: batch + 1, donate_argnums=0)
    seen = []
    with prefetch_to_device(source(60), delete_used=delete_used, fresh_buffers=True) as batches:
        for batch in batches:
            seen.append(take_over(batch)[0, 0])
    assert [float(x) for x in seen] == [i % 6 + 1 for i in range(60)]


def test_skipping_and_keeping_batches_gives_right_values():
    """Batches without a step, and batches that are all kept, hold what the source yielded."""
    with prefetch_to_device(source(12), fresh_buffers=True) as batches:
        kept = [batch for i, batch in enumerate(batches) if i % 2]
    assert [float(batch[0, 0]) for batch in kept] == [i % 6 for i in range(12) if i % 2]
    want = pinned_batches()
    for i, batch in enumerate(kept):
        np.testing.assert_array_equal(np.asarray(batch), want[(2 * i + 1) % 6])


def test_pageable_batches_that_the_source_overwrites_do_not_change():
    """Without the promise of fresh buffers a source may reuse one buffer for all batches."""
    buffer = np.empty((1024, 1024), np.float32)

    def reusing():
        for i in range(40):
            buffer[:] = i
            yield buffer

    with prefetch_to_device(reusing()) as batches:
        sums = [(batch.min(), batch.max()) for batch in batches]
    assert [(float(low), float(high)) for low, high in sums] == [(i, i) for i in range(40)]


def test_a_batch_that_does_not_fit_the_device_is_an_error_with_the_figures():
    """Memory that is not there: the put is tried again when the batch is needed, then the error says how much."""
    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (limit + (1 << 30),), (0,))
    with (
        prefetch_to_device(iter([huge]), fresh_buffers=True) as batches,
        pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught,
    ):
        next(batches)
    assert any("needs" in note and "bytes on a device" in note for note in caught.value.__notes__)


def bits(seed: int) -> dict[str, np.ndarray]:
    """Small leaves of many types with any bits in them, NaNs of every kind among them."""
    rng = np.random.default_rng(seed)
    names = ["bool", "int8", "uint16", "int32", "uint32", "float16", "float32", "complex64"]
    names += ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
    out = {}
    for name in names:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        high = 2 if name == "bool" else 256
        out[name] = rng.integers(0, high, 240 * dtype.itemsize, np.uint8).view(dtype).reshape(8, 30)
    return out


@pytest.mark.parametrize("sharding", [None, "all devices"])
@pytest.mark.parametrize("dispose", ["keeps", "deletes", "delete_used"])
def test_packed_leaves_arrive_bit_by_bit(sharding, dispose):
    """Over 50 batches small leaves of all types, packed, and a large one beside them are what the source yielded."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
    target = None if sharding is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    source = ({**bits(i), "large": np.full((64, 1 << 14), i, np.float32)} for i in range(50))
    with prefetch_to_device(source, sharding=target, delete_used=dispose == "delete_used") as batches:
        for i, batch in enumerate(batches):
            if i == 0:
                assert batches._feed._issued[0].plan.packing is not None
            for name, leaf in bits(i).items():
                assert np.asarray(batch[name]).tobytes() == leaf.tobytes(), (i, name)
            assert float(batch["large"].min()) == float(batch["large"].max()) == i
            if dispose == "deletes":
                jax.tree.map(lambda leaf: leaf.delete(), batch)
    assert i == 49


@pytest.mark.parametrize("dispose", ["keeps", "deletes", "delete_used"])
def test_on_device_sees_every_batch(dispose):
    """Over 50 batches uint8 crosses the link and bfloat16 feeds the step, with the right values, within the cap."""
    raw = [np.random.default_rng(i).integers(0, 256, (256, 1 << 14), np.uint8) for i in range(4)]
    n = raw[0].nbytes
    options = {"on_device": lambda batch: batch.astype(jnp.bfloat16), "delete_used": dispose == "delete_used"}
    wanted = [leaf.astype(ml_dtypes.bfloat16) for leaf in raw]
    with prefetch_to_device((raw[i % 4] for i in range(50)), max_bytes=8 * n, **options) as batches:
        for i, batch in enumerate(batches):
            np.testing.assert_array_equal(np.asarray(batch), wanted[i % 4])
            if dispose == "deletes":
                batch.delete()
        assert batches.statistics().peak_bytes_in_flight <= 8 * n
    assert i == 49
