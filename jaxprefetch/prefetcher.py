"""The iterator that `prefetch_to_device` returns: passes, turns, and who closes what.

Synopsis:

    with DevicePrefetcher(source, stager, window, placement, Reading(host_size=4, max_host_bytes=None)) as batches:
        batch = next(batches)
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from jaxprefetch.device.completion import released_by
from jaxprefetch.device.context import SourceContext
from jaxprefetch.device.feed import Feed
from jaxprefetch.device.handout import HandOut, OnDevice
from jaxprefetch.device.placement import Placement
from jaxprefetch.device.window import Window
from jaxprefetch.host.pipeline import Pipeline, SourceTimes
from jaxprefetch.host.places import Places
from jaxprefetch.host.resume import ResumableSource
from jaxprefetch.reading import AnyReader, Reading
from jaxprefetch.staging import Stager
from jaxprefetch.statistics import PrefetchStatistics, snapshot

logger = logging.getLogger("jaxprefetch")
T = TypeVar("T")
_NOTHING = object()


class DevicePrefetcher(Generic[T]):
    """What `prefetch_to_device` returns: an iterator of batches on their devices, and a context manager.

    `iter()` in the middle of a pass continues it; after the end it begins a new pass if the source can be iterated
    again (`reiterable`). After an error, and after the end until `iter()`, `next()` raises the same again.
    """

    def __init__(
        self,
        source: ResumableSource,
        stager: Stager,
        window: Callable[..., Window],
        placement: Placement,
        reading: Reading,
        *,
        on_device: OnDevice | None = None,
    ):
        self._readers: list[AnyReader] = []  # the current one, if any; __del__ finds it, whatever fails below
        self._source = source
        self.reiterable = source.reiterable
        self._places = Places(source, one_back=reading.pads)
        self._stager = stager
        self._reading = reading
        self._context = placement.context
        handout = HandOut(on_device, placement.context)
        self._feed = Feed(window(released_by=released_by(placement.devices), inline=reading.inline), handout)
        self._past, self._times = SourceTimes(), SourceTimes()  # of passes that are over, of the last one
        self._over = False  # the current pass has ended
        self._said_spent = False
        self._turn = threading.Lock()  # held by the thread inside next()
        self._undelivered: Any = _NOTHING  # handed out by the feed, and kept from the loop by a Ctrl-C

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Its thread stops by itself. No weakref.finalize, which would refer to the reader: that refers to the source's
        # error, this to the frames that have seen it, and they to the prefetcher, which would stay for ever.
        if not ending():
            self._cancel()

    def __iter__(self) -> Iterator[T]:
        """Itself: in the middle of a pass it goes on, after the end it begins a new one if the source allows.

        Raises:
            ValueError: the prefetcher is closed.
            Exception: the error with which the pass has ended.
        """
        if self._feed.closed:
            raise ValueError("This prefetcher is closed. Make a new one to iterate again.")
        if self._over:
            if self._feed.error is not None:
                self._feed.raise_end()
            if self.reiterable:
                self._end_pass()
                self._places.next_pass()
                self._over = False
            elif not self._said_spent:
                self._said_spent = True
                logger.warning(
                    "jaxprefetch: the source serves one pass and is spent, so this pass is empty. To go through it "
                    "again pass an iterable: a list, a loader, an object whose __iter__ makes a new iterator or reader."
                )
        return self

    def __next__(self) -> T:
        """The next batch, on its devices.

        Blocking: until it is staged, until there is room for it, and until the batch handed out last has landed.

        Raises:
            StopIteration: the source has ended, or the prefetcher was closed.
            Exception: what the source, or staging or putting this batch, raised; the same again at every later call.
            RuntimeError: another thread is inside `next()`.
        """
        batch: Any = _NOTHING
        try:
            if not self._is_free():
                raise StopIteration
            with self._turn:
                batch = self._next()
            self._clear_if_closed()
            self._undelivered = _NOTHING
            return batch
        except BaseException:
            if batch is not _NOTHING:  # a Ctrl-C struck after the hand-out
                self._undelivered = batch
            self._clear_if_closed()
            raise

    def __enter__(self) -> DevicePrefetcher[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start_prefetch(self) -> None:
        """Starts the thread that pulls and stages, as the first `next()` would. Does not wait for it.

        Raises:
            RuntimeError: no thread can be had; another call tries again.
        """
        if not self._turn.locked():  # else a next() runs, which has done so
            with self._turn:
                self._begin_pass()
        self._clear_if_closed()

    def next_is_staged(self) -> bool:
        """Whether `next()` would not wait for the source; False before anything was started, and where `max_host_bytes`
        holds a batch back until `next()` has seen the one before land. Never blocks."""
        return self._over or (bool(self._readers) and self._feed.has_next)

    @property
    def element_spec(self) -> Any:
        """The tree of `jax.ShapeDtypeStruct` (global shapes, shardings) of the first batch, as it is delivered.

        Leaves kept on the host that are no arrays of numbers show their type. Blocking: for the first batch.

        Raises:
            ValueError: there is no first batch: the source is empty, or the prefetcher was closed before.
            RuntimeError: another thread is inside `next()`.
            Exception: what the source, or staging, raised instead of it; what a node of the batch raises that refuses
                `jax.ShapeDtypeStruct` for its leaves, as it would under `jax.eval_shape`; what `on_device` raises.
        """
        if self._spec() is None and self._is_free():
            with self._turn:
                self._begin_pass()
                self._feed.peek()
        self._clear_if_closed()
        if (spec := self._spec()) is not None:
            return spec
        if self._feed.error is not None:
            self._feed.raise_end()
        why = "the prefetcher is closed" if self._feed.closed else "the source is empty"
        raise ValueError(f"element_spec: {why}, so there is no first batch to tell it from.")

    def close(self) -> None:
        """Ends the pass for good and frees what was not handed out; the batch in the loop's hands stays alive.

        Blocking: about a second at most, for a reader that is inside the source; it is then left behind, which is
        logged, and closes the source when it wakes. Where several processes agree, up to 1.5 s more for their service.

        Thread safety: any thread, any number of times; a call while another one closes returns at once. A `next()` that
            waits elsewhere closes, and ends with `StopIteration`.
        """
        self._feed.closed = True
        self._end_pass()
        self._clear_if_closed()

    def get_state(self) -> dict[str, Any]:
        """Where the loop is in the source: behind the batch taken last, whatever is on its way.

        A dict of pass, batches taken and the source's own state, if it has one; for `set_state` of a prefetcher made
        like this one, of a source made like this one. Blocking: for the first batch, if the thread was started before.

        Raises:
            TypeError: the source has no state of its own, or tells none here, and `resume="replay"` was not given.
            RuntimeError: another thread is inside the first `next()`.
            Exception: what the source raised when it was asked for its state.
        """
        if self._readers and not self._taken() and self._is_free():
            with self._turn:
                self._feed.peek()
        return self._places.get(self._taken(), self._stager.rows, ended=self._over and self._feed.error is None)

    def set_state(self, state: Any) -> None:
        """The first batch will be the one after those that were taken when `get_state()` gave this.

        With `resume="replay"` the source is gone through again up to there, when the first batch is asked for.

        Raises:
            ValueError: reading has begun; the state is that of another kind of source.
            TypeError: see `get_state`.
        """
        self._places.set(state)

    def statistics(self) -> PrefetchStatistics:
        """Counts, bytes and waits so far, and what the loop is bound by. Never blocks."""
        return snapshot(self._feed, self._past.plus(self._times), inline=self._reading.inline)

    def _spec(self) -> Any:
        if self._feed.handout.on_device is None:
            return self._stager.element_spec
        delivery = self._feed.first_delivery
        return None if delivery is None else delivery.spec

    @property
    def in_pass(self) -> bool:
        """Whether batches of this pass were taken, and its end was not told yet."""
        return bool(self._readers) and not self._over and self._taken() > 0

    def _taken(self) -> int:
        """Batches of this pass that the loop has."""
        return self._feed.window.taken - self._feed.first - (self._undelivered is not _NOTHING)

    def _is_free(self) -> bool:
        """Whether this thread may take the turn, which is taken by `with` only: that a Ctrl-C cannot tear apart.

        False when the prefetcher is closed just now. Another thread that is quicker has to be waited for.
        """
        if not self._turn.locked():
            return True
        if self._feed.closed:
            return False
        raise RuntimeError(
            "next() was called while another call of it runs: one thread at a time may take batches. "
            "Take them in one thread and hand them on."
        )

    def _clear_if_closed(self) -> None:
        """Frees what a closed prefetcher still holds: whoever has the turn last, or closes when nobody has it."""
        if self._feed.closed and not self._turn.locked():
            with self._turn:
                self._end_pass()
                self._feed.clear()
                self._stager.close()
                self._reading.close()
                if not self._places.begun:  # else whoever pulls does, when it comes to that
                    self._source.close()
                if self._undelivered is not _NOTHING:
                    self._undelivered = None  # and it still counts as not taken

    def _begin_pass(self) -> None:
        """Starts the reader where there is none; needs the turn."""
        for reader in self._readers:
            reader.start()  # nothing, unless a thread could not be had before
        if self._readers or self._over or self._feed.closed:
            return
        self._stager.begin_pass(self._places.rows)
        pipeline = Pipeline(self._source, self._stager)
        self._places.begin_pass(pipeline.places, lambda: pipeline.times.pulled)
        context, again = SourceContext(self._context).entered, bool(self._places.ahead)
        reader = self._reading.begin_pass(pipeline, context, self._source, self._stager, again=again)
        self._past, self._times = self._past.plus(self._times), pipeline.times
        self._feed.begin_pass(reader)
        self._readers.append(reader)
        if self._feed.closed:  # by another thread meanwhile
            self._end_pass()
        reader.start()

    def _cancel(self) -> None:
        for reader in list(self._readers):
            reader.cancel()

    def _end_pass(self) -> None:
        self._cancel()  # whatever strikes before it is closed, it ends
        with contextlib.suppress(IndexError):  # there is none, or another thread ends it
            self._readers.pop().close()

    def _next(self) -> T:
        """The batch, or the end; needs the turn."""
        if self._feed.closed:
            raise StopIteration
        if self._undelivered is not _NOTHING:
            return self._undelivered
        if self._over:
            self._feed.raise_end()
        self._begin_pass()
        self._places.forget(taken := self._taken())
        for reader in self._readers:
            reader.before_next(taken)
        try:
            return self._feed.next()
        except BaseException as error:
            self._over = error is self._feed.error or isinstance(error, StopIteration)
            raise
