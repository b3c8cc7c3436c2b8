"""A batch between the host and the loop, and the host's side as the devices' side sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxprefetch.device.plan import Plan


class StagedBatch(Protocol):
    """What the staging side delivers."""

    @property
    def leaves(self) -> list[Any]: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def nbytes(self) -> int: ...


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
    nbytes: int

    @property
    def made(self) -> list[jax.Array]:
        """Arrays that we made from host data."""
        return [self.leaves[i] for i in self.plan.made]

    @property
    def arrays(self) -> list[jax.Array]:
        """These and the source's own."""
        return [self.leaves[i] for i in (*self.plan.made, *self.plan.foreign)]
