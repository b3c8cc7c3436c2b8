"""Pull and stage, one batch a call, and what that took; nothing here has a thread of its own.

Synopsis:

    pipeline = Pipeline(Source(loader), stage)
    item = pipeline.advance(reserve)     # a staged batch, or End
    pipeline.close()
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.profiler import TraceAnnotation

from jaxprefetch.host.source import Source, close_iterator

logger = logging.getLogger("jaxprefetch")


Reserve = Callable[[int], None]
"""Called with the bytes of host memory that a batch is about to take; waits until there are so many."""


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

    @property
    def batch_ns(self) -> float:
        """What the source and staging take for a batch that is not the first of its pass."""
        return (self.pull_ns + self.stage_ns - self.first_ns) / max(self.pulled - self.passes, 1)


class Pipeline:
    """Pull and stage, one batch a call. The source is never called again after its end or an error."""

    def __init__(
        self,
        source: Source,
        stage: Callable[[Any, int, Reserve], Any],
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self.times = SourceTimes()
        self.iterator: Iterator[Any] | None = None
        self._source = source
        self._stage = stage
        self._context = context
        self._end: End | None = None
        self._raw: tuple[Any] | None = None  # what was pulled and is not staged

    def advance(self, reserve: Reserve, caught: type[BaseException] = BaseException) -> Any:
        """The next staged batch, or the end; errors of type `caught` end the pass, others pass through."""
        while self._end is None:
            try:
                with self._context():
                    item = self._pull_and_stage(reserve)
            except StopIteration:
                self._end = End()
            except caught as error:
                self._end = End(error)
            else:
                if item is not None:
                    return item
        return self._end

    def close(self) -> None:
        """Closes the iterator; what that raises is logged, for the pass is over."""
        iterator, self.iterator = self.iterator, None
        self._end = self._end or End()
        try:
            with self._context():
                close_iterator(iterator)
        except Exception:
            logger.exception("jaxprefetch: closing the source's iterator %r failed", type(iterator).__name__)

    def _pull_and_stage(self, reserve: Reserve) -> Any:
        times, start = self.times, time.perf_counter_ns()
        if self._raw is None:  # else an interrupt struck while it was staged
            times.inside = f"the source, for batch {times.pulled}"
            with TraceAnnotation("jaxprefetch.pull"):
                self._raw = (self._next(times.pulled),)
            times.pulled += 1
            times.pull_ns += time.perf_counter_ns() - start
        pulled, number = time.perf_counter_ns(), times.pulled - 1
        times.inside = f"staging batch {number}"
        with TraceAnnotation("jaxprefetch.stage"):
            item = self._staged(self._raw[0], number, reserve)
        self._raw = None
        times.stage_ns += time.perf_counter_ns() - pulled
        if not number:
            times.first_ns, times.passes = time.perf_counter_ns() - start, 1
        return item

    def _staged(self, raw: Any, number: int, reserve: Reserve) -> Any:
        try:
            return self._stage(raw, number, reserve)
        except StopIteration as error:  # from a leaf or a predicate: not the source's end
            raise RuntimeError(f"Batch {number}: staging it raised StopIteration") from error

    def _next(self, number: int) -> Any:
        try:
            if self.iterator is None:
                self.iterator = self._source.open()
            return next(self.iterator)
        except StopIteration:
            raise
        except BaseException as error:
            error.add_note(f"jaxprefetch: raised by the source while it made batch {number}")
            if inspect.isgenerator(self.iterator):
                self._end = End(error)  # it is dead; asked again it would say that it has ended
            raise


class Inline:
    """No thread: every `wait` pulls and stages on the caller's thread."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.items: dict[int, Any] = {}
        self._cancelled = False  # written once, False to True
        self._inside = threading.Lock()  # held while the source runs; never waited for

    def start(self) -> None:
        """Nothing to start."""

    def wait(self, number: int, timeout: float | None) -> bool:
        """Pulls and stages the next batch, however long that takes."""
        with self._inside:
            item = self.items[number] = self.pipeline.advance(lambda nbytes: None, Exception)
            if isinstance(item, End):
                self.pipeline.close()
        self._close_if_cancelled()
        return True

    def give_room(self, issued: int, landed: int) -> None:
        """Room is not counted."""

    def cancel(self) -> None:
        """Closes the source: now, or when the call that is inside it returns."""
        self._cancelled = True
        self._close_if_cancelled()

    close = cancel

    def _close_if_cancelled(self) -> None:
        if self._cancelled and self._inside.acquire(blocking=False):
            try:
                self.pipeline.close()
            finally:
                self._inside.release()
