"""How an array divides over the devices of a mesh, as one view: one copy then lays out all of its shards.

Synopsis:

    split = Split.of((8, 6), NamedSharding(mesh, PartitionSpec("data")), mesh.axis_names)
    split.view(array)                    # (data, model, rows of a shard, columns of a shard), without a copy
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import NamedSharding

from jaxprefetch.device.placement import Target


@dataclass(frozen=True)
class Split:
    """Axes of an array, divided by the mesh axes that split them and ordered by these."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], sharding: NamedSharding, names: Sequence[str]) -> Split:
        """In front comes one axis for each of `names`, of length 1 where that does not split the array."""
        sizes, target = sharding.mesh.shape, Target(sharding)
        divided: list[int] = []
        inner: list[int] = []
        front: dict[str, int] = {}
        for axis, n in enumerate(shape):
            splitting = target.mesh_axes(axis)
            for name in splitting:
                front[name] = len(divided)
                divided.append(sizes[name])
            inner.append(len(divided))
            divided.append(n // math.prod(sizes[name] for name in splitting))
        for name in names:
            if name not in front:
                front[name] = len(divided)
                divided.append(1)
        return cls(tuple(divided), (*(front[name] for name in names), *inner))

    def view(self, array: np.ndarray) -> np.ndarray:
        """The array, so divided; where it is copied to, its axes of length 1 are repeated."""
        return array.reshape(self.shape).transpose(self.order)
