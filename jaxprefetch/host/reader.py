"""The one thread: pulls batches from the source and stages them, a bounded number ahead.

Synopsis:

    reader = Reader(Pipeline(Source(loader), stager), host_size=4)
    reader.start()
    reader.wait(0, timeout=None)         # until it is there
    reader.items[0]                      # the first staged batch, or End
    del reader.items[0]; reader.give_room(issued=1, landed=0)

No lock connects it with its consumer, which finds what is staged on the `Shelf`. A second queue, `_room`, wakes the
reader, which learns what has been issued and has landed.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from jaxprefetch.host.pipeline import Cancelled, End, EnterContext, Pipeline
from jaxprefetch.host.shelf import Shelf
from jaxprefetch.host.source import closable_from_outside, close_iterator

logger = logging.getLogger("jaxprefetch")

CLOSE_SECONDS = 1.0
"""What `close()` waits for a reader that is stuck in its source, altogether."""


class Reader(Shelf):
    """Pulls and stages on a daemon thread.

    Args:
        pipeline: what to run; only this thread touches it from `start()` on.
        host_size: batches that may be pulled and not yet issued.
        context: entered once, around all that the thread does.
        max_host_bytes: host memory of staged batches, until they have landed; one batch is always let through.

    Thread safety: `wait`, `give_room` for one consumer; `cancel`, `close` for any thread at any time.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        host_size: int,
        context: EnterContext = contextlib.nullcontext,
        max_host_bytes: int | None = None,
    ):
        super().__init__()
        self.pipeline = pipeline
        self._context = context
        self._max_host_bytes = max_host_bytes
        self._room: SimpleQueue[None] = SimpleQueue()
        self._host_size = host_size
        self._pulled = self._issued = self._reserved = self._landed = 0  # the thread's own counts, of batches and bytes
        self._told = 0, 0  # written by the consumer: batches issued and bytes landed
        self._wants_room = False  # written by the thread
        self._half_gone_at = 0  # when so many batches are issued; written by the thread, too
        self._thread: threading.Thread | None = None  # made by start(): a thread refers to its reader
        self.consumer: threading.Thread | None = None  # who called start() last, as each next() does
        self._runs: dict[str, threading.Thread] = {}  # "thread": the one that got to run; written with setdefault

    def start(self) -> None:
        """Starts the thread, once."""
        self.consumer = threading.current_thread()
        if self._thread is None and not self._cancelled:
            thread = threading.Thread(target=self._run, name="jaxprefetch-reader", daemon=True)
            _live.add(self)
            try:
                thread.start()
                self._thread = thread
            finally:  # no more threads to be had, or Ctrl-C, before or after it began to run: another call tries again
                if self._thread is None:
                    _live.discard(self)

    def give_room(self, issued: int, landed: int, now: bool = True) -> None:
        """So many batches have been issued altogether, and so many bytes of host memory have landed.

        Args:
            now: wakes the thread. Else it sleeps on while more than half of its batches are ahead: a thread that wakes
                up takes the GIL from the loop, for two batches one after another little longer than for one.
        """
        self._told = issued, landed
        if self._wants_room and (now or issued >= self._half_gone_at):
            self._room.put(None)

    def cancel(self) -> None:
        """Asks the thread to stop and wakes both sides. Never blocks; safe in finalisers."""
        super().cancel()
        self._room.put(None)

    def close(self) -> None:
        """Stops the thread. Blocking: `CLOSE_SECONDS` at most; then it is left behind and closes when it wakes."""
        if self._thread is None:
            self.cancel()
            self.pipeline.close()
            return
        stop([self], logging.WARNING)

    def _run(self) -> None:
        me = threading.current_thread()
        if self._runs.setdefault("thread", me) is not me:
            return  # started by a call that was interrupted, and again by the next one
        self._thread = me
        _live.add(self)
        with self._context():
            self._pull_all()

    def _pull_all(self) -> None:
        try:
            for number in itertools.count():
                if not self._wait_for_room():
                    return
                item = self.pipeline.advance(number, self._reserve)
                if self._cancelled:
                    return
                self.leave(number, item)
                self.pipeline.forget()
                if isinstance(item, End):
                    return
                del item
        finally:
            self.pipeline.close()
            _live.discard(self)

    def _wait_for_room(self) -> bool:
        """Takes room for one batch; False when cancelled."""
        self._half_gone_at = self._pulled - self._host_size // 2
        while self._pulled - self._issued >= self._host_size and not self._cancelled:
            self._take_room()
        self._pulled += 1
        return not self._cancelled

    def _reserve(self, nbytes: int) -> None:
        """Takes host memory for a batch, when there is enough or nobody else has any; gives it back if negative.

        Raises:
            Cancelled: the pass is over.
        """
        limit = self._max_host_bytes if nbytes > 0 else None
        while limit is not None and self._reserved > self._landed and self._reserved - self._landed + nbytes > limit:
            if self._cancelled:
                raise Cancelled
            self._take_room()
        self._reserved += nbytes

    def _take_room(self) -> None:
        start, self.pipeline.times.inside = time.perf_counter_ns(), "waiting for room"
        self._wants_room = True
        while self._told == (self._issued, self._landed) and not self._cancelled:
            self._room.get()
        self._wants_room = False
        self._issued, self._landed = self._told
        self.pipeline.times.room_ns += time.perf_counter_ns() - start


