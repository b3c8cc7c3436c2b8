"""The engine: does what the window decides, on the consumer's thread.

    feed = Feed(window, staging)
    batch = feed.next()                # settle the last one, fill the window, decide

No lock is held while JAX or the source runs: one consumer at a time has the turn, others are refused.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.profiler import TraceAnnotation

from jaxprefetch.device.completion import dispatch_fence, have_landed, put_marker, wait_landed
from jaxprefetch.device.link import link_speed
from jaxprefetch.device.placement import Plan
from jaxprefetch.device.window import Do, Window
from jaxprefetch.statistics import LoopTimes

logger = logging.getLogger("jaxprefetch")

SAY_AFTER_SECONDS = 10.0
"""A wait that has lasted so long is logged, once a wait."""

SHORTEST_WAIT_SECONDS = 50e-6


class StagedBatch(Protocol):
    """What the staging side delivers."""

    @property
    def leaves(self) -> list[Any]: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def nbytes(self) -> int: ...


class Staging(Protocol):
    """The staging side as the feed sees it: staged batches in order, then one item with an `error` attribute."""

    def get(self, timeout: float | None) -> Any: ...
    def get_nowait(self) -> Any: ...
    def give_room(self, batches: int = 1, nbytes: int = 0) -> None: ...
    def cancel(self) -> None: ...


@dataclass(slots=True)
class _Issued:
    """A batch on its way or handed out; these references go when it is settled."""

    plan: Plan
    leaves: list[Any]
    nbytes: int

    @property
    def made(self) -> list[jax.Array]:
        return [self.leaves[i] for i in self.plan.made]

    @property
    def arrays(self) -> list[jax.Array]:
        return [self.leaves[i] for i in (*self.plan.made, *self.plan.foreign)]

    @property
    def most_bytes(self) -> int:
        return max(self.plan.cost.values(), default=0)


class Feed:
    """Hands out batches in order. Numbers go on from pass to pass; `first` is the number of this pass's batch 0."""

    def __init__(self, window: Window):
        self.window = window
        self.times = LoopTimes()
        self.first = 0
        self.error: BaseException | None = None
        self.closed = False  # written by close(), False to True
        self.largest = 0  # bytes of the largest batch, on its fullest device
        self.foreign = False  # some batch held arrays of the source's own
        self.link: float | None = None  # bytes per second to a device
        self._staging: Staging | None = None
        self._staged: deque[StagedBatch] = deque()
        self._issued: dict[int, _Issued] = {}
        self._devices: dict[jax.Device, None] = {}  # all that were ever used, in order
        self._fences: OrderedDict[int, jax.Array | None] = OrderedDict()
        self._refusal: BaseException | None = None
        self._traceback: Any = None
        self._kept: dict[int, weakref.ref[Any]] = {}  # batches handed out, by a leaf of theirs
        self._said_kept = False

    def begin_pass(self, staging: Staging) -> None:
        """Batches come from `staging` from now on; the last pass is over."""
        if self.window.ended:
            self.window.restart()
        self.first, self._staging = self.window.issued, staging

    def next(self) -> Any:
        """The next batch. Blocking: for the source, for room, and until the batch before last has landed.

        Raises:
            StopIteration: the source has ended, or the feed was closed.
            Exception: what the source, staging or putting raised, every time again.
        """
        window = self.window
        window.call()
        started = time.perf_counter()
        waited_for_source = self.times.source_ns
        while not self.closed:
            self._look()
            do, number = window.decide()
            if do is Do.HAND_OUT:
                return self._hand_out(number)
            if do is Do.END:
                self.raise_end()
            elif do is Do.SETTLE:
                self._settle(number)
            elif do is Do.ISSUE:
                self._issue(number)
            elif do is Do.FENCE:
                self._fences[number] = dispatch_fence(tuple(self._devices))
                window.fence(number)
            elif do is Do.AWAIT_FENCE:
                self._await_fence(number)
            elif do is Do.PROVE_LANDING:
                self._prove_landing(number)
            elif do is Do.AWAIT_SOURCE:
                self._await_source(number)
            elif do is Do.AWAIT_STAGED:
                seen = self.times.source_ns == waited_for_source
                self._await_staged(number, time.perf_counter() - started, step_seen=seen)
            else:
                self._no_room(number)
        raise StopIteration

    def peek(self) -> None:
        """Waits until one batch is staged or the source has ended."""
        while not (self._staged or self.window.ended or self.closed):
            self._await_source(self.window.issued)

    def clear(self) -> None:
        """Drops what was not handed out; the consumer's batch stays as it is."""
        self._staged.clear()
        self._issued.clear()
        self._fences.clear()

    @property
    def kept(self) -> int:
        """Batches that the consumer has kept beyond the next one."""
        return len(self._kept) - (self.window.taken - 1 in self._kept)

    # ---- facts

    def _look(self) -> None:
        """Takes what has been staged meanwhile, and the end after it."""
        assert self._staging is not None
        while not self.window.ended and (item := self._staging.get_nowait()) is not None:
            self._arrived(item)

    def _arrived(self, item: Any) -> None:
        if hasattr(item, "plan"):
            plan: Plan = item.plan
            self._staged.append(item)
            self.window.stage(plan.cost, foreign=bool(plan.foreign))
            self.largest = max(self.largest, max(plan.cost.values(), default=0))
            self.foreign = self.foreign or bool(plan.foreign)
        elif not self.window.ended:
            self._ends_with(item.error)
            self.window.end()

    # ---- actions

    def _settle(self, number: int) -> None:
        issued = self._issued[number]
        with self._room("landing"):
            landed = wait_landed(issued.arrays)
        if self.window.delete_used:
            for array in issued.made:
                array.delete()
        self.window.settled(number, disposed=not landed)
        del self._issued[number]
        self._give_room(0, issued.nbytes)

    def _issue(self, number: int) -> None:
        staged = self._staged[0]
        if number == 0 and staged.plan.cost:
            self.link = link_speed(next(iter(staged.plan.cost)), room=self.largest)
        try:
            with TraceAnnotation("jaxprefetch.issue"):
                leaves = staged.plan.put(staged.leaves)
        except Exception as error:
            self._refused(number, error)
            return
        self._issued[number] = _Issued(staged.plan, leaves, staged.nbytes)
        self._devices.update(dict.fromkeys(staged.plan.cost))
        self.window.issue()
        self._staged.popleft()
        self._refusal = None
        self._give_room(1, 0)

    def _refused(self, number: int, error: Exception) -> None:
        """Out of memory: once more when the batch is needed. Anything else ends the pass at this batch."""
        if "RESOURCE_EXHAUSTED" in str(error) and self._refusal is None:
            self._refusal = error
            self.window.refuse()
            return
        if "RESOURCE_EXHAUSTED" in str(error):
            need, held = self.window.shortage()
            error.add_note(
                f"jaxprefetch: batch {number - self.first} needs {need:,} bytes on a device beside the {held:,} of "
                "batches in flight. Take smaller batches, a smaller size=, or delete_used=True."
            )
        else:
            error.add_note(f"jaxprefetch: raised when batch {number - self.first} was put on its devices")
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing after the batches already issued will come."""
        assert self._staging is not None
        self._ends_with(error)
        self._staged.clear()
        self.window.fail()
        self._staging.cancel()

    def _await_fence(self, number: int) -> None:
        covering = next(step for step in self._fences if step >= number)
        with self._room("fence"):
            jax.block_until_ready(self._fences[covering])
        self._fence_done(covering)

    def _fence_done(self, number: int) -> None:
        self.window.fence_done(number)
        while self._fences and next(iter(self._fences)) <= number:
            self._fences.popitem(last=False)

    def _prove_landing(self, number: int) -> None:
        """A batch put later that is still ours alone, else a marker: once it has landed, so has this one."""
        later = [i for j, i in self._issued.items() if j >= self.window.taken and i.made and not i.plan.foreign]
        with self._room("landing"):
            jax.block_until_ready(later[0].made if later else put_marker(tuple(self._devices)))
        self.window.proved(number)

    def _await_source(self, number: int) -> None:
        assert self._staging is not None
        start = time.perf_counter_ns()
        with TraceAnnotation("jaxprefetch.wait_source"):
            item = self._staging.get(SAY_AFTER_SECONDS)
            if item is None:
                logger.warning(
                    "jaxprefetch: next() has waited %.0f s for the source to make batch %d.",
                    SAY_AFTER_SECONDS,
                    number - self.first,
                )
                item = self._staging.get(None)
        self.times.source_ns += time.perf_counter_ns() - start
        self._arrived(item)

    def _await_staged(self, number: int, waited: float, *, step_seen: bool) -> None:
        """Looks whether the device would go idle, else waits a little for the source."""
        assert self._staging is not None
        news = False
        fence = self._fences.get(number - 1)
        if number - 1 in self._fences and (fence is None or fence.is_ready()):
            self._fence_done(number - 1)
            if step_seen:
                self.times.saw_step(time.perf_counter_ns() - self.times.last_ns)
            news = True
        if have_landed(self._issued[number].made):
            self.window.landed(number)
            news = True
        if news:
            return
        start = time.perf_counter_ns()
        with TraceAnnotation("jaxprefetch.wait_source"):
            item = self._staging.get(max(SHORTEST_WAIT_SECONDS, waited / 10))
        self.times.source_ns += time.perf_counter_ns() - start
        if item is not None:
            self._arrived(item)

    def _hand_out(self, number: int) -> Any:
        issued, window = self._issued[number], self.window
        starved = window.issued < number + window.size and not window.staged and not window.ended
        window.hand_out()
        self.times.hand_out(time.perf_counter_ns(), issued.most_bytes, starved=starved)
        self._remember(number, issued)
        return jax.tree_util.tree_unflatten(issued.plan.treedef, issued.leaves)

    def raise_end(self) -> None:
        """Raises how the pass ended: the kept error, each time with the traceback that it came with, or the end."""
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)  # as it was first seen: it does not grow each time
        raise StopIteration

    def _no_room(self, number: int) -> None:
        need, held = self.window.shortage()
        cap = self.window.max_bytes
        error = ValueError(
            f"Batch {number - self.first} needs {need:,} bytes on a device, {held:,} are held by the batch that the "
            f"loop uses, and max_bytes is {cap:,}. One batch must fit with delete_used=True, two without: raise "
            "max_bytes, pass delete_used=True, or take smaller batches."
        )
        self._fail(error)

    # ---- small things

    def _ends_with(self, error: BaseException | None) -> None:
        self.error = error
        self._traceback = error.__traceback__ if error is not None else None

    def _give_room(self, batches: int, nbytes: int) -> None:
        assert self._staging is not None
        self._staging.give_room(batches, nbytes)

    def _remember(self, number: int, issued: _Issued) -> None:
        """Batches that the consumer keeps are outside of the bound: count them, and say so once."""
        if issued.made and not self.window.delete_used:
            largest = max(issued.made, key=lambda array: array.nbytes)
            self._kept[number] = weakref.ref(largest, functools.partial(_forget, self._kept, number))
        oldest = next(iter(self._kept), number)
        if not self._said_kept and oldest < number - 2:
            self._said_kept = True
            logger.warning(
                "jaxprefetch: the loop still holds batch %d at batch %d: batches that it keeps come on top of the "
                "%d in flight, and max_bytes does not count them.",
                oldest - self.first,
                number - self.first,
                self.window.size + 1,
            )

    def _room(self, what: str) -> _RoomTimer:
        return _RoomTimer(self.times, what)


def _forget(kept: dict[int, Any], number: int, _: Any) -> None:
    kept.pop(number, None)


class _RoomTimer:
    """Counts and annotates a wait for the devices."""

    def __init__(self, times: LoopTimes, what: str):
        self._times = times
        self._annotation = TraceAnnotation(f"jaxprefetch.wait_{what}")

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()
        self._annotation.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._annotation.__exit__(*error)
        self._times.room_ns += time.perf_counter_ns() - self._start
