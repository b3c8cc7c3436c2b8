"""Pull and stage, one batch a call, and what that took; nothing here has a thread of its own.

Synopsis:

    pipeline = Pipeline(Source(loader), stager)
    item = pipeline.advance(0, reserve)  # a staged batch, or End
    pipeline.close()
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from jax.profiler import TraceAnnotation

from jaxprefetch.errors import add_note
from jaxprefetch.host.source import AFTER_END, Source, close_for_good, is_dead, writes_batches

T = TypeVar("T")

EnterContext = Callable[[], contextlib.AbstractContextManager[Any]]

Reserve = Callable[[int], None]
"""Called with the bytes of host memory that a batch is about to take; waits until there are so many."""


class BatchMemory(Protocol):
    """Host memory for a batch: `out` is written by the source, `rows` takes what it returns."""

    out: Any
    rows: list[Any]

    @property
    def ended(self) -> bool: ...
    def free(self) -> None: ...


class Stages(Protocol):
    """Makes a staged batch from what was pulled (None: left out), or memory for one from what the source describes."""

    def stage(self, raw: Any, number: int, reserve: Reserve, /) -> Any: ...
    def offer(self, spec: Any, number: int, reserve: Reserve, /) -> BatchMemory: ...


class Cancelled(Exception):
    """The pass is over while a batch waits for host memory."""


@dataclass(frozen=True, slots=True)
class End:
    """The last item of a pass: the source's end, or what it (or staging) raised."""

    error: BaseException | None = None


@dataclass
class SourceTimes:
    """Nanoseconds and counts, written by the thread that pulls only."""

    pulled: int = 0
    pull_ns: int = 0
    stage_ns: int = 0
    room_ns: int = 0  # waited for room in host memory's queue
    first_ns: int = 0  # of these, for the first batch of a pass, when sources open their files
    passes: int = 0
    inside: str = "nothing yet"  # what the thread is doing, for messages

    def plus(self, other: SourceTimes) -> SourceTimes:
        """Both together."""
        return SourceTimes(
            self.pulled + other.pulled,
            self.pull_ns + other.pull_ns,
            self.stage_ns + other.stage_ns,
            self.room_ns + other.room_ns,
            self.first_ns + other.first_ns,
            self.passes + other.passes,
        )

    def working_ns(self) -> int:
        """A clock that stands still while the thread waits for room."""
        return time.perf_counter_ns() - self.room_ns

    @property
    def batch_ns(self) -> float:
        """What the source and staging take for a batch that is not the first of its pass."""
        return (self.pull_ns + self.stage_ns - self.first_ns) / max(self.pulled - self.passes, 1)


