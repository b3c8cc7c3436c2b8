"""The examples of a cache on their devices, which slots hold one, and how old each is.

Synopsis:

    store = Store(spec, layout)
    leaves, n = store.rows(examples, "insert")
    store.write(leaves, n, store.oldest(n))
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import numpy as np

from jaxprefetch.device.examples import ResidentLayout
from jaxprefetch.device.resident import Resident
from jaxprefetch.errors import add_note
from jaxprefetch.example_spec import ExampleSpec
from jaxprefetch.fetch import fetch_to_host
from jaxprefetch.ring import Ring

PIECE_BYTES = 64 << 20
"""What is put at once, on a device: more rows than that go in pieces, so that there are never two copies of them."""


class Store:
    """Examples in slots. Used by one thread at a time.

    Raises:
        jax.errors.JaxRuntimeError: the devices have no memory for them.
    """

    def __init__(self, spec: ExampleSpec, layout: ResidentLayout):
        self.spec, self.layout = spec, layout
        self.ring = Ring(layout.shards, layout.each)
        try:
            self.resident = Resident(layout)
        except jax.errors.JaxRuntimeError as error:
            add_note(
                error, f"jaxprefetch: raised when {max(layout.cost.values()):,} bytes were allocated on each device"
            )
            raise

    def rows(self, examples: Any, what: str) -> tuple[list[Any], int]:
        """The leaves of examples that are to go in, and their number.

        Raises:
            TypeError, ValueError, OverflowError: they do not belong here.
        """
        return rows_of(self.spec, self.layout, examples, what)

    def oldest(self, n: int) -> np.ndarray:
        """The places that so many rows would take."""
        return self.ring.oldest(n // self.layout.shards)

    def write(self, leaves: list[Any], n: int, places: np.ndarray) -> None:
        """Writes rows, split over the devices, into these places of each device."""
        layout, each = self.layout, n // self.layout.shards
        here = any(isinstance(leaf, jax.Array) for leaf in leaves)
        step = each if here else max(1, PIECE_BYTES * layout.each // max(layout.cost.values()))
        last: list[jax.Array] = []
        for start in range(0, each, step):
            own = slice(start, start + step)
            rows = layout.put_rows(leaves if here else [self._piece(leaf, i, own) for i, leaf in enumerate(leaves)])
            self.resident.write(rows, layout.put_numbers(places[:, own].astype(np.int32).reshape(-1)))
            jax.block_until_ready(last)  # two pieces are on their way at most
            last = [] if here else rows
        filled = self.ring.filled
        self.ring.replaced(places)
        if self.ring.filled != filled:
            self.resident.set_filled(self.ring.filled)

    def tree(self, leaves: list[Any]) -> Any:
        """The tree of an example with these leaves."""
        return jax.tree_util.tree_unflatten(self.spec.treedef, leaves)

    def get_state(self) -> dict[str, Any]:
        """All of it in host memory. Blocking: for the copy."""
        (examples,) = fetch_to_host([self.tree(self.resident.arrays)])
        return {"examples": examples, "by_age": self.ring.by_age(), "filled": self.ring.filled}

    def set_state(self, state: dict[str, Any]) -> None:
        """As it was.

        Raises:
            TypeError, ValueError: it is no state of a store like this one; nothing has changed.
        """
        leaves, n = self.rows(state["examples"], "state")
        shape = (self.layout.shards, self.layout.each)
        by_age, filled = np.asarray(state["by_age"]), operator.index(state["filled"])
        ages_are_right = by_age.shape == shape and (np.sort(by_age) == np.arange(shape[1])).all()
        if n != self.layout.slots or not ages_are_right or not 0 <= filled <= shape[1]:
            raise ValueError(
                f"state: expected that of a cache of {self.layout.slots:,} slots on {shape[0]} devices, got {n:,} "
                f"examples, {filled:,} of each device filled, and ages of shape {by_age.shape}. Make the cache as "
                "it was made then, or take another state."
            )
        self.write(leaves, n, np.tile(np.arange(shape[1]), (shape[0], 1)))
        self.ring.restore(by_age, filled)
        self.resident.set_filled(filled)

    def _piece(self, leaf: np.ndarray, i: int, own: slice) -> np.ndarray:
        """A part of each device's rows, in memory of its own."""
        shards = self.layout.shards
        part = leaf.reshape(shards, len(leaf) // shards, *leaf.shape[1:])[:, own]
        with np.errstate(all="ignore"):
            copied = np.array(part, self.spec.leaves[i].dtype, order="C")
        return copied.reshape(-1, *leaf.shape[1:])


def rows_of(spec: ExampleSpec, layout: ResidentLayout, examples: Any, what: str) -> tuple[list[Any], int]:
    """As `Store.rows`, before there is a store."""
    leaves, n = spec.rows(examples, what, layout.shards)
    if n > layout.slots:
        raise ValueError(
            f"{what}: {n:,} examples are more than the {layout.slots:,} slots of the cache. "
            "Pass fewer, or make it with a larger capacity."
        )
    return leaves, n
