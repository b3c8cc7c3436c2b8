"""Where any number of producers leave staged batches, a bounded number ahead of the consumers.

Synopsis:

    inbox = Inbox(size=4, taken=lambda: window.taken)
    inbox.reserve(timeout=None)          # a producer: waits for room, then stages
    inbox.leave(staged)                  # or withdraw(), if staging has failed
    inbox.wait_for_item(timeout=None)    # a consumer: until there is one, or the end
    inbox.changed()                      # after a batch was taken

To the engine it is what a reader is: `items` by number, with `End` as the last. One lock guards the counts; it is never
held while a batch is staged or JAX runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from jaxprefetch.errors import SAY_AFTER_SECONDS
from jaxprefetch.host.pipeline import End

logger = logging.getLogger("jaxprefetch")


class Closed(Exception):
    """Nothing can be left here any more."""


class Inbox:
    """Staged batches of one pass, which begins anew with `start_over`.

    Args:
        size: batches that may be here and not taken, with those that are being staged.
        taken: how many batches have been taken, of all passes.

    Thread safety: all of it for any thread; `wait`, `give_room` and `start_over` for the one that has the turn.
    """

    def __init__(self, size: int, taken: Callable[[], int]):
        self.items: dict[int, Any] = {}  # put in under the lock, taken out by the engine
        self._size = size
        self._taken_of_all = taken
        self._changed = threading.Condition()
        self._before = 0  # batches taken in passes before; this and all below guarded by _changed
        self._left = 0  # batches that were left here in this pass
        self._reserved = 0  # room for batches that are being staged
        self._closed = False

    def __len__(self) -> int:
        """Batches left and not taken."""
        with self._changed:
            return self._left - self._taken

    @property
    def count(self) -> int:
        """Batches left here in this pass: the number that the next one will have, unless another is quicker."""
        return self._left

    def reserve(self, timeout: float | None) -> bool:
        """Takes room for a batch; False when there is none within so many seconds. Blocking: that long.

        Raises:
            Closed: nothing is taken any more.
        """
        with self._changed:
            if not self._wait_for(self._has_room_or_end, timeout, "put() has waited %.0f s for room in the queue."):
                return False
            self._check_open()
            self._reserved += 1
            return True

    def withdraw(self) -> None:
        """Gives the room back."""
        with self._changed:
            self._reserved -= 1
            self._changed.notify_all()

    def leave(self, item: Any) -> None:
        """Puts a staged batch into the room that was reserved.

        Raises:
            Closed: the inbox was closed meanwhile; the room is still reserved.
        """
        with self._changed:
            self._check_open()
            self.items[self._left] = item
            self._left += 1
            self._reserved -= 1
            self._changed.notify_all()

    def wait_for_item(self, timeout: float | None) -> bool:
        """Whether a batch is here or the end is known, within so many seconds. Blocking: that long."""
        with self._changed:
            some = self._wait_for(self._has_item_or_end, timeout, "get() has waited %.0f s for a batch.")
            self._tell_end()
            return some

    def changed(self) -> None:
        """Batches have been taken."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing is left here any more; what is here stays. Safe in a finaliser that runs in the middle of anything.

        It may have struck `leave` on its own thread, which has the lock already: so where the end is, is worked out by
        those who wait for it.
        """
        self._closed = True
        with self._changed:
            self._changed.notify_all()

    def start_over(self, taken: int) -> list[Any]:
        """Begins a new pass and gives out what was not issued in the last.

        Args:
            taken: what the count of batches taken will be when the new pass begins.
        """
        with self._changed:
            dropped = [item for item in self.items.values() if not isinstance(item, End)]
            self.items, self._left, self._before = {}, 0, taken
            return dropped

    # ---- as the engine sees it

    def wait(self, number: int, timeout: float | None) -> bool:
        """Whether item `number` is here within so many seconds, or never will be. Blocking: that long."""
        with self._changed:
            here = self._changed.wait_for(lambda: number in self.items or self._closed, timeout)
            self._tell_end()
            return here

    def give_room(self, issued: int, landed: int) -> None:
        """Room is counted by what is taken."""

    def cancel(self) -> None:
        """The engine has failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- under the lock

    @property
    def _taken(self) -> int:
        return self._taken_of_all() - self._before

    def _has_room_or_end(self) -> bool:
        return self._closed or self._left + self._reserved - self._taken < self._size

    def _has_item_or_end(self) -> bool:
        return self._closed or self._left > self._taken

    def _tell_end(self) -> None:
        if self._closed:
            self.items.setdefault(self._left, End())

    def _check_open(self) -> None:
        if self._closed:
            raise Closed

    def _wait_for(self, ready: Callable[[], bool], timeout: float | None, text: str) -> bool:
        if timeout is None and not self._changed.wait_for(ready, SAY_AFTER_SECONDS):
            logger.warning("jaxprefetch: " + text, SAY_AFTER_SECONDS)
        return self._changed.wait_for(ready, timeout)
