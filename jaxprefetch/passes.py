"""The source begun anew, as often as there are steps left.

Synopsis:

    passes = Passes(batches, may_be_at_end=False)
    while (batch := passes.next()) is not END:
        ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxprefetch.prefetcher import DevicePrefetcher

END = object()
"""Instead of a batch: there will be none."""


class Passes:
    """Batches of pass after pass, until a whole one is empty or no other can be begun.

    Args:
        batches: where they come from.
        may_be_at_end: the first pass may be empty: it goes on where another process stopped.
    """

    def __init__(self, batches: DevicePrefetcher, *, may_be_at_end: bool):
        self._batches = batches
        self._iterator: Iterator[Any] = iter(batches)
        self._some = may_be_at_end  # this pass has had a batch, be it before the restart

    def next(self) -> Any:
        """The next batch, or `END`."""
        while (batch := next(self._iterator, END)) is END:
            if not (self._some and self._batches.reiterable):
                return END
            self._some = False
            self._iterator = iter(self._batches)
        self._some = True
        return batch
