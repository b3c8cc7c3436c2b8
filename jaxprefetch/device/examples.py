"""How examples lie on the devices: in slots along axis 0, which is split over them.

Synopsis:

    leaves = [ExampleLeaf("image", (28, 28), np.dtype(np.uint8), target)]
    layout = ResidentLayout.of(leaves, slots=50_000, context=Context.current())
    layout.cost                          # bytes on each device, before anything is allocated
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxprefetch.device.context import Context
from jaxprefetch.device.cost import Cost, together
from jaxprefetch.device.placement import Target
from jaxprefetch.device.plan import check_splits, leaf_cost

WHOLE = PartitionSpec()
"""Of what every device has whole."""


@dataclass(frozen=True)
class ExampleLeaf:
    """One leaf of an example, and where the array of all of them goes."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    target: Target


@dataclass(frozen=True)
class ResidentLayout:
    """What is so for all calls of one cache, and the same for every cache like it."""

    leaves: tuple[ExampleLeaf, ...]
    slots: int
    shards: int
    axis: Target  # of one axis, split as axis 0 of every leaf is
    context: Context

    @classmethod
    def of(cls, leaves: Sequence[ExampleLeaf], slots: int, context: Context) -> ResidentLayout:
        """The layout of so many slots.

        Raises:
            ValueError: the leaves cannot be split so.
        """
        if not leaves:
            raise ValueError("examples: there are no leaves. An example is a tree with at least one array.")
        axis = leaves[0].target.axis(0)
        for leaf in leaves:
            _check_place(leaf, axis)
        shards = axis.global_shards(1)[0]
        if slots % shards:
            raise ValueError(
                f"capacity: {slots:,} slots cannot be split evenly over {shards} devices. Take a multiple of {shards}."
            )
        for leaf in leaves:
            check_splits(leaf.target, (slots, *leaf.shape), f"examples, leaf {leaf.path}", 0)
        return cls(tuple(leaves), slots, shards, axis, context)

    @property
    def each(self) -> int:
        """Slots on a device."""
        return self.slots // self.shards

    @property
    def cost(self) -> Cost:
        """Bytes on each device."""
        return together(
            leaf_cost((self.slots, *leaf.shape), leaf.dtype.itemsize, leaf.target.sharding) for leaf in self.leaves
        )

    @property
    def replicated(self) -> Sharding:
        """For numbers that every device needs."""
        sharding = self.axis.sharding
        return NamedSharding(sharding.mesh, WHOLE) if isinstance(sharding, NamedSharding) else sharding

    @property
    def specs(self) -> list[Any]:
        """How the arrays are split."""
        return [spec_of(leaf.target) for leaf in self.leaves]

    def rows(self, n: int) -> list[Any]:
        """So many rows, as a compiler has to know them."""
        return [self._struct((n, *leaf.shape), leaf.dtype, leaf.target.sharding) for leaf in self.leaves]

    def numbers(self, n: int) -> Any:
        """One int32 a row."""
        return self._struct((n,), np.dtype(np.int32), self.axis.sharding)

    def scalar(self, dtype: Any = np.uint32, shape: tuple[int, ...] = ()) -> Any:
        """Something that every device has whole."""
        return self._struct(shape, np.dtype(dtype), self.replicated)

    def put_rows(self, rows: Sequence[Any]) -> list[jax.Array]:
        """Puts rows, from memory that nobody writes to again, or arrays that are on devices already."""
        return self._put(rows, [leaf.target.sharding for leaf in self.leaves])

    def put_numbers(self, numbers: Any) -> jax.Array:
        """Puts one number a row."""
        return self._put([numbers], [self.axis.sharding])[0]

    def put_scalar(self, value: Any) -> jax.Array:
        """Puts something on every device."""
        return self._put([value], [self.replicated])[0]

    def place(self) -> Any:
        """Which part of the slots this device has; for use in a call."""
        names = self.axis.mesh_axes(0)
        return jax.lax.axis_index(names).astype(jnp.int32) if names else jnp.int32(0)

    def _put(self, values: Sequence[Any], shardings: Sequence[Sharding]) -> list[jax.Array]:
        with self.context.entered():
            if self.axis.committed:
                return jax.device_put(list(values), list(shardings))
            return jax.device_put(list(values))

    def _struct(self, shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding if self.axis.committed else None)


def _check_place(leaf: ExampleLeaf, axis: Target) -> None:
    where, sharding = f"examples, leaf {leaf.path}", leaf.target.sharding
    if not isinstance(sharding, (NamedSharding, SingleDeviceSharding)):
        raise ValueError(f"{where}: sharding={sharding} is neither a device nor a NamedSharding, which a cache needs.")
    if not leaf.target.is_local:
        raise ValueError(
            f"{where}: sharding={sharding} has devices of other processes. A cache is one process's own: make its "
            "mesh of jax.local_devices()."
        )
    if leaf.target.axis(0) != axis:
        raise ValueError(
            f"{where}: axis 0 is split by {sharding}, that of the first leaf by {axis.sharding}. The leaves of an "
            "example lie together: split axis 0 of all of them in the same way."
        )


def spec_of(target: Target) -> Any:
    return target.sharding.spec if isinstance(target.sharding, NamedSharding) else WHOLE
