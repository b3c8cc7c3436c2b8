"""The account of what is in flight: batches that were issued and not released, and their bytes on each device.

Synopsis:

    flight = Flight(by_fence=False)
    flight.add(0, InFlight({"gpu:0": 1024}))
    flight.landed(0)
    flight.batches[0].dropped = True
    flight.release()                    # landed, and nobody refers to it: 0 bytes are charged now
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

    Args:
        by_fence: the step of a batch must be over, too, before its memory serves another.
    """

    def __init__(self, *, by_fence: bool):
        self.batches: dict[int, InFlight] = {}
        self.bytes: dict[Hashable, int] = {}  # charged now
        self.done = -1  # the last step that is over
        self.released = 0
        self.peak_batches = 0
        self.peak_bytes = 0
        self._by_fence = by_fence

    @property
    def most_bytes(self) -> int:
        """Bytes charged on the fullest device."""
        return max(self.bytes.values(), default=0)

    def count(self, without_dropped: bool) -> int:
        """Batches in flight, with or without those that only a wait keeps there."""
        return len(self.batches) - (without_dropped and sum(batch.dropped for batch in self.batches.values()))

    def charged(self, device: Hashable, without_dropped: bool) -> int:
        """Bytes on a device, with or without those of batches that only a wait keeps in flight."""
        n = self.bytes.get(device, 0)
        if without_dropped:
            n -= sum(batch.cost.get(device, 0) for batch in self.batches.values() if batch.dropped)
        return n

    def needs_fence(self, batch: InFlight) -> bool:
        """Whether landing is not enough."""
        return self._by_fence or batch.disposed

    def waits_for_fence(self, number: int, batch: InFlight) -> bool:
        """Whether it needs a fence that is not done."""
        return self.done < number and self.needs_fence(batch)

    def add(self, number: int, batch: InFlight) -> None:
        """A batch was issued."""
        self.batches[number] = batch
        for device, n in batch.cost.items():
            self.bytes[device] = self.bytes.get(device, 0) + n
        self.peak_batches = max(self.peak_batches, len(self.batches))
        self.peak_bytes = max(self.peak_bytes, self.most_bytes)

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
        free = [n for n, b in self.batches.items() if b.dropped and b.landed and not self.waits_for_fence(n, b)]
        for number in free:
            self.released += 1
            for device, n in self.batches.pop(number).cost.items():
                self.bytes[device] -= n
