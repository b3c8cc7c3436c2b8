"""One thread at a time, while the others wait.

Synopsis:

    turn = Turn()
    with turn.taken(timeout=1.0) as mine:
        if mine:
            ...
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from jaxprefetch.host.bells import Bells


class Turn:
    """A lock that knows who has it: a thread that was torn out of its turn by a Ctrl-C has it still."""

    def __init__(self) -> None:
        self._bells = Bells()
        self._holder: threading.Thread | None = None  # taken under the lock, given up by the holder

    @contextlib.contextmanager
    def taken(self, timeout: float | None = None) -> Iterator[bool]:
        """Whether the turn is this thread's, within so many seconds. Blocking: that long."""
        me = threading.current_thread()
        try:
            yield self._bells.sleep_until(lambda: self._takes(me), timeout)
        finally:
            try:
                self._give_up(me)
            finally:  # again, if it was struck
                self._give_up(me)

    def _takes(self, thread: threading.Thread) -> bool:
        if self._holder is None or self._holder is thread or not self._holder.is_alive():
            self._holder = thread
        return self._holder is thread

    def _give_up(self, thread: threading.Thread) -> None:
        """Nothing, if it is another's."""
        if self._holder is thread:
            self._holder = None
        self._bells.ring()
