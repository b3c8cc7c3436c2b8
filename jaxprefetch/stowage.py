"""Where the leaves of a batch lie in the host memory that they are sent from: views, made once a slot and plan.

Synopsis:

    stowage = slot.once(plan, Stowage)
    copier.copy(stowage.pairs(leaves, range(len(leaves))))
    parcels = stowage.parcels(leaves, range(len(leaves)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxprefetch.device.plan import Plan
from jaxprefetch.host.leaves import padded, zero_beyond
from jaxprefetch.host.slots import Fresh, Slot

BYTES = np.dtype(np.uint8)
T = TypeVar("T")


class Stowage:
    """One plan's leaves in one slot.

    Attributes:
        places: where each leaf goes that is copied here, in the form in which it is copied.
        sent: what is sent from here, by parcel.
    """

    def __init__(self, plan: Plan, slot: Slot | Fresh):
        self.places: dict[int, np.ndarray] = {}
        self.sent: dict[int, np.ndarray] = {}
        self._plan = plan
        self._made: tuple[Any, Any] = None, None
        self._splits: dict[int, Any] = {}  # how leaves are divided that do not lie here in one piece
        packing, end = plan.packing, len(plan.leaves)
        for i, start in plan.offsets.items():
            if i < end:
                leaf = plan.leaves[i]
                self.places[i] = self.sent[i] = slot.view(start, leaf.dtype, leaf.shape)
        for i, (start, rows) in plan.by_shard.items():
            region = slot.view(start, BYTES, (rows.count, rows.stride))
            self.places[i], self.sent[i], self._splits[i] = rows.place(region), rows.view(region), rows.split
        if packing is not None:
            buffer = self.sent[end] = slot.view(plan.offsets[end], BYTES, packing.shape)
            for part in packing.parts:
                self.places[part.leaf] = packing.place(buffer, part)
                if part.split is not None:
                    self._splits[part.leaf] = part.split
        self._all = [self.sent.get(i) for i in range(end + (packing is not None))]  # parcels, if no leaf is elsewhere

    def pairs(
        self, leaves: Sequence[np.ndarray] | Mapping[int, np.ndarray], which: Iterable[int]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where these leaves go, and what to copy there; what they lack of the rows that are sent is zero."""
        places, pairs = self.places, []
        for i in which:
            place, leaf = places[i], leaves[i]
            if place.shape == leaf.shape:
                pairs.append((place, leaf))
            elif i in self._splits:
                pairs.append((place, self._splits[i].view(padded(leaf, self._plan.leaves[i].shape))))
            else:
                pairs.append((zero_beyond(place, leaf.shape), leaf))
        return pairs

    def parcels(self, leaves: Sequence[Any], which: Sequence[int]) -> list[Any]:
        """What to put, of these leaves (each once) from here: a buffer at the end has those that travel packed."""
        if len(which) == len(leaves):
            return self.all_parcels()
        out, sent = list(leaves), self.sent
        for i in which:
            out[i] = sent.get(i)
        if (packing := self._plan.packing) is not None:
            for part in packing.parts:
                out[part.leaf] = None
            out.append(sent[len(self._plan.leaves)])
        return out

    def all_parcels(self) -> list[Any]:
        """What to put if all leaves lie here."""
        return list(self._all)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives, made once as long as the key is the same."""
        if self._made[0] is not key:
            self._made = key, make()
        return self._made[1]

    def written(self, i: int) -> np.ndarray | None:
        """Where a source may write leaf i as it is; None where it is divided, or lies elsewhere."""
        return None if i in self._splits else self.places.get(i)
