"""How an array divides over the devices of a mesh, as one view: one copy then lays out all of its shards.

Synopsis:

    split = Split.of((8, 6), NamedSharding(mesh, PartitionSpec("data")), mesh.axis_names)
    split.view(array)                    # (data, model, rows of a shard, columns of a shard), without a copy
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxprefetch.device.context import Device
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


@dataclass(frozen=True, eq=False)
class ShardRows:
    """A leaf in host memory shard by shard: JAX sends only contiguous memory as it is.

    Args:
        count: different shards.
        stride: bytes from the start of one to the next.
        of_device: which of them each device gets.
    """

    shape: tuple[int, ...]  # of a shard
    dtype: np.dtype
    count: int
    stride: int
    of_device: dict[Device, int]
    split: Split  # the form in which it is copied there
    _mesh_shape: tuple[int, ...]  # of the axes that split the leaf

    @classmethod
    def of(cls, shape: Sequence[int], dtype: np.dtype, sharding: NamedSharding, alignment: int) -> ShardRows:
        """For a leaf of this shape, all of whose devices are this process's."""
        target, mesh = Target(sharding), cast(Any, sharding.mesh)
        splitting = {name for axis in range(len(shape)) for name in target.mesh_axes(axis)}
        names = [name for name in mesh.axis_names if name in splitting]
        sizes = tuple(mesh.shape[name] for name in names)
        shard = tuple(sharding.shard_shape(tuple(shape)))
        stride = -(-math.prod(shard) * dtype.itemsize // alignment) * alignment
        numbers = np.arange(math.prod(sizes)).reshape([mesh.shape[n] if n in names else 1 for n in mesh.axis_names])
        numbers = np.broadcast_to(numbers, mesh.devices.shape)
        of_device = dict(zip(mesh.devices.flat, numbers.ravel().tolist(), strict=True))
        split = Split.of(shape, sharding, names)
        return cls(shard, dtype, math.prod(sizes), stride, of_device, split, sizes)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.count * self.stride

    def view(self, region: np.ndarray) -> np.ndarray:
        """The shards in memory of (count, stride) bytes, one after another along the first axis."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return region[:, :nbytes].view(self.dtype).reshape((self.count, *self.shape))

    def place(self, region: np.ndarray) -> np.ndarray:
        """Where the leaf goes in that memory, divided by `split`."""
        return self.view(region).reshape((*self._mesh_shape, *self.shape))


def scatters(shape: Sequence[int], sharding: NamedSharding) -> bool:
    """Whether shards of such an array are not contiguous in it: it is split along an axis behind the first."""
    if not sharding.is_fully_addressable or 0 in shape:
        return False
    return in_device_memory(sharding) and any(shards > 1 for shards in Target(sharding).local_shards(len(shape))[1:])


def in_device_memory(sharding: Sharding) -> bool:
    """Whether arrays so placed are in their devices' own memory, and not in the host's."""
    device = next(iter(sharding.addressable_devices))
    return sharding.memory_kind in (None, device.default_memory().kind)
