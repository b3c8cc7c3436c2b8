"""Where any number of producers leave staged batches, a bounded number ahead of the consumers.

Synopsis:

    inbox = Inbox(size=4, taken=lambda: window.taken)
    inbox.reserve(room, timeout=None)    # a producer, `room` is any object of its own: waits, then stages
    inbox.leave(room, staged)            # or withdraw(room), if staging has failed
    inbox.wait_for_item(timeout=None)    # a consumer: until there is one, or the end
    inbox.changed()                      # after a batch was taken

To the engine it is what a reader is: `items` by number, with `End` as the last. One lock guards the counts; it is never
held while a batch is staged, JAX runs or something is logged. Who waits has a bell of its own, and `close` needs no
lock, so a finaliser may call it in the middle of anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jaxprefetch.errors import SAY_AFTER_SECONDS
from jaxprefetch.host.bells import Bells
from jaxprefetch.host.pipeline import End

logger = logging.getLogger("jaxprefetch")


class QueueClosed(ValueError):
    """Nothing can be put any more: the queue was closed, or has failed."""


class Inbox:
    """Staged batches of one pass, which begins anew with `start_over`.

    Args:
        size: batches that may be here and not taken, with those that are being staged.
        taken: how many batches have been taken, of all passes.

    Attributes:
        items: what is here, by number.
        is_new: a new pass has begun, and the engine was not told yet. Written by the thread that has the turn.

    Thread safety: all of it for any thread; `wait`, `give_room` and `start_over` for the one that has the turn.
    """

    def __init__(self, size: int, taken: Callable[[], int]):
        self.items: dict[int, Any] = {}  # put in under the lock, taken out by the engine
        self.is_new = False
        self._size = size
        self._taken_of_all = taken
        self._bells = Bells()  # of those that wait
        self._closed = False  # written once, False to True
        self._lock = self._bells.lock
        self._before = 0  # batches taken in passes before; this and all below guarded by _lock
        self._left = 0  # batches that were left here in this pass
        self._reserved: set[object] = set()  # room for batches that are being staged

    def __len__(self) -> int:
        """Batches left and not taken."""
        with self._lock:
            return self._left - self._taken

    @property
    def count(self) -> int:
        """Batches left here in this pass: the number that the next one will have, unless another is quicker."""
        return self._left

    def reserve(self, room: object, timeout: float | None) -> bool:
        """Takes room for a batch, which `room` stands for. Blocking: so many seconds; False when there was none.

        Raises:
            QueueClosed: nothing is taken any more.
        """
        return self._wait_for(lambda: self._take_room(room), timeout, "put() has waited %.0f s for room in the queue.")

    def withdraw(self, room: object) -> None:
        """Gives the room back, if it was taken and nothing was left there; rings for what was not rung for, too."""
        with self._lock:
            self._reserved.discard(room)
        self._bells.ring()

    def leave(self, room: object, item: Any) -> None:
        """Puts a staged batch into the room that was reserved.

        Raises:
            QueueClosed: the inbox was closed meanwhile; the room is still reserved.
        """
        with self._lock:
            self._check_open()
            self.items[self._left] = item
            self._left += 1
            self._reserved.discard(room)
            self._bells.ring()

    def wait_for_item(self, timeout: float | None) -> bool:
        """Whether a batch is here or the end is known, within so many seconds. Blocking: that long."""
        some = self._wait_for(self._has_item_or_end, timeout, "get() has waited %.0f s for a batch.")
        self._tell_end()
        return some

    def changed(self) -> None:
        """Batches have been taken."""
        self._bells.ring()

    def close(self) -> None:
        """Nothing is left here any more; what is here stays. Never blocks; safe in finalisers.

        One may have struck `leave` on its own thread, half-way: so where the end is, is worked out by those who wait
        for it, under the lock.
        """
        self._closed = True
        try:
            self._bells.ring()
        except BaseException:  # a Ctrl-C has struck it
            self._bells.ring()
            raise

    def start_over(self, taken: int) -> list[Any]:
        """Begins a new pass and gives out what was not issued in the last.

        Args:
            taken: what the count of batches taken will be when the new pass begins.
        """
        with self._lock:
            dropped = [item for item in self.items.values() if not isinstance(item, End)]
            self.items, self._left, self._before, self.is_new = {}, 0, taken, True  # together: nothing is called
            return dropped

    # ---- as the engine sees it

    def wait(self, number: int, timeout: float | None) -> bool:
        """Whether item `number` is here within so many seconds, or never will be. Blocking: that long."""
        here = self._bells.sleep_until(lambda: number in self.items or self._closed, timeout)
        self._tell_end()
        return here

    def give_room(self, issued: int, landed: int, now: bool) -> None:
        """Room is counted by what is taken."""

    def cancel(self) -> None:
        """The engine has failed."""
        self.close()

    # ---- under the lock

    @property
    def _taken(self) -> int:
        return self._taken_of_all() - self._before

    def _has_room_or_end(self) -> bool:
        return self._closed or self._left + len(self._reserved) - self._taken < self._size

    def _has_item_or_end(self) -> bool:
        return self._closed or self._left > self._taken

    def _take_room(self, room: object) -> bool:
        if not self._has_room_or_end():
            return False
        self._check_open()
        self._reserved.add(room)
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed

    # ---- waiting

    def _tell_end(self) -> None:
        with self._lock:
            if self._closed:
                self.items.setdefault(self._left, End())

    def _wait_for(self, ready: Callable[[], bool], timeout: float | None, text: str) -> bool:
        if timeout is not None:
            return self._bells.sleep_until(ready, timeout)
        if not self._bells.sleep_until(ready, SAY_AFTER_SECONDS):
            logger.warning("jaxprefetch: " + text, SAY_AFTER_SECONDS)
            self._bells.sleep_until(ready, None)
        return True
