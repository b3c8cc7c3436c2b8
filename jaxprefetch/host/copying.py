"""Copies by several threads: NumPy copies with one, which is a fifth of what the memory of a server gives.

Synopsis:

    copier = Copier()
    copier.copy([(slot_view, leaf)])           # returns when it is done

The threads are shared by all copiers of the process, and end with the last of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from jaxprefetch.host import native
from jaxprefetch.host.memory import usable_cores
from jaxprefetch.host.native import Pair

# Measured on 16 cores: from 64 MiB on one thread copies 5 to 8 GiB/s, 8 threads 30, 12 threads 36, 16 threads 45; on 32
# cores, while two GPUs read as much again, 12 threads 33, 16 threads 35, 24 threads 40. To wake a sleeping thread takes
# up to 100 us, as long as a copy of a megabyte: in a loop that does nothing else two threads copy 4 MB no faster than
# one, nor eight 16 MB than four.
MOST_THREADS = 24
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 4 << 20, 8 << 20
CHUNKS_A_THREAD = 4
PARALLEL_BYTES = LEAST_CHUNK_BYTES
"""What is not larger is copied on the calling thread."""

HELD_VALUES = 500
"""For arrays of more values NumPy lets go of the GIL."""

HELD_BYTES = 32 << 10
"""Up to here arrays are copied without letting go of the GIL, as bytes where NumPy would: the loop's thread would take
it each time, and each time give it back only after a while. For larger ones the loop would wait too long: a
batch of twenty arrays of 50 KB takes a tenth longer where the GIL is held."""

T = TypeVar("T")
Task = Callable[[], object]
_NEVER = object()
_lock = threading.Lock()
_pools: weakref.WeakValueDictionary[int, _Pool] = weakref.WeakValueDictionary()  # guarded by _lock


def copying_threads() -> int:
    """Three of four cores that the process may use, for the loader needs some, too; `MOST_THREADS` at most."""
    return max(1, min(MOST_THREADS, usable_cores() * 3 // 4))


def chunk_bytes(nbytes: int, threads: int) -> int:
    """What one thread copies at once: of large batches more, for each piece takes the GIL for a moment."""
    return min(max(nbytes // (CHUNKS_A_THREAD * threads), LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)


class Copier:
    """Runs copies on the process's threads and on the caller's.

    Args:
        threads: how many together.
    """

    def __init__(self, threads: int | None = None):
        self.threads = copying_threads() if threads is None else threads
        self._pool = _pool(self.threads - 1) if self.threads > 1 else None

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copies each second array into the first, converted where the dtypes differ. Blocking: until it is done."""
        nbytes = sum([out.nbytes for out, _ in pairs])
        if self._pool is None or nbytes <= PARALLEL_BYTES:
            _copy_all(pairs)
        else:
            past_cache = native.goes_past_cache(*max(pairs, key=lambda pair: pair[0].nbytes))
            threads = min(self.threads, native.PAST_CACHE_THREADS) if past_cache else self.threads
            self._pool.share(_copy_all, _portions(pairs, chunk_bytes(nbytes, threads)), threads - 1)

    def run(self, tasks: Sequence[Task], most: int | None = None) -> None:
        """Runs tasks that release the GIL, in any order. Blocking: until all are done; raises what one has raised.

        Args:
            most: threads at once; None: all.
        """
        helpers = self.threads - 1 if most is None else min(most, self.threads) - 1
        if self._pool is None or len(tasks) < 2 or helpers < 1:
            for task in tasks:
                task()
        else:
            self._pool.share(_run, tasks, helpers)


class _Pool:
    """Threads that help whoever shares out work; they end when nobody refers to the pool any more.

    They are daemons that wait in one queue: a process ends, and a forked one goes on, as if they were not there.
    Whoever shares waits only for those who have come. The pool of `concurrent.futures` takes as long as a copy of a
    megabyte to hand over a task and to hear of its end.
    """

    def __init__(self, threads: int):
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = 0
        weakref.finalize(self, _end, self._calls, threads).atexit = False
        with contextlib.suppress(RuntimeError):  # no more threads to be had
            for _ in range(threads):
                threading.Thread(target=_serve, args=(self._calls,), name="jaxprefetch-copy", daemon=True).start()
                self._threads += 1

    def share(self, do: Callable[[T], object], items: Iterable[T], helpers: int) -> None:
        """Calls `do` for each item, here and on so many threads. Blocking: until all have returned.

        Raises what one of them has raised.
        """
        work, came, left = deque(items), [], SimpleQueue()
        help_out = functools.partial(_help, do, work, came, left)
        try:
            for _ in range(min(helpers, self._threads, len(work) - 1)):
                self._calls.put(help_out)
            while work:
                try:
                    item = work.popleft()
                except IndexError:  # another thread was quicker
                    break
                do(item)
        finally:
            errors = _wait_for(work, came, left)
        for error in errors:
            if error is not None:
                raise error


