"""SIGTERM, which machines that are taken away send first: the loop ends after the step that it is in.

Synopsis:

    with Termination(batches.close) as termination:
        while not termination.requested:
            batch = termination.interrupting(lambda: next(batches))
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger("jaxprefetch")


class Termination:
    """Listens to SIGTERM while it is entered, in the main thread; elsewhere signals are none of its business.

    The first signal is a request. It also puts back the handler that was there before, so that a second one does what
    it would have done without us: it stops the process at once.

    Args:
        end_wait: makes the loop's `next()` return; called when the signal comes while that waits for the source.
    """

    def __init__(self, end_wait: Callable[[], None]):
        self.requested = False
        self._end_wait = end_wait
        self._waiting = False
        self._previous: Any = None

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGTERM)
            if self._previous is not None:  # None: of some C library, which could not be put back
                signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        self._put_back()

    def interrupting(self, wait: Callable[[], T]) -> T:
        """What `wait` returns, which waits for the source."""
        self._waiting = True
        try:
            if self.requested:  # just before the line above, when nobody waited
                self._end_wait()
            return wait()
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._put_back()
        logger.warning("jaxprefetch: SIGTERM: the loop ends after this step. A second one stops the process at once.")
        if self._waiting:
            self._end_wait()

    def _put_back(self) -> None:
        previous, self._previous = self._previous, None
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
