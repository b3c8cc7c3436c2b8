"""What only a GPU shows of `DeviceCache` and `DeviceQueue`: bytes as announced, in place, right under run-ahead."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefetch import DeviceCache, DeviceQueue

pytestmark = pytest.mark.gpu

WIDTH = 1 << 16  # 256 KiB of float32 a row
SPEC = {"x": jax.ShapeDtypeStruct((WIDTH,), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}
MIB = 1 << 20
busy = jax.jit(lambda a: jax.lax.fori_loop(0, 20, lambda _, b: b @ a / 64.0, a))
check = jax.jit(lambda batch: jnp.all(batch["x"] == batch["n"][:, None].astype(jnp.float32)))


def rows(first: int, n: int) -> dict[str, np.ndarray]:
    numbers = np.arange(first, first + n, dtype=np.int32)
    return {"x": np.repeat(numbers.astype(np.float32)[:, None], WIDTH, axis=1), "n": numbers}


def bytes_in_use(key: str = "bytes_in_use") -> int:
    return jax.local_devices()[0].memory_stats()[key]


def test_bytes_are_as_announced() -> None:
    """A cache takes what it says, and inserts take no second copy of it."""
    before = bytes_in_use()
    with DeviceCache(4096, SPEC) as cache:  # 1 GiB
        assert 0 <= bytes_in_use() - before - cache.nbytes < MIB
        for first in range(0, 8192, 512):
            cache.insert(rows(first, 512))
        jax.block_until_ready(cache.take(range(8)))
        assert bytes_in_use() - before - cache.nbytes < 256 * MIB
        assert bool(check(cache.take(range(0, 4096, 8))))
        assert bytes_in_use("peak_bytes_in_use") - before < cache.nbytes + 1024 * MIB
    assert bytes_in_use() - before < 64 * MIB


def test_more_than_the_device_has_is_an_error_and_nothing_is_taken() -> None:
    """The error tells what is free, before anything is allocated."""
    before = bytes_in_use()
    with pytest.raises(ValueError, match="has free"):
        DeviceCache(1 << 30, SPEC)
    assert bytes_in_use() - before < MIB


@pytest.mark.parametrize("deterministic", [True, False])
def test_batches_are_whole_while_they_are_refreshed(deterministic: bool) -> None:
    """With steps that nobody waits for, no row of any batch is half written, and the newest examples come."""
    numbers, right = [], []
    a = jnp.eye(2048)
    with DeviceCache(1024, rows(0, 1024)) as cache:
        cache.refresh((rows(1024 + 64 * j, 64) for j in range(1000)), deterministic=deterministic)
        batches = cache.batches(256, jax.random.key(0))
        for _ in range(200):
            batch = next(batches)
            right.append(check(batch))
            a = busy(a)
            numbers.append(batch["n"])
        assert all(map(bool, right))
        if deterministic:
            assert cache.refreshes == 199
        newest = 1024 + 64 * cache.refreshes
        assert newest - 1024 <= int(numbers[-1].min()) <= int(numbers[-1].max()) < newest


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_queues_device_memory_is_bounded(size: int) -> None:
    """Right after every get no more than `size` batches are on the device besides the consumer's."""
    nbytes, most = 64 * MIB, 0
    jax.device_put(np.zeros(1)).block_until_ready()
    before = bytes_in_use()
    queue, a = DeviceQueue(size), jnp.eye(2048)

    def produce() -> None:
        buffer = np.empty(nbytes // 4, np.float32)
        for n in range(40):
            buffer[:] = n
            queue.put({"x": buffer})
        queue.close()

    thread = threading.Thread(target=produce)
    thread.start()
    for n, batch in enumerate(queue):
        most = max(most, bytes_in_use() - before)
        assert (float(batch["x"][0]), float(batch["x"][-1])) == (n, n)
        a = busy(a)
    thread.join()
    del batch
    assert n == 39
    assert most <= (size + 1) * nbytes + 64 * MIB
