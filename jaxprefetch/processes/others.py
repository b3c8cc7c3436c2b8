"""What becomes of a wait for other processes that takes long: has one failed, and who is missing?

Synopsis:

    others = Others(agreement, process=1)
    others.failure(12)                   # what one has told that has failed there or before; None: all seems well
    others.say(12, waited=11.0)          # logs who has not announced batch 12
"""

from __future__ import annotations

import logging
import time
from typing import Any

from jaxprefetch.errors import SAY_AFTER_SECONDS
from jaxprefetch.processes.agreement import Agreement
from jaxprefetch.processes.verdict import names

logger = logging.getLogger("jaxprefetch")

LOOK_SECONDS = 1.0
"""How long a wait lasts before somebody looks whether another process has failed."""
GRACE_SECONDS = 5.0
"""How long batches before the one at which another process failed are waited for."""


class Others:
    """Used by the thread that agrees.

    Args:
        agreement: on this pass.
        process: this one.
    """

    def __init__(self, agreement: Agreement, process: int):
        self._agreement, self._process = agreement, process
        self._looked = time.monotonic()
        self._failed_at: float | None = None  # when it was seen that another has failed
        self._said = -1  # of which batch it was said that this process waits
        self._logged = -1

    @property
    def due(self) -> bool:
        """Whether nobody has looked for a while."""
        return time.monotonic() - self._looked > LOOK_SECONDS

    def failure(self, number: int) -> dict[str, Any] | None:
        """What another process has told that has failed at this batch or before, or a good while ago."""
        self._looked = time.monotonic()
        failure = self._agreement.failure()
        if failure is None or failure["process"] == self._process:
            return None
        if failure["batch"] > number:
            if failure["closed"]:
                return None
            self._failed_at = self._failed_at or self._looked
            if self._looked - self._failed_at < GRACE_SECONDS:
                return None
        return failure

    def say(self, number: int, waited: float) -> None:
        """First tells the others that this process waits, and a while later logs who has not told so."""
        if self._said != number and waited > SAY_AFTER_SECONDS / 2:
            self._said = number
            self._agreement.say_waiting(number)
        elif self._logged != number and waited > SAY_AFTER_SECONDS:
            self._logged = number
            if missing := self._agreement.missing(number):
                logger.warning("jaxprefetch: batch %d has waited %.0f s for %s.", number, waited, names(missing))
