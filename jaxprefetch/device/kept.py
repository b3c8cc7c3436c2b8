"""Batches that the loop keeps beyond the next one: outside of every bound, so they are counted, and said once.

Synopsis:

    kept = KeptBatches(bound=3)
    kept.add(0, largest, first=0)        # batch 0 is handed out, by a reference to its largest leaf
    len(kept)                            # how many before the last one are still there
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from typing import Any

import jax

logger = logging.getLogger("jaxprefetch")


class KeptBatches:
    """Weak references to batches that were handed out, by the largest leaf of each.

    They have no callbacks: one that is written in Python would swallow a Ctrl-C that strikes while it runs.

    Args:
        bound: batches in flight that are counted elsewhere.
    """

    def __init__(self, bound: int):
        self._bound = bound
        self._refs: deque[tuple[int, weakref.ref[Any]]] = deque()
        self._sweep_at = 16  # so many references, of which most may be dead
        self._said = False

    def __len__(self) -> int:
        """Batches before the last one that are still referred to."""
        return sum(ref() is not None for _, ref in list(self._refs)[:-1])

    def add(self, number: int, largest: jax.Array, first: int) -> None:
        """Batch `number` is handed out; messages count from `first`, the number of the pass's batch 0."""
        refs = self._refs
        while refs and refs[0][1]() is None:
            refs.popleft()
        if len(refs) >= self._sweep_at:
            self._refs = refs = deque(entry for entry in refs if entry[1]() is not None)
            self._sweep_at = 2 * len(refs) + 16
        refs.append((number, weakref.ref(largest)))
        oldest = refs[0][0]
        if not self._said and oldest < number - 2:
            self._said = True
            logger.warning(
                "jaxprefetch: the loop still holds %s at batch %d: batches that it keeps come on top of the "
                "%d in flight, and max_bytes does not count them.",
                f"batch {oldest - first}" if oldest >= first else "one of the pass before",
                number - first,
                self._bound,
            )
