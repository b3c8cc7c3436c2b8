"""A batch between the host and the loop, and the host's side as the devices' side sees it."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxprefetch.device.context import Device
from jaxprefetch.device.handout import Delivery
from jaxprefetch.device.plan import Plan


class StagedBatch(Protocol):
    """What the staging side delivers."""

    @property
    def leaves(self) -> list[Any]: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def slot(self) -> HostMemory: ...


class HostMemory(Protocol):
    """Where a batch is sent from; freed once all of it has landed."""

    def free(self) -> None: ...


class Staging(Protocol):
    """The staging side as the feed sees it: batches by number, then one item with an `error` attribute."""

    items: dict[int, Any]

    def wait(self, number: int, timeout: float | None) -> bool: ...
    def give_room(self, issued: int, landed: int, now: bool, /) -> None: ...
    def cancel(self) -> None: ...


class Sending:
    """Host memory that copies may still be read from, by batch.

    Attributes:
        landed: bytes of this pass's batches that have been freed.
    """

    def __init__(self) -> None:
        self.landed = 0
        self._memory: dict[int, tuple[HostMemory, int]] = {}

    def begin_pass(self) -> None:
        """What is read still, of the last pass, goes when its arrays do."""
        self._memory, self.landed = {}, 0

    @property
    def unfinished(self) -> bool:
        """Whether some of it is not known to be free."""
        return bool(self._memory)

    def add(self, number: int, memory: HostMemory, nbytes: int) -> None:
        """This batch has been put."""
        self._memory[number] = memory, nbytes

    def free(self, has_landed: Callable[[int], bool]) -> None:
        """Leaves the memory of batches that have landed to others: nothing weaker shows that nothing reads there."""
        for number in [number for number in self._memory if has_landed(number)]:
            memory, nbytes = self._memory[number]
            memory.free()
            self.landed += nbytes
            del self._memory[number]


@dataclass(slots=True)
class Issued:
    """A batch on its way or handed out; these references go when it is settled."""

    plan: Plan
    delivery: Delivery
    parcels: list[Any]
    outs: list[jax.Array] | None = None  # made of these at the hand-out

    @property
    def made(self) -> list[jax.Array]:
        """Arrays that we made from host data."""
        return [self.parcels[i] for i in self.plan.made]

    @property
    def arrays(self) -> list[jax.Array]:
        """These and the source's own."""
        return [self.parcels[i] for i in (*self.plan.made, *self.plan.foreign)]

    def delete(self) -> None:
        """Gives back the memory of all that is not the source's own."""
        for array in (*self.made, *(self.outs or ())):
            array.delete()

    def proves(self, devices: Set[Device]) -> bool:
        """Whether its landing shows that what was put before on these devices has landed, too."""
        return bool(self.plan.made) and not self.plan.foreign and self.plan.cost.keys() >= devices
