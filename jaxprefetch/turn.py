"""One thread at a time, while the others wait.

Synopsis:

    turn = Turn()
    if not turn.run(work, timeout=1.0):
        ...                              # others had it all the while
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from jaxprefetch.host.bells import Bells


class Turn:
    """A lock that knows who has it: a thread that was torn out of its turn by a Ctrl-C has it still."""

    def __init__(self) -> None:
        self._bells = Bells()
        self._holder: threading.Thread | None = None  # taken under the lock, given up by the holder

    def run(self, work: Callable[[], None], timeout: float | None = None) -> bool:
        """Calls `work` in this thread's turn; False when that did not come within so many seconds. Blocking: for it.

        No context manager: one by `contextlib` would set the traceback of what is raised inside, which a frozen
        dataclass refuses, and `__exit__` of another can be struck by a Ctrl-C before it has done anything.
        """
        me = threading.current_thread()
        try:
            if its_turn := self._bells.sleep_until(lambda: self._takes(me), timeout):
                work()
            return its_turn
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
