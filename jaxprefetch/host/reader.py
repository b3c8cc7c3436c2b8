"""The one thread: pulls batches from the source and stages them, a bounded number ahead.

    reader = Reader(Pipeline(source, stage), host_size=4)
    reader.start()
    item = reader.get(timeout=None)      # a staged batch, or End
    reader.give_room()                   # that batch has left host memory's queue

Two queues connect it with its consumer and no lock: `_staged` towards the consumer, with `End` as its last item, so
that "what is staged" and "has it ended" are one snapshot; `_room` towards the reader, a token for each batch that may
be pulled. `SimpleQueue.put` is reentrant, so `cancel` is safe in a finaliser that runs in the middle of anything.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from jax.profiler import TraceAnnotation

from jaxprefetch.host.source import Source, closable_from_outside, close_iterator

logger = logging.getLogger("jaxprefetch")

CLOSE_SECONDS = 1.0
"""What `close()` waits for a reader that is stuck in its source, altogether."""


class HasBytes(Protocol):
    """What a stage function makes: anything that says how much host memory it takes."""

    @property
    def nbytes(self) -> int: ...


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
    inside: str = field(default="nothing yet")  # what the thread is doing, for messages


class Pipeline:
    """Pull and stage, one batch a call. The source is never called again after its end or an error."""

    def __init__(
        self,
        source: Source,
        stage: Callable[[Any, int], HasBytes | None],
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self.times = SourceTimes()
        self.iterator: Iterator[Any] | None = None
        self._source = source
        self._stage = stage
        self._context = context
        self._end: End | None = None

    def advance(self, caught: type[BaseException] = BaseException) -> HasBytes | End:
        """The next staged batch, or the end; errors of type `caught` end the pass, others pass through."""
        while self._end is None:
            try:
                with self._context():
                    item = self._pull_and_stage()
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

    def _pull_and_stage(self) -> HasBytes | None:
        times, start = self.times, time.perf_counter_ns()
        number = times.pulled
        times.inside = f"the source, for batch {number}"
        with TraceAnnotation("jaxprefetch.pull"):
            raw = self._next(number)
        pulled = time.perf_counter_ns()
        times.pulled, times.pull_ns = number + 1, times.pull_ns + pulled - start
        times.inside = f"staging batch {number}"
        with TraceAnnotation("jaxprefetch.stage"):
            item = self._stage(raw, number)
        times.stage_ns += time.perf_counter_ns() - pulled
        return item

    def _next(self, number: int) -> Any:
        try:
            if self.iterator is None:
                self.iterator = self._source.open()
            return next(self.iterator)
        except StopIteration:
            raise
        except BaseException as error:
            error.add_note(f"jaxprefetch: raised by the source while it made batch {number}")
            raise


class Inline:
    """No thread: every `get` pulls and stages on the caller's thread."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline

    def start(self) -> None:
        """Nothing to start."""

    def get(self, timeout: float | None) -> HasBytes | End | None:
        """The next staged batch or the end. Blocking: as long as the source takes, whatever the timeout."""
        return self.pipeline.advance(Exception)

    def get_nowait(self) -> None:
        """Nothing is ever staged ahead."""

    def give_room(self, batches: int = 1, nbytes: int = 0) -> None:
        """Room is not counted."""

    def cancel(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Closes the source."""
        self.pipeline.close()


class Reader:
    """Pulls and stages on a daemon thread.

    Args:
        pipeline: what to run; only this thread touches it from `start()` on.
        host_size: batches that may be pulled and not yet issued.
        max_host_bytes: host memory of staged batches, until they have landed; one batch is always let through.

    Thread safety: `get`, `give_room` for one consumer; `cancel`, `close` for any thread at any time.
    """

    def __init__(self, pipeline: Pipeline, *, host_size: int, max_host_bytes: int | None = None):
        self.pipeline = pipeline
        self._max_host_bytes = max_host_bytes
        self._staged: SimpleQueue[HasBytes | End] = SimpleQueue()
        self._room: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._tokens = host_size  # the reader's own count
        self._bytes = 0  # the reader's own count
        self._cancelled = False  # written once, False to True
        self._thread: threading.Thread | None = None  # made by start(): a thread refers to its reader

    def start(self) -> None:
        """Starts the thread, once."""
        if self._thread is None and not self._cancelled:
            self._thread = threading.Thread(target=self._run, name="jaxprefetch-reader", daemon=True)
            _live.add(self)
            self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits until the thread is over, so long at most."""
        if self._thread is not None:
            self._thread.join(timeout)

    def get(self, timeout: float | None) -> HasBytes | End | None:
        """The next item; None when there is none after `timeout` seconds. Blocking: that long; Ctrl-C gets through."""
        try:
            return self._staged.get(timeout=timeout)
        except Empty:
            return None

    def get_nowait(self) -> HasBytes | End | None:
        """The next item if there is one."""
        try:
            return self._staged.get_nowait()
        except Empty:
            return None

    def give_room(self, batches: int = 1, nbytes: int = 0) -> None:
        """So many batches were issued, and so many bytes of host memory have landed."""
        self._room.put((batches, nbytes))

    def cancel(self) -> None:
        """Asks the thread to stop and wakes both sides. Never blocks; safe in finalisers."""
        self._cancelled = True
        self._room.put((0, 0))
        self._staged.put(End())

    def close(self) -> None:
        """Stops the thread. Blocking: about `CLOSE_SECONDS` at most; then it is left behind and closes when it wakes.

        1. cancel, and give the thread a moment: it closes the iterator itself.
        2. still inside the source: close the iterator from outside, unless it is a generator, which would refuse.
        """
        self.cancel()
        thread = self._thread
        if thread is None:
            self.pipeline.close()
            return
        if thread is threading.current_thread():
            return
        thread.join(CLOSE_SECONDS / 2)
        iterator = self.pipeline.iterator
        if thread.is_alive() and closable_from_outside(iterator):
            closer = threading.Thread(target=_close_quietly, args=(iterator,), name="jaxprefetch-closer", daemon=True)
            closer.start()
            closer.join(CLOSE_SECONDS / 4)
        thread.join(CLOSE_SECONDS / 4)
        if thread.is_alive():
            logger.warning(
                "jaxprefetch: the reader is stuck in %s and is left behind; it closes the source when it wakes.",
                self.pipeline.times.inside,
            )

    def _run(self) -> None:
        try:
            while self._wait_for_room():
                item = self.pipeline.advance()
                if isinstance(item, End):
                    self._staged.put(item)
                    return
                if not self._wait_for_bytes(item.nbytes):
                    return
                self._staged.put(item)
                del item
        finally:
            self.pipeline.close()
            _live.discard(self)

    def _wait_for_room(self) -> bool:
        """Takes a token; False when cancelled."""
        while self._tokens == 0 and not self._cancelled:
            self._take_room()
        self._tokens -= 1
        return not self._cancelled

    def _wait_for_bytes(self, nbytes: int) -> bool:
        """Takes host memory, when there is enough or nobody else has any; False when cancelled."""
        limit = self._max_host_bytes
        while limit is not None and self._bytes and self._bytes + nbytes > limit and not self._cancelled:
            self._take_room()
        self._bytes += nbytes
        return not self._cancelled

    def _take_room(self) -> None:
        start, self.pipeline.times.inside = time.perf_counter_ns(), "waiting for room"
        batches, nbytes = self._room.get()
        self._tokens += batches
        self._bytes -= nbytes
        self.pipeline.times.room_ns += time.perf_counter_ns() - start


_live: set[Reader] = set()  # readers whose thread runs; each takes itself out


def _close_quietly(iterator: Any) -> None:
    with contextlib.suppress(Exception):
        close_iterator(iterator)


def _stop_all() -> None:
    """At exit: a daemon thread that is inside JAX when the interpreter goes away would abort the process."""
    readers = list(_live)
    for reader in readers:
        reader.cancel()
    deadline = time.perf_counter() + CLOSE_SECONDS
    for reader in readers:
        reader.join(max(0.0, deadline - time.perf_counter()))


atexit.register(_stop_all)
