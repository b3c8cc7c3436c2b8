"""A device whose copies land, and whose steps end, when the scheduler chooses; it reads host memory until then.

    device = Device(scheduler, faults)
    with device.installed(released_by="landing"):
        batches = prefetch_to_device(source)       # from reused slots, to arrays that land late
    device.check_empty()

What it does by itself is `scheduler.moves`: the oldest copy lands, the oldest fence is done. It knows by itself, not
from the library, what memory is taken, and looks whether the memory that a copy reads has been written meanwhile.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import pytest
from scheduler import Scheduler

from jaxprefetch import prefetch, prefetcher, queue
from jaxprefetch.device import feed, fences
from jaxprefetch.device.plan import Plan
from jaxprefetch.host import copying
from jaxprefetch.host.copying import Copier
from jaxprefetch.host.slots import Slots
from jaxprefetch.staging import Stager

Fault = Literal["", "put", "memory once", "memory", "landing", "fence"]


class Late:
    """An array on the device: has a value once it has landed."""

    def __init__(self, device: Device, leaf: np.ndarray, error: BaseException | None):
        self.shape, self.dtype, self.nbytes = leaf.shape, leaf.dtype, leaf.nbytes
        self.error, self.landed = error, False
        self.value: np.ndarray | None = None
        self.promised = leaf.copy()  # what it has to be
        self._scheduler, self._deleted = device.scheduler, False

    def block_until_ready(self) -> Late:
        self._scheduler.wait(lambda: self.landed or self._deleted, what="waits for a landing")
        if self._deleted:
            raise RuntimeError("Array has been deleted.")
        if self.error is not None:
            raise self.error
        return self

    def is_ready(self) -> bool:
        if self._deleted:
            self._scheduler.fail(AssertionError("is_ready() of a deleted array, which ends the process"))
        return self.landed

    def is_deleted(self) -> bool:
        return self._deleted

    def delete(self) -> None:
        self._deleted, self.value = True, None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.block_until_ready()
        assert self.value is not None
        return self.value


class Fence:
    """What a fence gives."""

    def __init__(self, device: Device, error: BaseException | None):
        self.done, self.error = False, error
        self._wait = device.scheduler.wait

    def block_until_ready(self) -> Fence:
        self._wait(lambda: self.done, what="waits for a fence")
        if self.error is not None:
            raise self.error
        return self

    def is_ready(self) -> bool:
        return self.done


@dataclass
class _Copy:
    number: int
    leaf: np.ndarray  # read until it has landed, and kept alive until then, as JAX does
    promised: np.ndarray  # what it was when it was put
    array: weakref.ref[Late]


class Device:
    """A device and its faults.

    Args:
        fault: what fails, `at` the so manieth batch (put, memory, landing) or fence.
        bound: the most batches there may be on it, those in `kept` not counted; None: does not matter.
        max_bytes: the most bytes of these.
        copiers: slots are written by several threads.
        slow_copies: where nobody chooses, a step ends before a copy lands.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        fault: Fault = "",
        at: int = 0,
        bound: int | None = None,
        max_bytes: int | None = None,
        copiers: bool = False,
        slow_copies: bool = False,
    ):
        self.scheduler = scheduler
        self.error: Exception | None = RuntimeError(f"the {fault} has failed")
        if fault == "memory":
            self.error = _no_memory()
        self.pinned = 0  # pieces of host memory that are registered
        self.kept: Callable[[], int] = lambda: 0
        self._fault, self._at = fault, at
        self._bound, self._max_bytes = bound, max_bytes
        self._copiers, self._slow_copies = copiers, slow_copies
        self.puts = self._fences = 0
        self._failed = False
        self._copies: deque[_Copy] = deque()
        self._open: deque[Fence] = deque()
        self._batches: dict[int, list[weakref.ref[Late]]] = {}
        self._bytes: dict[int, int] = {}
        scheduler.moves.append(self._moves)

    @contextlib.contextmanager
    def installed(self, released_by: Literal["landing", "fence"] | None) -> Iterator[None]:
        """Prefetchers and queues made inside put on this device; None: on the CPU, where puts may fail."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Plan, "put", self._putting(Plan.put, real=released_by is None))
            if released_by is not None:
                patch.setattr(fences, "dispatch_fence", lambda devices: [self._fence()])
                patch.setattr(feed, "put_marker", lambda devices: [self._late(-1, np.zeros(64, np.uint8), None)])
                for module in (prefetcher, queue):
                    patch.setattr(module, "released_by", lambda devices: released_by)
                for module in (prefetch, queue):
                    patch.setattr(module, "stager", self._stager)
            if self._copiers:
                patch.setattr(copying, "PARALLEL_BYTES", 0)
                patch.setattr(copying, "chunk_bytes", lambda nbytes, threads: 8)
            yield

    def batches(self) -> list[int]:
        """Those on the device: their copies have not landed, or somebody refers to them."""
        on_their_way = {copy.number for copy in self._copies}
        alive = [n for n, refs in self._batches.items() if n in on_their_way or any(map(_alive, refs))]
        self._batches = {n: self._batches[n] for n in alive}
        return alive

    def check_empty(self) -> None:
        """No batch is left there, once all have landed."""
        while self._copies:
            self._land()
        assert not self.batches(), f"batches {self.batches()} are still on the device"

    # ---- what it does by itself

    def _moves(self) -> list[tuple[str, Callable[[], None]]]:
        moves: list[tuple[str, Callable[[], None]]] = []
        if self._copies:
            moves.append((f"batch {self._copies[0].number} lands", self._land))
        if self._open:
            moves.append(("a fence is done", self._done))
        return moves[::-1] if self._slow_copies else moves

    def _land(self) -> None:
        copy = self._copies.popleft()
        value = copy.leaf.copy()
        assert np.array_equal(value, copy.promised), f"memory of batch {copy.number} was written before it had landed"
        if (array := copy.array()) is not None:
            array.landed, array.value = True, None if array.is_deleted() else value

    def _done(self) -> None:
        self._open.popleft().done = True

    # ---- what the library asks of it

    def _putting(self, put: Callable[..., Any], *, real: bool) -> Callable[..., Any]:
        def putting(plan: Plan, leaves: Sequence[Any]) -> list[Any]:
            number = self.puts
            self.scheduler.point("put")
            if number == self._at and self._fault in ("put", "memory"):
                assert self.error is not None
                raise self.error
            if number == self._at and self._fault == "memory once" and not self._failed:
                self._failed = True
                raise _no_memory()  # a new one: whoever keeps an error keeps what its traceback has seen
            self.puts += 1
            if real:
                return put(plan, leaves)
            error = self.error if self._fault == "landing" and number == self._at else None
            arrays = [self._late(number, leaf, error) for leaf in leaves]
            self._check_room()
            return arrays

        return putting

    def _late(self, number: int, leaf: np.ndarray, error: BaseException | None) -> Late:
        array = Late(self, leaf, error)
        self._copies.append(_Copy(number, leaf, array.promised, weakref.ref(array)))
        if number >= 0:
            self._batches.setdefault(number, []).append(weakref.ref(array))
            self._bytes[number] = self._bytes.get(number, 0) + leaf.nbytes
        return array

    def _check_room(self) -> None:
        batches = self.batches()
        count, nbytes = len(batches) - self.kept(), sum(self._bytes[number] for number in batches)
        if self._bound is not None and count > self._bound:
            self.scheduler.fail(AssertionError(f"{count} batches on the device, {self._bound} allowed"))
        if self._max_bytes is not None and not self.kept() and nbytes > self._max_bytes:
            self.scheduler.fail(AssertionError(f"{nbytes} bytes on the device, {self._max_bytes} allowed"))

    def _fence(self) -> Fence:
        self.scheduler.point("fence")
        failed = self._fault == "fence" and self._fences == self._at
        self._fences += 1
        fence = Fence(self, self.error if failed else None)
        self._open.append(fence)
        return fence

    def _stager(self, placement: Any, options: Any, max_host_bytes: int | None, shapes: Any = None) -> Stager:
        copier = Copier(1)
        if self._copiers:
            copier.threads, copier._pool = 2, copying._Pool(1)
        slots = Slots(register=self._register, max_bytes=max_host_bytes, copier=copier)
        return Stager(placement, options, slots, shapes=shapes)

    def _register(self, address: int, nbytes: int) -> Callable[[], None]:
        self.pinned += 1

        def unregister() -> None:
            self.pinned -= 1

        return unregister


def _no_memory() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")


def _alive(ref: weakref.ref[Late]) -> bool:
    return (array := ref()) is not None and not array.is_deleted()
