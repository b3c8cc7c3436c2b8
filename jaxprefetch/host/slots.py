"""Slots: host memory that is reused, one slot a batch, registered with the driver where that is possible.

Synopsis:

    slots = Slots(register=pinning.register)
    slot = slots.take(nbytes)
    image = slot.view(0, np.dtype("float32"), (256, 224, 224, 3))     # write here, and send from here
    slot.free()                                                     # all of its arrays have landed

A slot that is not freed but dropped is no leak: its memory is unregistered and unmapped when the last array in it goes,
and JAX keeps the arrays that it copies from until it has done so.

What has to hold, since a driver reads this memory behind Python's back (shown by tests/test_slots.py, test_pinning.py,
test_safety.py; on a GPU by test_gpu_slots.py):

1. A view lies within its slot, and two slots that are in use share no byte.
2. A slot is used again only after `free()`, which counts once; who calls it knows that its arrays have landed.
3. Memory stays registered and mapped as long as any view of it lives; then it is unregistered, once, and unmapped.
4. An interrupt or an error at any place leaves nothing registered that nothing would unregister.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxprefetch.errors import OPTION
from jaxprefetch.host.copying import Copier

logger = logging.getLogger("jaxprefetch")
K = TypeVar("K")
T = TypeVar("T")

ALIGNMENT = 64
"""Bytes between the starts of leaves; XLA's CPU client aliases memory so aligned, so no second copy is made there."""

_PAGE = mmap.PAGESIZE
_TOUCH_BYTES = 16 << 20

Register = Callable[[int, int], Callable[[], None]]
"""Called with address and bytes; returns what undoes it. Raises RuntimeError where it cannot be done."""


