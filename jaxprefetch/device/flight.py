"""The account of what is in flight: batches that were issued and not released, and their bytes on each device.

Synopsis:

    flight = Flight(gives_back=False)
    flight.batches = flight.with_issued(0, InFlight({"gpu:0": 1024}))
    flight.landed(0)
    flight.batches = flight.without_dropped(0)      # nobody refers to it: 0 bytes are charged now
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from jaxprefetch.device.cost import Cost, on_fullest, together


@dataclass(slots=True)
class InFlight:
    """One batch, and the facts that decide when it is released."""

    cost: Cost  # of what is put
    out: Cost = field(default_factory=dict[Hashable, int])  # what the hand-out adds
    foreign: bool = False  # holds arrays of the source's own: never deleted by us, its landing proves nothing of others
    handed_out: bool = False
    landed: bool = False
    dropped: bool = False  # no reference is left, as far as can be known
    needs_fence: bool = False  # landing is not enough: the step that has it must be over, too


class Flight:
    """Batches in order, by number.

    `batches` is replaced, never changed, by one assignment; what can be derived from it is derived. So an interrupt,
    which strikes between calls, leaves no account half done.

    Args:
        gives_back: a batch is released before the next one is handed out, if it is ours to delete.
    """

    def __init__(self, *, gives_back: bool):
        self.batches: dict[int, InFlight] = {}
        self.done = -1  # the last step that is over
        self.peak_batches = 0
        self.peak_bytes = 0
        self._gives_back = gives_back

    @property
    def most_bytes(self) -> int:
        """Bytes charged on the fullest device."""
        return on_fullest(_charges(self.batches.values()))

    @property
    def newest_owed(self) -> int | None:
        """The last batch that is not known to have landed."""
        return max((number for number, batch in self.batches.items() if not batch.landed), default=None)

    def referred_to(self) -> dict[int, InFlight]:
        """What is in flight, but for what only a wait keeps there."""
        return {number: batch for number, batch in self.batches.items() if not batch.dropped}

    def waits_for_fence(self, number: int, batch: InFlight) -> bool:
        """Whether it needs a fence that is not done."""
        return batch.needs_fence and self.done < number

    def most_to_come(self, number: int, batch: InFlight, taken: int, held: Mapping[int, InFlight]) -> int:
        """The most bytes on a device at any hand-out, from `taken` up to that of this batch, if it is issued now.

        The hand-out of m finds m-1, which the consumer still has, and all from m on, and adds what m's takes. What was
        before has been released, if only by waiting at that hand-out.

        Args:
            held: what is in flight, now.
        """
        held = {**held, number: batch}
        most = on_fullest(_charges(held.values(), held[taken].out))
        for m in range(taken + 1, number + 1):
            last = held[m - 1]
            costs = [held[n].cost for n in range(m, number + 1)] + [held[m].out]
            if last.foreign or not self._gives_back:
                costs += [last.cost, last.out]
            most = max(most, on_fullest(costs))
        return most

    def shortage(self, batch: InFlight) -> tuple[int, int, int]:
        """(bytes that a batch needs, bytes charged, those of the first that its hand-out adds).

        On the device where the first two are most together.
        """
        held = together(_charges(self.batches.values()))
        need = together([batch.cost, batch.out])
        figures = ((n, held.get(device, 0), batch.out.get(device, 0)) for device, n in need.items())
        return max(figures, key=lambda each: each[0] + each[1], default=(0, 0, 0))

    def most_with_out(self, number: int) -> int:
        """Bytes on the fullest device once this batch is handed out, and the one before is still there."""
        out = self.batches[number].out
        return on_fullest(_charges(self.batches.values(), out)) if out else 0

    def with_issued(self, number: int, batch: InFlight) -> dict[int, InFlight]:
        """`batches` with one more; counted in the peaks."""
        batches = {**self.batches, number: batch}
        self.peak_batches = max(self.peak_batches, len(batches))
        self.peak_bytes = max(self.peak_bytes, on_fullest(_charges(batches.values())))
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
            if not batch.landed and other <= number and batch.cost.keys() <= proven:
                batch.landed = True
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


def _charges(batches: Iterable[InFlight], *more: Cost) -> list[Cost]:
    charges = [*more]
    for batch in batches:
        charges.append(batch.cost)
        if batch.handed_out and batch.out:
            charges.append(batch.out)
    return charges
