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

# Measured by examples/benchmarks/copying.py. On 16 cores one thread copies 7 to 11 GiB/s, 8 threads 32, 16 threads 44; at
# 16 MiB 8 threads copy 35 in pieces of 2 MiB and 24 in pieces of 1 or 4; waking one takes about 60 us.
MOST_THREADS = 16
CHUNK_BYTES = 2 << 20
PARALLEL_BYTES = 4 << 20
"""What is smaller is copied on the calling thread."""

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
        if self._pool is None or sum(out.nbytes for out, _ in pairs) < PARALLEL_BYTES:
            _copy_all(deque(pairs))
        else:
            self._share(self._pool, deque(chunk for pair in pairs for chunk in _chunks(*pair)), _copy_all)

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


def _copy_all(work: deque[Pair]) -> None:
    with np.errstate(all="ignore"):  # a float64 that becomes an infinite float32 does so in jax.device_put, too
        while work:
            try:
                out, leaf = work.popleft()
            except IndexError:  # another thread was quicker
                return
            np.copyto(out, leaf, casting="unsafe")


def _run_all(work: deque[Task]) -> None:
    while work:
        try:
            task = work.popleft()
        except IndexError:
            return
        task()


def _chunks(out: np.ndarray, leaf: np.ndarray) -> list[Pair]:
    """The same copy in pieces, along the flat array where both are contiguous, else along the longest axis."""
    pieces = -(-out.nbytes // CHUNK_BYTES)
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
