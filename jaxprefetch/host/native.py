"""Copies past the cache, where the extra `native` (llvmlite) is installed: NumPy's go through it, the largest apart.

Synopsis:

    left = copy_past_cache([(slot_view, leaf), ...])    # what it has not copied
    if can_stack(rows, samples):
        stack(rows, samples)

An ordinary store reads the line first that it writes: a third of what the memory of a host has to move for a copy, and
memory is what large batches wait for. And samples are stacked in one call, which lets go of the GIL once, where NumPy
does so for each row, so that many threads wait for each other.

A thread of its own makes the code, when it is wanted for the first time; until it is there NumPy copies. Nobody waits
for it, and no exception that strikes a caller leaves a lock of llvmlite's taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import threading
from collections.abc import Sequence

import numpy as np

from jaxprefetch.host import machine_code

logger = logging.getLogger("jaxprefetch")

Pair = tuple[np.ndarray, np.ndarray]
"""Where to, and from where."""

PAST_CACHE_BYTES = 1 << 20
"""What is as large as this in mapped memory is written past the cache. That is where slots lie: they have been touched,
and a device reads them. What the system has just handed out is in the cache, for it has cleared it."""

ROW_BYTES = 16 << 10
"""NumPy stacks smaller rows as quickly."""

PAST_CACHE_THREADS = 12
"""More are in each other's way. On 32 cores 8 threads copied 42 GiB/s, 12 threads 52, 16 threads 38, 24 threads 33."""


class Native:
    """The compiled code. Whoever calls it holds the arrays, and knows that they fit and share no byte.

    Thread safety: all of it for any thread.

    Raises:
        Exception: LLVM has no code for this processor, or what it made does not copy.
    """

    def __init__(self) -> None:
        leaves = [np.arange(5 * 64 + 3, dtype=np.uint16).astype(np.uint8)[start:] for start in range(3)]
        outs = [np.zeros(70 + len(leaf), np.uint8)[70:] for leaf in leaves]
        size = ctypes.c_size_t
        if any(size.from_address(id(leaf) + machine_code.HEAD_BYTES).value != leaf.ctypes.data for leaf in leaves):
            raise RuntimeError("this NumPy has the bytes of its arrays elsewhere")
        self._copy = ctypes.CFUNCTYPE(None, ctypes.c_void_p, size)(machine_code.compiled())
        self.copy(list(zip(outs, leaves, strict=True)))
        if not all(map(np.array_equal, outs, leaves)):
            raise RuntimeError("what LLVM has compiled does not copy")

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copies the bytes of each second array to the first. Blocking: until it is done, without the GIL."""
        table = np.array([(id(out), 0, id(leaf), out.nbytes) for out, leaf in pairs], np.uint64)
        self._copy(table.ctypes.data, len(table))

    def stack(self, rows: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
        """Copies the bytes of leaf i to row i. Blocking: until it is done, without the GIL."""
        size = rows[:1].nbytes
        table = np.empty((len(leaves), 4), np.uint64)
        table[:, 0], table[:, 2], table[:, 3] = id(rows), [*map(id, leaves)], size
        table[:, 1] = np.arange(0, len(leaves) * size, size)
        self._copy(table.ctypes.data, len(table))


def copy_past_cache(pairs: list[Pair]) -> list[Pair]:
    """Copies those of these pairs that go past the cache; returns the others. Blocking: until it is done."""
    chosen = [goes_past_cache(*pair) for pair in pairs]
    if True not in chosen or (code := native()) is None:
        return pairs
    code.copy([pair for pair, past_cache in zip(pairs, chosen, strict=True) if past_cache])
    return [pair for pair, past_cache in zip(pairs, chosen, strict=True) if not past_cache]


def goes_past_cache(out: np.ndarray, leaf: np.ndarray) -> bool:
    """Whether that pays, is a copy of bytes, and can be done."""
    return (
        out.nbytes >= PAST_CACHE_BYTES
        and _is_mapped(out)
        and out.shape == leaf.shape
        and out.dtype == leaf.dtype
        and not out.dtype.hasobject
        and out.flags.writeable
        and out.flags.c_contiguous
        and leaf.flags.c_contiguous
        and native() is not None
    )


def can_stack(rows: np.ndarray, leaves: Sequence[np.ndarray]) -> bool:
    """Whether that pays, is a copy of bytes, and can be done, for leaves of the shape and dtype of rows.

    There may be more rows than leaves.
    """
    return (
        rows.ndim > 1
        and rows[:1].nbytes >= ROW_BYTES
        and rows.nbytes >= PAST_CACHE_BYTES
        and _is_mapped(rows)
        and len(rows) >= len(leaves)
        and rows.flags.c_contiguous
        and rows.flags.writeable
        and not rows.dtype.hasobject
        and all([leaf.flags.c_contiguous for leaf in leaves])
        and native() is not None
    )


def stack(rows: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
    """Copies leaf i to row i where all that can be stacked. Blocking: until it is done, without the GIL."""
    code = native()
    assert code is not None, "can_stack was not asked"
    code.stack(rows, leaves)


def native() -> Native | None:
    """The compiled code once it is there, which the first call has a thread make. Never blocks."""
    if _making.code is None:
        _making.begin()
    return _making.code


class _Making:
    """What makes the code, once in a process; a fork gets what there is."""

    def __init__(self) -> None:
        self.code: Native | None = None
        self._began = threading.Lock()  # taken for good
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts the thread, in the first call."""
        if self._began.acquire(blocking=False):
            self._thread = threading.Thread(target=self._make, name="jaxprefetch-native", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is to be had: NumPy copies
                self._thread.start()

    def wait(self) -> None:
        """Waits until it has ended, if it runs: a fork meanwhile would leave locks of llvmlite's taken in the child."""
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=10)

    def _make(self) -> None:
        try:
            self.code = Native()
        except machine_code.TooOld as error:
            logger.info("jaxprefetch: NumPy copies, with the same values: %s.", error)
        except Exception as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name == "llvmlite"):
                logger.warning(
                    "jaxprefetch: NumPy copies, with the same values, for llvmlite (%s) does not serve: %s: %s. "
                    "Install it anew, or remove it.",
                    getattr(sys.modules.get("llvmlite"), "__file__", "not found"),
                    type(error).__name__,
                    str(error).partition("\n")[0],
                )


_making = _Making()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _making.wait())


def _is_mapped(memory: np.ndarray) -> bool:
    base: object = memory
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap) or (isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap))
