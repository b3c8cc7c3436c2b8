"""A batch between the host and the loop, and the host's side as the devices' side sees it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxprefetch.device.context import Device
from jaxprefetch.device.plan import Plan


class StagedBatch(Protocol):
    """What the staging side delivers."""

    @property
    def leaves(self) -> list[Any]: ...
    @property
    def plan(self) -> Plan: ...


class Staging(Protocol):
    """The staging side as the feed sees it: batches by number, then one item with an `error` attribute."""

    items: dict[int, Any]

    def wait(self, number: int, timeout: float | None) -> bool: ...
    def give_room(self, issued: int, landed: int) -> None: ...
    def cancel(self) -> None: ...


@dataclass(slots=True)
class Issued:
    """A batch on its way or handed out; these references go when it is settled."""

    plan: Plan
    leaves: list[Any]

    @property
    def made(self) -> list[jax.Array]:
        """Arrays that we made from host data."""
        return [self.leaves[i] for i in self.plan.made]

    @property
    def arrays(self) -> list[jax.Array]:
        """These and the source's own."""
        return [self.leaves[i] for i in (*self.plan.made, *self.plan.foreign)]

    def proves(self, devices: Set[Device]) -> bool:
        """Whether its landing shows that what was put before on these devices has landed, too."""
        return bool(self.plan.made) and not self.plan.foreign and self.plan.cost.keys() >= devices