class Pipeline:
    """Pull and stage, one batch a call. The source is never called again after its end or an error."""

    def __init__(self, source: Source, stager: Stages):
        self.times = SourceTimes()
        self.iterator: Any = None
        self.places: dict[int, Any] = {}  # the source's own state, if it has one, by the number of batches pulled
        self._source = source
        self._stager = stager
        self._end: End | None = None
        self._pulls: Iterator[Any] | None = None  # what calls the iterator, in C
        self._number = -1
        self._raw: list[Any] = []  # batch `_number`, once it is pulled
        self._has_places = False  # the source has a state of its own
        self._writes = False  # it writes its batches itself
        self._offer: BatchMemory | None = None  # what it writes batch `_number` into

    def advance(self, number: int, reserve: Reserve, caught: type[BaseException] = BaseException) -> Any:
        """Batch `number`, staged, or the end; errors of type `caught` end the pass, others pass through.

        Asked again for the same number, after an interrupt, it stages again what it has pulled.
        """
        number = max(number, self._number)  # further on, where an interrupt struck behind one that was left out
        while self._end is None:
            try:
                self._pull(number, reserve)
                item = self._stage_pulled(number, reserve)
            except StopIteration:
                self._end = End()
                try:
                    self._note_place(AFTER_END, self._source.place_after())
                except caught as error:
                    add_note(error, "jaxprefetch: raised by the source, after its end, when it was set back")
                    self._end = End(error)
            except caught as error:
                self._end = End(error)
            else:
                if item is not None:
                    self._offer = None  # it is the batch's now, whatever strikes from here on
                    return item
                number += 1  # that one is left out if it was the last
        self._take_back()
        return self._end

    def forget(self) -> None:
        """The batch staged last is in safe hands."""
        self._raw.clear()

    def close(self) -> None:
        """Closes the iterator; what that raises is logged, for the pass is over."""
        self.times.inside = "closing the source"
        self._take_back()
        self._raw.clear()
        if (iterator := self.take_iterator()) is not None:
            self._source.hand_over(iterator)
            close_for_good(iterator)
        self._source.close()

    def take_iterator(self) -> Iterator[Any] | None:
        """The iterator, which whoever takes it closes; nothing is pulled from now on."""
        self._end = self._end or End()
        iterator, self.iterator, self._pulls = self.iterator, None, None
        return iterator

    def _pull(self, number: int, reserve: Reserve) -> None:
        if self._number != number:
            self._raw.clear()
            self._take_back()  # that one was left out
            self._number = number
        if self._raw:  # an interrupt struck while it was staged
            self._pulled(number)
            return
        times = self.times
        start = times.working_ns()
        with TraceAnnotation("jaxprefetch.pull"):
            pulls = self._pulls or self._ask(number, self._open)
            if self._writes:
                self._read(number, reserve)
            else:  # in one call of C's: no interrupt comes between the source's return and that
                self._ask(number, self._raw.extend, itertools.islice(pulls, 1))
        if not self._raw:
            raise StopIteration
        self._pulled(number)
        took = times.working_ns() - start
        times.pulled = number + 1
        times.pull_ns += took
        if not number:
            times.first_ns, times.passes = took, 1

    def _open(self) -> Iterator[Any]:
        if self._pulls is None:
            self._check_open()
            iterator = self.iterator
            if iterator is None:
                iterator = self.iterator = self._source.open()
            self._source.hand_over(iterator)
            self._has_places = self._source.has_places(iterator)
            self._pulled(-1)
            self._writes = writes_batches(iterator)
            self._check_open()
            self._pulls = itertools.starmap(next, itertools.repeat((iterator,)))
        return self._pulls

    def _check_open(self) -> None:
        """The iterator may be taken, and closed, from outside; then it is neither opened again nor pulled from."""
        if self._end is not None:
            raise Cancelled

    def _pulled(self, number: int) -> None:
        """Notes the source's own state behind this batch (-1: before the first), before the next one is pulled."""
        if self._has_places and number + 1 not in self.places:
            self._note_place(number + 1, self._source.place(self.iterator))

    def _note_place(self, pulled: int, place: Any) -> None:
        if place is not None:
            self.places[pulled] = place

    def _read(self, number: int, reserve: Reserve) -> None:
        """Has the source write the batch; after an interrupt again, into the same memory, unless it had returned."""
        offer = self._offer
        if offer is None:
            spec = self._ask(number, lambda: self.iterator.element_spec)
            offer = self._offer = self._staging(self._stager.offer, spec, number, reserve)
        self._write(offer, number)

    def _write(self, offer: BatchMemory, number: int) -> None:
        if not offer.rows:
            self._ask(number, lambda: offer.rows.extend(map(self.iterator.read_into, [offer.out])))  # in C, too
        if not offer.ended:
            self._raw.append(offer)

    def _ask(self, number: int, call: Callable[..., T], *args: Any) -> T:
        """Runs code of the source."""
        self.times.inside = f"the source, for batch {number}"
        try:
            return call(*args)
        except StopIteration:
            raise
        except BaseException as error:
            add_note(error, f"jaxprefetch: raised by the source while it made batch {number}")
            if is_dead(self.iterator):
                self._end = End(error)
            raise

    def _stage_pulled(self, number: int, reserve: Reserve) -> Any:
        times = self.times
        start = times.working_ns()
        with TraceAnnotation("jaxprefetch.stage"):
            item = self._staging(self._stager.stage, self._raw[0], number, reserve)
        took = times.working_ns() - start
        times.stage_ns += took
        if not number:
            times.first_ns += took
        return item

    def _staging(self, call: Callable[[Any, int, Reserve], Any], what: Any, number: int, reserve: Reserve) -> Any:
        self.times.inside = f"staging batch {number}"
        try:
            return call(what, number, reserve)
        except StopIteration as error:  # from a leaf or a predicate: not the source's end
            raise RuntimeError(f"Batch {number}: staging it raised StopIteration") from error

    def _take_back(self) -> None:
        """Memory that was offered for a batch that will not be sent."""
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.free()
