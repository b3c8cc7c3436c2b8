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


class Turn:
    """A lock that knows who has it: a thread that was torn out of its turn by a Ctrl-C has it still."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: threading.Thread | None = None  # guarded by _changed

    @contextlib.contextmanager
    def taken(self, timeout: float | None = None) -> Iterator[bool]:
        """Whether the turn is this thread's, within so many seconds. Blocking: that long."""
        me = threading.current_thread()
        with self._changed:
            mine = self._changed.wait_for(lambda: self._is_free_for(me), timeout)
            if mine:
                self._holder = me
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._holder = None
                    self._changed.notify()

    def _is_free_for(self, thread: threading.Thread) -> bool:
        return self._holder is None or self._holder is thread or not self._holder.is_alive()
