"""`DeviceQueue`: batches from any number of threads, on their devices when any number of others take them.

Synopsis:

    queue = DeviceQueue(4, sharding=sharding, max_bytes="2GiB")
    queue.put(trajectory)                # actors, each on its own thread
    for batch in queue:                  # the learner, until close()
        state, metrics = train_step(state, batch)

It has the engine of `prefetch_to_device`: the same staging, on the threads that put, and the same window, which the
threads that get keep filled.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from queue import Empty, Full
from threading import TIMEOUT_MAX, Thread, current_thread
from types import TracebackType
from typing import Any, Generic, TypeVar

import jax

from jaxprefetch.arguments import integer, parse_bytes, seconds
from jaxprefetch.device.completion import released_by
from jaxprefetch.device.feed import Feed
from jaxprefetch.device.handout import HandOut
from jaxprefetch.device.kept import KeptBatches
from jaxprefetch.device.placement import Placement
from jaxprefetch.device.window import Window
from jaxprefetch.errors import WithoutOptions
from jaxprefetch.host.inbox import Inbox, QueueClosed
from jaxprefetch.host.memory import default_host_bytes
from jaxprefetch.layout import Staged, StagingOptions
from jaxprefetch.shapes import Alike
from jaxprefetch.staging import Stager, stager
from jaxprefetch.turn import Turn

T = TypeVar("T")
_NOTHING = object()


class DeviceQueue(Generic[T]):
    """A bounded queue of batches, in host memory first and then on their devices, in the order in which they came.

    A batch that is put is copied on the producer's thread into (pinned) host memory, so the producer may use its arrays
    again. A thread that gets puts the batches after its own on the devices before it returns, so that their copies hide
    behind its step, as with `prefetch_to_device`.

    With devices of several processes in `sharding` every process has a queue of its own, and nothing is agreed on: all
    have to put, and take, the same number of batches of the same shapes. One that takes a batch more than the others
    have is, in the step that it gives it to, in a collective without them.

    Host memory: `size + 1` batches at most are in it, those put and not taken and the one taken last. On a GPU it is
    pinned, up to an eighth more for each, and kept for the next batches: each of the threads that put at the same time
    may come to keep so much. It is given back at the end of a `with` block, or with the queue. On a CPU it is the
    batch's own, and stays as long as the batch does.

    Args:
        size: batches that were put and not taken; at this bound `put` waits. On the devices there are besides the
            batches of the consumers: one for each thread that takes batches, until it takes the next; for a moment
            two, while a thread replaces the one by the other.
        sharding: as for `prefetch_to_device`, resolved now.
        max_bytes: the most bytes of batches on any one device, those of the consumers included, without that moment. A
            batch for each of them and one more must fit.

    Raises:
        TypeError, ValueError: an argument is not what it should be.

    Thread safety: any method, any thread.
    """

    def __init__(self, size: int, *, sharding: Any = None, max_bytes: int | str | None = None):
        size, self._max_bytes = integer("size", size, 1), parse_bytes("max_bytes", max_bytes)
        self._placement = Placement(sharding)
        window = Window(size, max_bytes=self._max_bytes, released_by=released_by(self._placement.devices))
        undelivered: deque[Any] = deque()  # taken, and kept from the caller by a Ctrl-C; they count as not taken
        self._inbox, self._undelivered = Inbox(size, lambda: window.taken - len(undelivered)), undelivered
        self._turn = Turn()  # of the threads that get; it guards all that follows but the stagers
        self._feed = Feed(window, HandOut(None, self._placement.context), _ConsumersBatches(bound=0))
        self._feed.begin_pass(self._inbox)
        self._held: dict[Thread, weakref.ref[Any]] = {}  # the batch that each consumer took last
        self._stagers: deque[Stager] = deque()  # those that nobody uses now; append and pop are atomic
        self._alike = Alike(self._max_bytes)

    def put(self, batch: T, timeout: float | None = None) -> None:
        """Leaves a batch behind those that were put before.

        Args:
            batch: a pytree with the structure, shapes and dtypes of the first one; leaves as for `prefetch_to_device`.
            timeout: seconds to wait for room at most; 0 does not wait, `None` (or infinity) waits for ever.

        Blocking: for room, that is for consumers, until `timeout` or `close()`; then while the batch is copied.

        Raises:
            queue.Full: there was no room within `timeout`.
            QueueClosed: (a ValueError) the queue was closed, or has failed.
            ValueError: the batch is not like the others, or does not go where it should; nothing has changed.
            TypeError, OverflowError: a leaf cannot go to a device; nothing has changed.
        """
        timeout = _timeout(timeout)
        try:
            if not self._put(batch, timeout):
                raise Full(f"put: the queue had no room within {timeout:g} s. Take batches faster, or wait longer.")
        except QueueClosed:
            why = "is closed" if self._feed.error is None else f"has failed, and get() raises {self._feed.error!r}"
            raise QueueClosed(f"put: this queue {why}. Make a new one.") from None

    def get(self, timeout: float | None = None) -> T:
        """The oldest batch, on its devices.

        Args:
            timeout: seconds to wait for a batch at most; 0 does not wait, `None` (or infinity) waits for ever. Waits
                for the devices are not cut short by it.

        Blocking: for producers and for other consumers, until `timeout` or `close()`; for room on the devices, and
            until the batch that was taken before this one has landed. A Ctrl-C loses nothing.

        Raises:
            queue.Empty: there was no batch within `timeout`.
            EOFError: the queue is closed, and all batches have been taken.
            ValueError: so many consumers hold a batch that `max_bytes` leaves no room for another; nothing has changed.
            Exception: what putting a batch on its devices has raised; again at every later call.
        """
        timeout = _timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        batch: Any = _NOTHING

        def take() -> None:
            nonlocal batch
            if self._inbox.is_new:  # a clear() was interrupted
                self._begin_anew()
            if self._undelivered:
                batch = self._undelivered[0]  # before it is gone from there
                self._undelivered.popleft()
            elif self._feed.has_next:  # else another thread has taken it
                batch = self._take()
            self._hold(batch)

        try:
            while batch is _NOTHING:
                if not (self._inbox.wait_for_item(_left(deadline)) and self._turn.run(take, _left(deadline))):
                    raise Empty(f"get: no batch came within {timeout:g} s, or another thread took it.")
            self._inbox.changed()
            return batch
        except BaseException:  # a Ctrl-C may strike wherever a function begins, or a call into C returns
            if batch is not _NOTHING:
                self._undelivered.append(batch)
                self._inbox.changed()
            raise

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """As `get()`; the end is that of an iterator."""
        try:
            return self.get()
        except EOFError:
            raise StopIteration from None

    def __len__(self) -> int:
        """Batches that were put and not taken."""
        return len(self._inbox)

    def __enter__(self) -> DeviceQueue[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        self.clear()
        for own in list(self._stagers):
            own.close()

    def close(self) -> None:
        """The end: nothing can be put any more, and waiting producers are refused; what is here can still be taken.

        Never blocks; safe in finalisers and signal handlers. Producers that fail call it, or who gets waits for them.
        """
        self._inbox.close()

    def clear(self) -> None:
        """Drops all batches that were put and not taken, so that waiting producers have room; never ends the queue.

        Blocking: for a consumer that is taking a batch, and until copies that have begun are done; the batches of
            consumers stay. A Ctrl-C leaves a queue that is cleared, or is as it was.
        """
        self._turn.run(self._clear)

    def _clear(self) -> None:
        try:
            self._undelivered.clear()
            for staged in self._inbox.start_over(self._feed.window.issued):
                staged.slot.free()
            self._begin_anew()
        finally:
            self._inbox.changed()

    # ---- producers

    def _put(self, batch: T, timeout: float | None) -> bool:
        """Leaves it if there is room; whatever strikes, wherever, the room is not taken for ever."""
        room = object()
        try:
            if not self._inbox.reserve(room, timeout):
                return False
            self._inbox.leave(room, self._staged(batch))
        except BaseException:
            try:
                self._inbox.withdraw(room)
            finally:  # again, if it was struck
                self._inbox.withdraw(room)
            raise
        return True

    @WithoutOptions()
    def _staged(self, batch: T) -> Staged:
        try:
            own = self._stagers.pop()
        except IndexError:  # all are at work
            own = stager(self._placement, StagingOptions(), default_host_bytes(), self._alike)
        try:
            staged = own.stage(batch, self._inbox.count, lambda nbytes: None)
        finally:
            self._stagers.append(own)
        assert staged is not None  # that is for short last batches that are dropped
        return staged

    # ---- consumers, in turn

    def _take(self) -> Any:
        self._leave_room_for_consumers()
        try:
            return self._feed.next()
        except StopIteration:
            raise EOFError("get: this queue is closed, and all of its batches have been taken.") from None
        except Exception:
            with WithoutOptions():  # here, where no Ctrl-C can come between a batch and who gets it
                raise

    def _hold(self, batch: Any) -> None:
        """Notes which batch this consumer has."""
        if self._max_bytes is not None:
            arrays = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array)]
            if arrays:
                self._held[current_thread()] = weakref.ref(max(arrays, key=lambda array: array.nbytes))

    def _leave_room_for_consumers(self) -> None:
        """The window counts one batch that is with a consumer; those of other consumers come off its limit."""
        if self._max_bytes is None:
            return
        self._held = {thread: held for thread, held in self._held.items() if thread.is_alive() and held() is not None}
        beyond, largest = max(len(self._held) - 1, 0), self._feed.largest
        need = (beyond + 2) * largest  # all batches have the same size
        if beyond and need > self._max_bytes:
            raise ValueError(
                f"get: {beyond + 1} threads hold a batch of {largest:,} bytes on a device, with one more that is "
                f"{need:,}; max_bytes is {self._max_bytes:,}. Raise it, or take batches on fewer threads."
            )
        self._feed.window.max_bytes = self._max_bytes - beyond * largest

    def _begin_anew(self) -> None:
        """The engine drops what it has of the pass before, and goes on with the new one; again, if it was struck."""
        feed = self._feed
        if feed.error is None:
            feed.window.fail()  # what is staged is not issued any more
            self._drain()
        if feed.error is None:
            feed.begin_pass(self._inbox)
        self._inbox.is_new = False
        self._inbox.changed()

    def _drain(self) -> None:
        try:
            while True:
                self._feed.next()
        except StopIteration:
            pass
        except Exception as error:
            if error is not self._feed.error:  # that get() raises, once it has given out what it has
                raise


class _ConsumersBatches(KeptBatches):
    """In place of the count of batches that a loop keeps: here each consumer has one, which is counted elsewhere."""

    def add(self, number: int, largest: jax.Array, first: int) -> None:
        """Nothing to count."""


def _timeout(value: Any) -> float | None:
    """So many seconds; None for ever, which is also what no clock counts to."""
    return None if value is None or (timeout := seconds("timeout", value)) > TIMEOUT_MAX else timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