def _wait_for(
    work: deque[Any], came: list[None], left: SimpleQueue[BaseException | None]
) -> list[BaseException | None]:
    """What those have met who have come: they write to memory that the caller gives away. A Ctrl-C waits, too."""
    errors: list[BaseException | None] = []
    interrupt = None
    while work or len(errors) < len(came):
        try:
            work.clear()  # who comes from now on finds nothing to do
            errors.extend(itertools.islice(iter(left.get, _NEVER), len(came) - len(errors)))  # in C: none is lost
        except BaseException as error:
            interrupt = error
    return [*errors, interrupt]


def _help(do: Callable[[T], object], work: deque[T], came: list[None], left: SimpleQueue[BaseException | None]) -> None:
    """Takes items as long as there are any. Says that it comes before it looks, so that it is waited for."""
    came.append(None)
    error = None
    try:
        while work:
            try:
                item = work.popleft()
            except IndexError:
                break
            do(item)
    except BaseException as e:  # raised where the work was shared out
        error = e
    left.put(error)


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call


def _end(calls: SimpleQueue[Callable[[], None] | None], threads: int) -> None:
    for _ in range(threads):
        calls.put(None)


def _run(task: Task) -> None:
    task()


def _copy_all(pairs: Iterable[Pair]) -> None:
    large: list[Pair] = []
    for pair in pairs:
        out, leaf = pair
        if out.dtype != leaf.dtype:
            with np.errstate(all="ignore"):  # a float64 that becomes an infinite float32 does so in jax.device_put, too
                np.copyto(out, leaf, casting="unsafe")
        elif out.nbytes > HELD_BYTES:
            large.append(pair)
        elif out.size <= HELD_VALUES:
            out[...] = leaf
        else:
            try:
                out.data.cast("B")[:] = leaf.data.cast("B")
            except (TypeError, ValueError):  # not contiguous, empty, or of a type that buffers do not know
                out[...] = leaf
    for out, leaf in native.copy_past_cache(large):
        out[...] = leaf


def _portions(pairs: Iterable[Pair], chunk: int) -> Iterable[list[Pair]]:
    """The same copies in portions of about so many bytes: pieces of large ones, and small ones together."""
    portion: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        if len(pieces := _chunks(*pair, chunk)) > 1:
            yield from ([piece] for piece in pieces)
            continue
        portion += pieces
        nbytes += pair[0].nbytes
        if nbytes >= chunk:
            yield portion
            portion, nbytes = [], 0
    if portion:
        yield portion


def _chunks(out: np.ndarray, leaf: np.ndarray, chunk: int) -> list[Pair]:
    """The same copy in pieces, along the flat array where both are contiguous, else along an axis, the longest.

    Not along one of length 1 that is repeated in `out`; where there are no others it is copied in one piece.
    """
    pieces = -(-out.nbytes // chunk)
    if pieces < 2:
        return [(out, leaf)]
    if out.shape == leaf.shape and out.flags.c_contiguous and leaf.flags.c_contiguous:
        out, leaf = out.reshape(-1), leaf.reshape(-1)
    axes = [i for i in range(out.ndim) if out.shape[i] == leaf.shape[i]]
    if not axes:
        return [(out, leaf)]
    axis = max(axes, key=lambda i: out.shape[i])
    step = -(-out.shape[axis] // pieces)
    before = (slice(None),) * axis
    parts = [(*before, slice(start, start + step)) for start in range(0, out.shape[axis], step)]
    return [(out[part], leaf[part]) for part in parts]


def _pool(threads: int) -> _Pool:
    """The process's pool of so many threads."""
    with _lock:
        pool = _pools.get(threads)
        if pool is None:
            pool = _pools[threads] = _Pool(threads)
        return pool


def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have had it
    _pools.clear()


if hasattr(os, "register_at_fork"):  # the threads stay behind: copiers made in the child share pools of its own
    os.register_at_fork(after_in_child=_begin_anew)
