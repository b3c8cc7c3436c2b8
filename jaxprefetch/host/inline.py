"""In the place of a reader where there is no thread: whoever waits for a batch pulls and stages it.

Synopsis:

    inline = Inline(Pipeline(Source(loader), stager))
    inline.wait(0, timeout=None)
    inline.items[0]                      # the first staged batch, or End
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from jaxprefetch.host.pipeline import End, EnterContext, Pipeline


class Inline:
    """No thread: every `wait` pulls and stages on the caller's thread.

    Args:
        pipeline: what to run.
        context: entered around each call of the source.
    """

    def __init__(self, pipeline: Pipeline, context: EnterContext = contextlib.nullcontext):
        self.pipeline = pipeline
        self._context = context
        self.items: dict[int, Any] = {}
        self._cancelled = False  # written once, False to True
        self._inside = threading.Lock()  # held while the source runs; never waited for

    def start(self) -> None:
        """Nothing to start."""

    def before_next(self, taken: int) -> None:
        """As `Shelf` has it."""

    def wait(self, number: int, timeout: float | None) -> bool:
        """Pulls and stages the next batch, however long that takes."""
        with self._inside:
            if not self._cancelled:
                with self._context():
                    item = self.items[number] = self.pipeline.advance(number, lambda nbytes: None, Exception)
                    self.pipeline.forget()
                    if isinstance(item, End):
                        self.pipeline.close()
        self._close_if_cancelled()
        return True

    def give_room(self, issued: int, landed: int, now: bool = True) -> None:
        """Room is not counted."""

    def cancel(self) -> None:
        """Closes the source: now, or when the call that is inside it returns."""
        self._cancelled = True
        self._close_if_cancelled()

    close = cancel

    def _close_if_cancelled(self) -> None:
        if self._cancelled and not self._inside.locked():  # who takes it from now on sees that it is cancelled
            with self._inside, self._context():
                self.pipeline.close()
