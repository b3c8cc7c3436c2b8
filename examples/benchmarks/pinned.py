"""Random batches in host memory, pinned where the runtime can register it.

    with pinned.host_batches({"image": ((1024, 227, 227, 3), np.uint8)}, count=4, client=client) as pinned_batches:
        for batch in pinned_batches.forever():
            ...                                  # a dict of views; nobody writes to them again

Pinned memory is one anonymous mapping with huge pages, registered with the driver in one call of the client's `dma_map`
(jaxlib 0.10.2 and later on GPU). From such memory JAX copies directly; other memory it copies to a buffer first.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

Spec = Mapping[str, tuple[tuple[int, ...], type]]
"""Shape and dtype of each leaf."""

Batch = dict[str, np.ndarray]

ALIGNMENT = 64
HUGE_PAGE = 2 << 20
CHUNK = 16 << 20
THREADS = min(16, os.cpu_count() or 1)


@dataclass(frozen=True)
class HostBatches:
    """A few distinct batches that a source yields in turn, for ever, and never writes to again."""

    batches: list[Batch]
    pinned: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one batch, all leaves and all devices."""
        return sum(leaf.nbytes for leaf in self.batches[0].values())

    def forever(self) -> Iterator[Batch]:
        """Yields the batches in turn without an end."""
        for batch in itertools.cycle(self.batches):
            yield dict(batch)

    def by_device(self, devices: int) -> HostBatches:
        """The same memory seen with a leading device axis: `(devices, rows, ...)`, as pmap takes it."""
        views = [
            {name: leaf.reshape(devices, leaf.shape[0] // devices, *leaf.shape[1:]) for name, leaf in batch.items()}
            for batch in self.batches
        ]
        return HostBatches(views, self.pinned)

    def pageable_copy(self) -> HostBatches:
        """The same values in ordinary NumPy arrays."""
        copies = [{name: np.empty(leaf.shape, leaf.dtype) for name, leaf in batch.items()} for batch in self.batches]
        with ThreadPoolExecutor(THREADS) as pool:
            for batch, source in zip(copies, self.batches, strict=True):
                for name, leaf in batch.items():
                    pieces = zip(_chunks(leaf), _chunks(source[name]), strict=True)
                    list(pool.map(lambda piece: np.copyto(*piece), pieces))
        return HostBatches(copies, pinned=False)


@contextlib.contextmanager
def host_batches(spec: Spec, count: int, client, seed: int = 0) -> Iterator[HostBatches]:
    """Allocates `count` random batches in pinned memory.

    Args:
        spec: shape and dtype of each leaf.
        count: number of distinct batches.
        client: the client whose `dma_map` registers the memory. Where it has none or refuses, as on CPU, the memory is
            ordinary and `pinned` false.
        seed: of the random values.

    Yields:
        The batches. All transfers from them must have landed when the context ends: their memory is unregistered then.
    """
    slot = sum(_padded(_nbytes(shape, dtype)) for shape, dtype in spec.values())
    with pinned_bytes(slot * count, client, lambda memory: _fill(memory, spec, count, seed)) as (memory, is_pinned):
        yield HostBatches(_views(memory, spec, count), is_pinned)


@contextlib.contextmanager
def both(spec: Spec, count: int, client) -> Iterator[dict[str, HostBatches]]:
    """Yields the same random batches twice, by "pinned" and "pageable"."""
    with host_batches(spec, count, client) as batches:
        yield {"pinned": batches, "pageable": batches.pageable_copy()}


@contextlib.contextmanager
def pinned_bytes(nbytes: int, client, fill) -> Iterator[tuple[np.ndarray, bool]]:
    """Maps anonymous memory, lets `fill` write it, and registers it; yields the bytes and whether they are pinned."""
    mapping = mmap.mmap(-1, -(-max(nbytes, 1) // HUGE_PAGE) * HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    fill(memory)  # before it is registered: several threads touch the pages faster than the driver does
    address = memory.ctypes.data
    is_pinned = _register(client, address, len(mapping))
    try:
        yield memory[:nbytes], is_pinned
    finally:
        if is_pinned:
            with contextlib.suppress(RuntimeError):  # an array deleted meanwhile
                jax.block_until_ready(jax.live_arrays())  # a peer's buffer may hold copies that nobody has waited for
            client.dma_unmap(address)


def touch(nbytes: int) -> None:
    """Uses so many bytes and gives them back: a virtual machine may get them only then, and who comes first waits."""
    with pinned_bytes(nbytes, None, _zero):
        pass


def _zero(memory: np.ndarray) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda chunk: chunk.fill(0), _chunks(memory)))


def _register(client, address: int, nbytes: int) -> bool:
    if not hasattr(client, "dma_map"):  # jaxlib < 0.10.2
        return False
    try:
        client.dma_map(address, nbytes)
    except Exception as error:  # UNIMPLEMENTED on CPU; the type differs between versions
        if client.platform != "cpu":
            print(f"dma_map refused {nbytes} bytes, the memory stays pageable: {error}", flush=True)
        return False
    return True


def _nbytes(shape: tuple[int, ...], dtype: type) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _views(memory: np.ndarray, spec: Spec, count: int) -> list[Batch]:
    batches, offset = [], 0
    for _ in range(count):
        batch = {}
        for name, (shape, dtype) in spec.items():
            size = int(np.prod(shape))
            batch[name] = np.frombuffer(memory.data, dtype, size, offset).reshape(shape)
            offset += _padded(_nbytes(shape, dtype))
        batches.append(batch)
    return batches


def _chunks(leaf: np.ndarray) -> list[np.ndarray]:
    flat = leaf.reshape(-1)
    step = max(1, CHUNK // leaf.itemsize)
    return [flat[start : start + step] for start in range(0, flat.size, step)]


def _fill(memory: np.ndarray, spec: Spec, count: int, seed: int) -> None:
    pieces = [chunk for batch in _views(memory, spec, count) for leaf in batch.values() for chunk in _chunks(leaf)]
    seeds = np.random.SeedSequence(seed).spawn(len(pieces))
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(_random, pieces, seeds))


def _random(piece: np.ndarray, seed: np.random.SeedSequence) -> None:
    rng = np.random.Generator(np.random.SFC64(seed))
    if piece.dtype == np.float32:
        rng.random(out=piece, dtype=np.float32)
    elif piece.dtype == np.uint8:
        piece[:] = rng.integers(0, 256, piece.size, np.uint8)
    elif piece.dtype == np.bool_:
        piece[:] = rng.integers(0, 2, piece.size, np.uint8)
    else:
        piece[:] = rng.integers(0, 10, piece.size, piece.dtype)
