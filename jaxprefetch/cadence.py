"""What is done every so many steps or seconds.

Synopsis:

    saving = Every(steps=100, seconds=600.0)
    if saving.due(step):
        ...
        saving.ran(step)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from jaxprefetch.arguments import integer, seconds


class Every:
    """Something that is done every so many steps or seconds, once after a step."""

    def __init__(self, steps: int | None, seconds: float = math.inf, run: Callable[[Any], Any] | None = None):
        self.run = run
        self._steps, self._seconds = steps, seconds
        self.last, self.last_at = -1, 0.0  # the step after which it was done, and when

    def due(self, step: int) -> bool:
        """Whether it is to be done after this step."""
        if self._steps is not None and step % self._steps == 0:
            return True
        return self._seconds < math.inf and time.perf_counter() - self.last_at >= self._seconds

    def ran(self, step: int) -> None:
        """It has been done."""
        self.last, self.last_at = step, time.perf_counter()


def cadence(name: str, value: Any, other: str, needed: Any) -> Any:
    """Steps or seconds, as they are given.

    Raises:
        TypeError: they are given without the argument `other`, which would be done then; or they are no number.
        ValueError: they are not positive.
    """
    if value is None:
        return None
    if needed is None:
        raise TypeError(f"{name}: expected {other} beside it, got {value!r} alone. Pass {other}, or leave it out.")
    if name.endswith("_steps"):
        return integer(name, value, 1)
    return seconds(name, value, least=1e-9)
