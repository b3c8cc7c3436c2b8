"""Where one thread leaves items by number and another finds them, without a lock.

Synopsis:

    shelf = Shelf()
    shelf.leave(0, staged)               # one thread
    shelf.wait(0, timeout=None)          # the other, until it is there
    shelf.items.pop(0)

"What is there" and "has it ended" are one snapshot, and an interrupt that strikes after a wait loses nothing. The queue
only wakes. `SimpleQueue.put` is reentrant, so `cancel` is safe in a finaliser that runs in the middle of anything.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import Any


class Shelf:
    """Items by number; the last one is an `End`.

    Thread safety: `leave` for one thread, `wait` for one other; `cancel` for any thread at any time.
    """

    def __init__(self) -> None:
        self.items: dict[int, Any] = {}  # put in by the one thread, taken out by the other
        self._news: SimpleQueue[None] = SimpleQueue()
        self._waited_for = False  # written by the thread that waits
        self._cancelled = False  # written once, False to True

    def before_next(self, taken: int) -> None:
        """The loop's thread is about to ask for the batch of this number. Nothing is to be done there."""

    def leave(self, number: int, item: Any) -> None:
        """Puts an item where the other thread finds it."""
        self.items[number] = item
        if self._waited_for:
            self._news.put(None)

    def wait(self, number: int, timeout: float | None) -> bool:
        """Whether item `number` is there within so many seconds. Blocking: that long; Ctrl-C and `cancel` get through.

        `leave` rings only for a thread that waits. None is missed: who waits says so and then looks for the item, who
        leaves it puts it in and then looks whether somebody waits.
        """
        self._waited_for = True
        try:
            while number not in self.items and not self._cancelled:
                self._news.get(timeout=timeout)
        except Empty:
            return False
        finally:
            self._waited_for = False
        return True

    def cancel(self) -> None:
        """Nothing more is wanted: wakes whoever waits. Never blocks; safe in finalisers."""
        self._cancelled = True
        self._news.put(None)
