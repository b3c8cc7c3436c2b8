"""Copies by several threads: NumPy copies with one, which is a fifth of what the memory of a server gives.

Synopsis:

    copier = Copier()
    copier.copy([(slot_view, leaf)])           # returns when it is done

The threads are shared by all copiers of the process, and end with the last of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np

from jaxprefetch.host.memory import usable_cores

# Measured by examples/benchmarks/copying.py: on 16 cores one thread copies 7 to 11 GiB/s, 8 threads 32, 16 threads 44;
# at 16 MiB 8 threads copy 35 in one piece each and 24 in pieces of half or twice that; waking one takes about 60 us.
MOST_THREADS = 16
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 1 << 20, 2 << 20
PARALLEL_BYTES = 4 << 20
"""What is smaller is copied on the calling thread."""

HELD_BYTES = 64 << 10
"""Smaller arrays are copied without letting go of the GIL, which NumPy does from 500 values on: the loop's thread would
take it each time, and each time give it back only after a while."""

T = TypeVar("T")
Task = Callable[[], object]
Pair = tuple[np.ndarray, np.ndarray]
"""Where to, and from where: the same shape."""

_lock = threading.Lock()
_pools: weakref.WeakValueDictionary[int, ThreadPoolExecutor] = weakref.WeakValueDictionary()  # guarded by _lock


def copying_threads() -> int:
    """Half of the cores that the process may use, for the loader needs the others; `MOST_THREADS` at most."""
    return max(1, min(MOST_THREADS, usable_cores() // 2))


class Copier:
    """Runs copies on the process's threads and on the caller's.

    Args:
        threads: how many together.
    """

    def __init__(self, threads: int | None = None):
        self.threads = copying_threads() if threads is None else threads
        self._pool = _pool(self.threads - 1) if self.threads > 1 else None

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Copies each second array into the first, converted where the dtypes differ. Blocking: until it is done."""
        pairs = list(pairs)
        nbytes = sum(out.nbytes for out, _ in pairs)
        if self._pool is None or nbytes < PARALLEL_BYTES:
            _copy_all(deque([pairs]))
        else:
            chunk = min(max(nbytes // self.threads, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)
            self._share(self._pool, deque(_portions(pairs, chunk)), _copy_all)

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs tasks that release the GIL, in any order. Blocking: until all are done; raises what one has raised."""
        if self._pool is None or len(tasks) < 2:
            _run_all(deque(tasks))
        else:
            self._share(self._pool, deque(tasks), _run_all)

    def _share(self, pool: ThreadPoolExecutor, work: deque[T], do_all: Callable[[deque[T]], None]) -> None:
        """Each thread takes from the same queue, so that none waits for a slower one."""
        try:
            helpers = [pool.submit(do_all, work) for _ in range(min(self.threads, len(work)) - 1)]
        except RuntimeError:  # the interpreter shuts down
            helpers = []
        try:
            do_all(work)
        finally:
            wait(helpers)  # they write to memory that the caller gives away
        for helper in helpers:
            helper.result()


def _copy_all(work: deque[list[Pair]]) -> None:
    with np.errstate(all="ignore"):  # a float64 that becomes an infinite float32 does so in jax.device_put, too
        while work:
            try:
                pairs = work.popleft()
            except IndexError:  # another thread was quicker
                return
            for out, leaf in pairs:
                _copy_one(out, leaf)


def _copy_one(out: np.ndarray, leaf: np.ndarray) -> None:
    if out.nbytes <= HELD_BYTES and out.dtype == leaf.dtype:
        try:
            out.data.cast("B")[:] = leaf.data.cast("B")
            return
        except (TypeError, ValueError):  # not contiguous, empty, or of a type that buffers do not know
            pass
    np.copyto(out, leaf, casting="unsafe")


def _run_all(work: deque[Task]) -> None:
    while work:
        try:
            task = work.popleft()
        except IndexError:
            return
        task()


def _portions(pairs: Iterable[Pair], chunk: int) -> Iterable[list[Pair]]:
    """The same copies in portions of about so many bytes."""
    portion: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        for piece in _chunks(*pair, chunk):
            portion.append(piece)
            nbytes += piece[0].nbytes
            if nbytes >= chunk:
                yield portion
                portion, nbytes = [], 0
    if portion:
        yield portion


def _chunks(out: np.ndarray, leaf: np.ndarray, chunk: int) -> list[Pair]:
    """The same copy in pieces, along the flat array where both are contiguous, else along the longest axis."""
    pieces = -(-out.nbytes // chunk)
    if pieces < 2:
        return [(out, leaf)]
    if out.flags.c_contiguous and leaf.flags.c_contiguous:
        out, leaf = out.reshape(-1), leaf.reshape(-1)
    axis = max(range(out.ndim), key=lambda i: out.shape[i])
    step = -(-out.shape[axis] // pieces)
    before = (slice(None),) * axis
    parts = [(*before, slice(start, start + step)) for start in range(0, out.shape[axis], step)]
    return [(out[part], leaf[part]) for part in parts]


def _pool(threads: int) -> ThreadPoolExecutor:
    """The process's pool of so many threads; when nobody refers to it any more, they end."""
    with _lock:
        pool = _pools.get(threads)
        if pool is None:
            pool = _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="jaxprefetch-copy")
        return pool