def stop(readers: Sequence[Reader], level: int) -> None:
    """Stops readers, all within `CLOSE_SECONDS`; those that are stuck in their sources are left behind, and logged.

    1. cancel them, and give them a moment: each closes its iterator itself.
    2. still inside the source: close the iterator from outside, unless it is a generator, which would refuse.
    """
    for reader in readers:
        reader.cancel()
    threads = {reader: reader._thread for reader in readers}
    stuck = _join(threads, CLOSE_SECONDS / 2)
    closers = {}
    for reader in stuck:
        if closable_from_outside(reader.pipeline.iterator):
            closer = threading.Thread(target=_close_quietly, args=(reader,), name="jaxprefetch-closer", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be started while the interpreter shuts down
                closer.start()
                closers[reader] = closer
    _join(closers, CLOSE_SECONDS / 4)
    for reader in _join({reader: threads[reader] for reader in stuck}, CLOSE_SECONDS / 4):
        logger.log(
            level,
            "jaxprefetch: the reader is stuck in %s and is left behind; it closes the source when it wakes.",
            reader.pipeline.times.inside,
        )


def _join(threads: Mapping[Reader, threading.Thread | None], seconds: float) -> list[Reader]:
    """Waits for all of them together; returns whose still run. A thread does not wait for itself."""
    deadline = time.perf_counter() + seconds
    me = threading.current_thread()
    running = {r: t for r, t in threads.items() if t is not None and t is not me and t.is_alive()}
    for thread in running.values():
        with contextlib.suppress(AssertionError, RuntimeError):  # threads that Python has not started cannot be joined
            thread.join(max(0.0, deadline - time.perf_counter()))
    return [reader for reader, thread in running.items() if thread.is_alive()]


def _close_quietly(reader: Reader) -> None:
    with contextlib.suppress(Exception):
        close_iterator(reader.pipeline.take_iterator())


_live: set[Reader] = set()  # readers whose thread runs; each takes itself out


@atexit.register
def _stop_all() -> None:
    """A daemon thread that is inside JAX when the interpreter goes away aborts the process.

    So readers are stopped, which is the end of the pass for those that take batches; of these the daemons have a moment
    to come to their own end. Registered after JAX's own handler, so called before it. Who reads the log of a process
    that ends well wants no warning about its threads.
    """
    readers = list(_live)
    stop(readers, logging.INFO)
    _join({reader: reader.consumer for reader in readers}, CLOSE_SECONDS / 2)
