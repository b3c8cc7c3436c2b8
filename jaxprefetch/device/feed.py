"""The engine: does what the window decides, on the consumer's thread.

Synopsis:

    feed = Feed(window, HandOut(on_device, context))
    feed.begin_pass(staging)
    batch = feed.next()                # settle the last one, fill the window, decide

No lock is held while JAX or the source runs: one consumer at a time has the turn, others are refused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax.profiler import TraceAnnotation

from jaxprefetch.device.actions import Do
from jaxprefetch.device.arrivals import Arrivals
from jaxprefetch.device.completion import have_landed, prepare_fence, put_marker, wait_landed
from jaxprefetch.device.context import Device
from jaxprefetch.device.fences import Fences
from jaxprefetch.device.handout import Delivery, HandOut
from jaxprefetch.device.kept import KeptBatches
from jaxprefetch.device.link import link_speed
from jaxprefetch.device.shortage import is_out_of_memory, no_room, refusal
from jaxprefetch.device.staged import Issued, Sending, StagedBatch, Staging
from jaxprefetch.device.times import LoopTimes
from jaxprefetch.device.window import Window
from jaxprefetch.errors import add_note

SHORTEST_WAIT_SECONDS = 50e-6
PATIENCE_SECONDS = 0.05  # then the source may be waiting for the host memory of batches that the loop has deleted


class Feed:
    """Hands out batches in order. Numbers go on from pass to pass; `first` is the number of this pass's batch 0."""

    def __init__(self, window: Window, handout: HandOut, kept: KeptBatches | None = None):
        self.window = window
        self.handout = handout
        self.times = LoopTimes()
        self.kept = KeptBatches(bound=window.size + 1) if kept is None else kept
        self.first = 0
        self.error: BaseException | None = None
        self.closed = False  # written by close(), False to True
        self.largest = 0  # bytes of the largest batch, on its fullest device, with what its hand-out adds
        self.first_delivery: Delivery | None = None
        self.foreign = False  # some batch held arrays of the source's own
        self.link: float | None = None  # bytes per second to a device
        self._arrivals = Arrivals(self.times)
        self._issued: dict[int, Issued] = {}
        self._devices: dict[Device, None] = {}  # all that were ever used, in order
        self._fences = Fences()
        self._sending = Sending()
        self._traceback: Any = None

    def begin_pass(self, staging: Staging) -> None:
        """Batches come from `staging` from now on; the last pass is over."""
        if self.window.ended:
            self.window.restart()
        self.first = self.window.issued
        self._arrivals.begin_pass(staging)
        self._sending.begin_pass()
        self.times.begin_pass()

    def next(self) -> Any:
        """The next batch. Blocking: for the source, for room, and until the batch handed out last has landed.

        Raises what the source, staging or putting raised, every time again; StopIteration at the end or when closed.
        """
        window, started, source_ns = self.window, time.perf_counter(), self.times.for_source.ns
        window.call()
        while not self.closed:
            if not window.staged:
                self._look()
            do, number = window.decide()
            if do is Do.SETTLE:
                self._settle(number)
            elif do is Do.ISSUE:
                self._issue(number)
            elif do is Do.HAND_OUT:
                return self._hand_out(number)
            elif do is Do.END:
                self.raise_end()
            elif do is Do.FENCE:
                self._fences.dispatch(number, tuple(self._devices))
                window.fence(number)
            elif do is Do.AWAIT_FENCE:
                self._await_fence(number)
            elif do is Do.PROVE_LANDING:
                self._prove_landing(number)
            elif do is Do.AWAIT_SOURCE:
                self._await_source()
            elif do is Do.AWAIT_STAGED:
                waited, step_seen = time.perf_counter() - started, self.times.for_source.ns == source_ns
                self._await_staged(number, waited, step_seen=step_seen)
            else:
                self._fail(no_room(window, number - self.first, on_device=self.handout.on_device is not None))
        raise StopIteration

    @property
    def has_next(self) -> bool:
        """Whether `next()` would not wait for the source: a batch is staged or on its way, or the end is known."""
        window = self.window
        return window.issued + window.staged > window.taken or window.ended or self._next_staged in self._arrivals.items

    def peek(self) -> None:
        """Waits until one batch is staged or the source has ended."""
        self._look()
        while not (self.window.staged or self.window.ended or self.closed):
            self._await_source()
            self._look()

    def clear(self) -> None:
        """Drops what was not handed out; the consumer's batch stays as it is."""
        self._arrivals.items.clear()
        self._issued.clear()
        self._sending.begin_pass()
        self._fences.clear()
        if self.error is not None:
            self.error.with_traceback(self._traceback)  # without the frames of the loop, which hold its batches

    @property
    def _next_staged(self) -> int:
        """Of the next batch that the window has not been told of, in the pass."""
        return self.window.next_staged - self.first

    def _look(self) -> None:
        """Tells the window what has been staged meanwhile, and of the end after it."""
        window, items = self.window, self._arrivals.items
        while (item := items.get(window.next_staged - self.first)) is not None and not window.ended:
            if not hasattr(item, "plan"):
                self._ends_with(item.error)
                window.end()
                return
            try:
                delivery = self.handout.delivery(item.plan, item.leaves)
            except Exception as error:
                return self._refused_by_on_device(error)
            self.first_delivery, foreign = self.first_delivery or delivery, bool(item.plan.foreign)
            self.largest = max(self.largest, delivery.most)
            self.foreign = self.foreign or foreign
            window.stage(item.plan.cost, foreign=foreign, out=delivery.out)

    def _refused_by_on_device(self, error: Exception) -> None:
        """The pass ends before the batch that is next to be staged."""
        add_note(error, f"jaxprefetch: raised when on_device was compiled for batch {self._next_staged}")
        self._ends_with(error)
        self.window.end()
        self._arrivals.cancel()

    def _settle(self, number: int) -> None:
        while (first := next(iter(self._issued))) < number:  # an interrupt struck after it was settled
            del self._issued[first]
        self._arrivals.items.pop(number - self.first, None)  # or after it was issued
        issued, failure = self._issued[number], None
        try:
            with self.times.for_landing:
                landed = wait_landed(issued.arrays)
        except Exception as error:
            add_note(error, f"jaxprefetch: raised while batch {number - self.first} was on its way to its devices")
            landed, failure = False, error
        if self.window.delete_used:
            issued.delete()
        self.window.settled(number, disposed=not landed)
        del self._issued[number]
        self._sending.free(self.window.has_landed)
        if failure is not None:
            self._fail(failure)  # what is on its way comes first

    def _issue(self, number: int) -> None:
        staged: StagedBatch = self._arrivals.items[number - self.first]
        plan = staged.plan
        if number == 0 and (devices := tuple(plan.cost)):  # before anything is on them
            prepare_fence(devices)
            self.link = link_speed(devices[0], room=self.largest)
        try:
            with TraceAnnotation("jaxprefetch.issue"):
                parcels = plan.put(staged.leaves)
        except Exception as error:
            return self._refused(number, error)
        self._issued[number] = Issued(plan, self.handout.delivery(plan, staged.leaves), parcels)
        self._sending.add(number, staged.slot, plan.host_bytes)
        self._devices.update(dict.fromkeys(plan.cost))
        self.window.issue()
        self._arrivals.items.pop(number - self.first, None)

    def _refused(self, number: int, error: Exception) -> None:
        """Out of memory: once more when the batch is needed. Anything else ends the pass at this batch."""
        if is_out_of_memory(error) and not self.window.refused:
            return self.window.refuse()
        add_note(error, refusal(self.window, number - self.first, error, on_device=self.handout.on_device is not None))
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing after the batches already issued will come."""
        self._ends_with(error)
        self._arrivals.items.clear()
        self.window.fail()
        self._arrivals.cancel()

    def _await_fence(self, number: int) -> None:
        self._give_room()
        covering = number
        with self.times.for_fence, self._keeping(number):
            covering = self._fences.wait(number)
        self._fence_done(covering)

    def _fence_done(self, number: int) -> None:
        self.window.fence_done(number)
        self._fences.forget(number)

    def _prove_landing(self, number: int) -> None:
        """A batch put later that is still ours alone, else a marker: once it has landed, so has this one."""
        devices = self.window.cost_of(number).keys()
        later = [i for j, i in self._issued.items() if j >= self.window.taken and i.proves(devices)]
        self._give_room()
        with self.times.for_landing, self._keeping(number):
            jax.block_until_ready(later[0].made if later else put_marker(tuple(self._devices)))
        self.window.proved(number)
        self._sending.free(self.window.has_landed)

    @contextlib.contextmanager
    def _keeping(self, number: int) -> Iterator[None]:
        """What a wait for the devices raises ends the pass, like the error of a batch; the wait is over."""
        try:
            yield
        except Exception as error:
            add_note(error, f"jaxprefetch: raised while the devices were busy with batch {number - self.first}")
            self._fail(error)

    def _await_source(self) -> None:
        self._give_room()
        if self._sending.unfinished and not self.window.source_is_late:
            self._arrivals.wait_briefly(self._next_staged, PATIENCE_SECONDS)
            self.window.source_is_late = True  # forgotten when a batch has come
        elif not self._arrivals.wait(self._next_staged):
            self.window.end()

    def _give_room(self, *, now: bool = True) -> None:
        """Before waits but that for a landing, and once a batch: it wakes a thread that then wants the GIL."""
        self._arrivals.give_room(self.window.issued - self.first, self._sending.landed, now)

    def _await_staged(self, number: int, waited: float, *, step_seen: bool) -> None:
        """Looks whether the device would go idle, else waits a little for the source."""
        news = False
        if self._fences.is_done(number - 1):
            self._fence_done(number - 1)
            if step_seen:
                self.times.saw_step(time.perf_counter_ns() - self.times.last_ns)
            news = True
        if not self.window.has_landed(number) and have_landed(self._issued[number].made):
            self.window.landed(number)
            self._sending.free(self.window.has_landed)
            news = True
        if news:
            return
        self._give_room()
        if not self._arrivals.wait_briefly(self._next_staged, max(SHORTEST_WAIT_SECONDS, waited / 10)):
            self.window.end()

    def _hand_out(self, number: int) -> Any:
        issued, window, delivery = self._issued[number], self.window, self._issued[number].delivery
        calls, leaves = delivery.call is not None, issued.parcels
        if calls:  # it lets go of the GIL: a reader that wakes now is done before the loop goes on
            self._give_room()
        try:
            if issued.plan.foreign:
                issued.plan.check_alive(leaves, number - self.first)
            if calls:
                issued.outs = delivery.dispatch(leaves) if issued.outs is None else issued.outs
                leaves = delivery.leaves(leaves, issued.outs)
        except Exception as error:
            add_note(error, f"jaxprefetch: raised when batch {number - self.first} was handed out", unless="Batch ")
            self._fail(error)
            raise
        batch = delivery.treedef.unflatten(leaves)  # runs code of registered nodes
        starved = window.issued < number + window.size and not window.staged and not window.ended
        self.times.hand_out(issued.plan.most, starved=starved)
        if not window.delete_used and delivery.largest is not None:
            self.kept.add(number, leaves[delivery.largest], self.first)
        if not calls:
            self._give_room(now=not self.times.hurried)
        window.hand_out()
        return batch

    def raise_end(self) -> NoReturn:
        """Raises how the pass ended: the kept error, each time with the traceback that it came with, or the end."""
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)  # as it was first seen: it does not grow each time
        raise StopIteration

    def _ends_with(self, error: BaseException | None) -> None:
        self.error = error
        self._traceback = error.__traceback__ if error is not None else None
