"""The account of what is in flight: batches that were issued and not released, and their bytes on each device.

Synopsis:

    flight = Flight(by_fence=False)
    flight.batches = flight.with_issued(0, InFlight({"gpu:0": 1024}))
    flight.landed(0)
    flight.batches = flight.without_dropped(0)      # nobody refers to it: 0 bytes are charged now
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

Cost = Mapping[Hashable, int]
"""Bytes of one batch by device."""


@dataclass(slots=True)
class InFlight:
    """One batch, and the facts that decide when it is released."""

    cost: Cost
    foreign: bool = False  # holds arrays of the source's own: never deleted by us, its landing proves nothing of others
    landed: bool = False
    dropped: bool = False  # no reference is left, as far as can be known
    disposed: bool = False  # the consumer deleted or donated some of it


class Flight:
    """Batches in order, by number.

    `batches` is replaced, never changed, by one assignment; what can be derived from it is derived. So an interrupt,
    which strikes between calls, leaves no account half done.

    Args:
        by_fence: the step of a batch must be over, too, before its memory serves another.
    """

    def __init__(self, *, by_fence: bool):
        self.batches: dict[int, InFlight] = {}
        self.done = -1  # the last step that is over
        self.peak_batches = 0
        self.peak_bytes = 0
        self._by_fence = by_fence

    @property
    def most_bytes(self) -> int:
        """Bytes charged on the fullest device."""
        return max(charged(self.batches).values(), default=0)

    def held(self, without_dropped: bool) -> dict[int, InFlight]:
        """What is in flight, with or without what only a wait keeps there."""
        if not without_dropped:
            return self.batches
        return {number: batch for number, batch in self.batches.items() if not batch.dropped}

    def needs_fence(self, batch: InFlight) -> bool:
        """Whether landing is not enough."""
        return self._by_fence or batch.disposed

    def waits_for_fence(self, number: int, batch: InFlight) -> bool:
        """Whether it needs a fence that is not done."""
        return self.done < number and self.needs_fence(batch)

    def with_issued(self, number: int, batch: InFlight) -> dict[int, InFlight]:
        """`batches` with one more; counted in the peaks."""
        batches = {**self.batches, number: batch}
        self.peak_batches = max(self.peak_batches, len(batches))
        self.peak_bytes = max(self.peak_bytes, *charged(batches).values(), 0)
        return batches

    def without_dropped(self, number: int) -> dict[int, InFlight]:
        """`batches` once nobody refers to this one."""
        batch = self.batches.get(number)
        if batch is None or not batch.landed or self.waits_for_fence(number, batch):
            return self.batches
        return {other: kept for other, kept in self.batches.items() if other != number}

    def landed(self, number: int) -> None:
        """A batch has landed, and with it what was put before on the same devices."""
        batch = self.batches[number]
        batch.landed = True
        if batch.foreign:
            self.release()
        else:
            self.proved(number)

    def proved(self, number: int) -> None:
        """All copies to the devices of this batch that were put up to it have landed."""
        proven = self.batches[number].cost.keys()
        for other, batch in self.batches.items():
            batch.landed = batch.landed or (other <= number and batch.cost.keys() <= proven)
        self.release()

    def steps_done(self, number: int) -> None:
        """This step is over, and so are all before it."""
        self.done = max(self.done, number)
        self.release()

    def release(self) -> None:
        """Lets go of every batch that nothing keeps any more."""
        self.batches = {
            number: batch
            for number, batch in self.batches.items()
            if not (batch.dropped and batch.landed) or self.waits_for_fence(number, batch)
        }


def charged(batches: Mapping[int, InFlight]) -> dict[Hashable, int]:
    """Bytes of these batches on each device."""
    total: dict[Hashable, int] = {}
    for batch in batches.values():
        for device, n in batch.cost.items():
            total[device] = total.get(device, 0) + n
    return total
