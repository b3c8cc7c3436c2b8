"""Which slots are the oldest: the order in which a cache replaces its examples.

Synopsis:

    ring = Ring(shards=2, each=4)
    places = ring.oldest(2)              # (2, 2): two of each device's slots, never filled ones first
    ring.replaced(places)                # these are the youngest now
"""

from __future__ import annotations

import numpy as np


class Ring:
    """The slots of each device by age, counted there from 0. Every device gets as many new examples as the others.

    Attributes:
        filled: slots of each device that hold an example: the first so many.
    """

    def __init__(self, shards: int, each: int):
        self.filled = 0
        self._each = each
        self._order = np.tile(np.arange(each, dtype=np.int32), (shards, 1))  # from `_start` on, and around
        self._start = 0

    def oldest(self, n: int) -> np.ndarray:
        """The oldest `n` places of each device, `(shards, n)`. Nothing changes."""
        return self._order[:, (self._start + np.arange(n)) % self._each]

    def replaced(self, places: np.ndarray) -> None:
        """These places of each device, `(shards, n)`, have new examples, in this order."""
        n = places.shape[1]
        if np.array_equal(places, self.oldest(n)):
            self._start = (self._start + n) % self._each
        else:
            order = self.by_age()
            for shard, own in enumerate(places):
                others = order[shard][~np.isin(order[shard], own)]
                order[shard] = np.concatenate([others, own])
            self._order, self._start = order, 0
        self.filled = max(self.filled, int(places.max(initial=-1)) + 1)

    def by_age(self) -> np.ndarray:
        """All places, the oldest first, `(shards, each)`: with `filled` all that there is to save."""
        return np.roll(self._order, -self._start, axis=1)

    def restore(self, by_age: np.ndarray, filled: int) -> None:
        """As it was when these were saved."""
        self._order, self._start, self.filled = by_age.astype(np.int32), 0, filled
