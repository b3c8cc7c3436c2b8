"""Fences that have been dispatched and are not known to be done, by step.

Synopsis:

    fences = Fences()
    fences.dispatch(3, devices)
    fences.wait(2)                 # 3: a later one covers it
    fences.is_done(3)              # looks, without waiting
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxprefetch.device.completion import dispatch_fence
from jaxprefetch.device.context import Device


class Fences:
    """Used by one thread at a time. Fences finish in the order of their steps."""

    def __init__(self) -> None:
        self._open: dict[int, list[Any]] = {}  # arrays, in order

    def dispatch(self, step: int, devices: Sequence[Device]) -> None:
        """One behind all that was enqueued on these devices so far."""
        self._open[step] = dispatch_fence(devices)

    def wait(self, step: int) -> int:
        """Waits for the first fence that covers this step; returns its own."""
        covering = next(other for other in self._open if other >= step)
        jax.block_until_ready(self._open[covering])
        return covering

    def is_done(self, step: int) -> bool:
        """Whether there is a fence of this step, and it is done."""
        return step in self._open and all(fence.is_ready() for fence in self._open[step])

    def forget(self, step: int) -> None:
        """This one is done, and so are those before it."""
        while self._open and (first := next(iter(self._open))) <= step:
            del self._open[first]

    def clear(self) -> None:
        """Forgets all."""
        self._open.clear()