class Fresh:
    """Memory of one batch that is never reused: each array has its own, and goes alone."""

    def view(self, offset: int, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
        """A new array; where it would lie in a slot does not matter."""
        nbytes = math.prod(shape) * dtype.itemsize
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return array_in(raw, start, dtype, shape)

    def once(self, key: K, make: Callable[[K, Fresh], T]) -> T:
        """What `make` gives for this memory."""
        return make(key, self)

    def free(self) -> None:
        """Nothing to give back."""


def array_in(memory: np.ndarray, start: int, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    """An array in these bytes, from `start` on, contiguous with default strides."""
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[start : start + nbytes].view(dtype).reshape(tuple(shape))


class FreshMemory:
    """Never the same memory twice, for devices that go on reading what was put (CPU)."""

    def __init__(self, copier: Copier | None = None):
        self.copier = copier or Copier()

    def take(self, nbytes: int) -> Fresh:
        """New memory for one batch."""
        return Fresh()

    def clear(self) -> None:
        """Nothing is kept."""


class Slot:
    """Reused memory for one batch. One thread writes, then any thread frees it."""

    def __init__(self, block: _Block, home: deque[_Block]):
        self._block = block
        self._home: deque[_Block] | None = home

    def view(self, offset: int, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
        """An array in the slot, contiguous with default strides.

        Args:
            offset: bytes from the slot's start, a multiple of `ALIGNMENT`.

        Raises:
            IndexError: the slot is smaller.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self._block.memory
        if not 0 <= offset <= len(memory) - nbytes:
            raise IndexError(f"slot of {len(memory)} bytes: no {nbytes} bytes from {offset} on")
        return array_in(memory, offset, dtype, shape)

    def once(self, key: K, make: Callable[[K, Slot], T]) -> T:
        """What `make` gives for this memory: made once, as long as it is used with the same key."""
        if self._block.made[0] is not key:
            self._block.made = key, make(key, self)
        return self._block.made[1]

    def free(self) -> None:
        """Its memory may serve another batch from now on. Freeing again changes nothing."""
        home, self._home = self._home, None
        if home is not None:
            home.append(self._block)


class _Block:
    """Memory that is reused, and what was made for it last, with its key."""

    __slots__ = ("made", "memory")

    def __init__(self, memory: np.ndarray):
        self.memory = memory
        self.made: tuple[Any, Any] = None, None


class Slots:
    """Makes slots, and reuses those that are free.

    Args:
        register: registers new memory with the driver; None where it stays as it is.
        max_bytes: before more than this is mapped, memory of sizes that are not asked for any more is given up.
        copier: copies into slots; touches new memory by several threads, for the system is slow to hand it out.

    Thread safety: `take` for one thread at a time; slots may be freed by any other.
    """

    def __init__(self, *, register: Register | None = None, max_bytes: int | None = None, copier: Copier | None = None):
        self._register = register
        self._max_bytes = max_bytes
        self.copier = copier or Copier()
        self._free: dict[int, deque[_Block]] = {}  # by capacity; the deques are shared with the slots
        self._mapped = _Count()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of host memory, in use and free."""
        return self._mapped.bytes

    def take(self, nbytes: int) -> Slot:
        """A slot of at least so many bytes; its content is whatever was there.

        Raises:
            MemoryError, OSError: the system has no memory for it.
        """
        capacity = _capacity(nbytes)
        home = self._free.setdefault(capacity, deque())
        with contextlib.suppress(IndexError):
            return Slot(home.pop(), home)  # the one used last, which the caches may still hold
        if self._max_bytes is not None and self.mapped_bytes + capacity > self._max_bytes:
            for free in self._free.values():
                free.clear()
        return Slot(_Block(self._new(capacity)), home)

    def clear(self) -> None:
        """Gives up what is free; what is in use goes when the last array in it does."""
        for free in self._free.values():
            free.clear()
        self._free = {}

    def _new(self, capacity: int) -> np.ndarray:
        mapping = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a forked worker has no use for it, and copying it costs
            with contextlib.suppress(OSError, AttributeError):  # not on this system
                mapping.madvise(getattr(mmap, advice))
        memory = np.frombuffer(mapping, np.uint8)
        # Before there is anything to undo: a Ctrl-C may strike wherever something is called. Where the interpreter ends
        # nothing is undone: copies may still be read, and the system takes all of it back.
        held = _Held(self._mapped, mapping)
        weakref.finalize(memory, held.let_go).atexit = False
        touches = [functools.partial(_touch, memory, start) for start in range(0, capacity, _TOUCH_BYTES)]
        self.copier.run(touches)
        held.unregister = self._pin(memory)
        held.bytes = capacity
        self._mapped.bytes += capacity
        return memory

    def _pin(self, memory: np.ndarray) -> Callable[[], None] | None:
        if self._register is None:
            return None
        try:
            return self._register(memory.ctypes.data, memory.nbytes)
        except RuntimeError as error:
            self._register = None
            logger.warning(
                "jaxprefetch: host memory cannot be registered with the driver (%s), so each batch is copied once more "
                "on its way to the device, by one thread. Raise the limit of locked memory (ulimit -l) or take a newer "
                f"jaxlib; {OPTION}host_size=...) and the size of a DeviceQueue say how much is needed.",
                error,
            )
            return None


class _Count:
    bytes = 0


class _Held:
    """What is to be undone when some memory goes, as far as it has come.

    It keeps the mapping until then: NumPy 2.5 lets go of what an array lies in before it tells that the array is gone,
    and memory that is unmapped before it is unregistered may be another's by then.
    """

    def __init__(self, mapped: _Count, mapping: mmap.mmap):
        self._mapped = mapped
        self._mapping: mmap.mmap | None = mapping
        self.bytes = 0
        self.unregister: Callable[[], None] | None = None

    def let_go(self) -> None:
        self._mapped.bytes -= self.bytes
        if self.unregister is not None:
            self.unregister()
        self._mapping = None


def _touch(memory: np.ndarray, start: int) -> None:
    memory[start : start + _TOUCH_BYTES : _PAGE] = 0


def _capacity(nbytes: int) -> int:
    """Rounded up to one of eight sizes for each power of two, in whole pages: similar batches share their slots.

    So an eighth is wasted at most, or a page. From 16 MiB on the sizes are whole huge pages of 2 MiB.
    """
    step = max(_PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step), 1) * step
