"""Batches that the loop keeps beyond the next one: outside of every bound, so they are counted, and said once."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import jax

logger = logging.getLogger("jaxprefetch")


class KeptBatches:
    """Weak references to batches that were handed out, by the largest leaf of each.

    Args:
        bound: batches in flight that are counted elsewhere.
    """

    def __init__(self, bound: int):
        self._bound = bound
        self._alive: dict[int, weakref.ref[Any]] = {}  # in order; each entry goes with its array
        self._last = -1
        self._said = False

    def __len__(self) -> int:
        """Batches before the last one that are still referred to."""
        return len(self._alive) - (self._last in self._alive)

    def add(self, number: int, largest: jax.Array, first: int) -> None:
        """Batch `number` is handed out; messages count from `first`, the number of the pass's batch 0."""
        self._last = number
        self._alive[number] = weakref.ref(largest, functools.partial(_forget, self._alive, number))
        if self._said:
            return
        oldest = min(list(self._alive), default=number)
        if oldest < number - 2:
            self._said = True
            logger.warning(
                "jaxprefetch: the loop still holds batch %d at batch %d: batches that it keeps come on top of the "
                "%d in flight, and max_bytes does not count them.",
                oldest - first,
                number - first,
                self._bound,
            )


def _forget(alive: dict[int, Any], number: int, _: Any) -> None:
    alive.pop(number, None)
