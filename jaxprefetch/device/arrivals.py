"""What the staging side has delivered in this pass, by its number there, and the waiting for more.

Synopsis:

    arrivals = Arrivals(times)
    arrivals.begin_pass(staging)
    arrivals.wait(0)                     # whether batch 0 has come; False: it never will
    staged = arrivals.items[0]
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jaxprefetch.device.staged import Staging
from jaxprefetch.device.times import LoopTimes
from jaxprefetch.errors import SAY_AFTER_SECONDS

logger = logging.getLogger("jaxprefetch")


class Arrivals:
    """Used by one thread at a time.

    Attributes:
        items: staged batches, and last one item with an `error`.
        give_room: tells that so many batches of this pass have been issued, and so many bytes of host memory are free
            again; and whether the staging side has to use that now.
    """

    def __init__(self, times: LoopTimes):
        self.items: dict[int, Any] = {}
        self.give_room: Callable[[int, int, bool], None]
        self._times = times
        self._staging: Staging

    def begin_pass(self, staging: Staging) -> None:
        """Batches come from `staging` from now on."""
        self._staging, self.items, self.give_room = staging, staging.items, staging.give_room

    def wait(self, number: int) -> bool:
        """Waits for an item; False when it will never come, as when the interpreter exits."""
        with self._times.for_source:
            if not self._staging.wait(number, SAY_AFTER_SECONDS):
                logger.warning(
                    "jaxprefetch: next() has waited %.0f s for the source to make batch %d.", SAY_AFTER_SECONDS, number
                )
                self._staging.wait(number, None)
        return number in self.items

    def wait_briefly(self, number: int, seconds: float) -> bool:
        """Waits for an item at most so long; False when it will never come."""
        with self._times.for_source:
            return not self._staging.wait(number, seconds) or number in self.items

    def cancel(self) -> None:
        """Nothing more is wanted of this pass."""
        self._staging.cancel()
