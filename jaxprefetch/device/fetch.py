"""Arrays on their way from the devices to the host.

Synopsis:

    part = local_part(array.sharding, array.shape)    # what this process has of it
    copies = start([array], [part])[0]                # queued behind what computes the array; nothing is waited for
    pieces = [to_host(copy) for copy in copies]       # NumPy arrays, once they are there

The copies lie in memory that the driver knows (`pinned_host`): a GPU writes there by itself, at the speed of the link,
and NumPy reads it in place. Read by `np.asarray`, or after `copy_to_host_async`, an array goes through a buffer of
JAX's and is copied by one thread, on the stream of the transfers (64 MB on an H200: 1.3 GiB/s, and 48 through pinned
memory). And a copy is ours alone: the array itself may be deleted or donated meanwhile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Sharding

from jaxprefetch.device.context import Device
from jaxprefetch.device.shortage import is_out_of_memory

PINNED = "pinned_host"
Index = tuple[slice, ...]


@dataclass(frozen=True)
class LocalPart:
    """What this process has of an array: the rows on its devices, each once."""

    shape: tuple[int, ...]
    shards: tuple[int, ...]  # addressable ones, by position; of those with the same content one
    places: tuple[Index, ...]  # where each goes in an array of this shape

    def nbytes(self, itemsize: int) -> int:
        """Bytes on the host."""
        return math.prod(self.shape) * itemsize

    def of(self, array: jax.Array) -> list[jax.Array]:
        """The shards, each as an array on one device."""
        if len(array.sharding.device_set) == 1:
            return [array]
        return [array.addressable_data(i) for i in self.shards]


@functools.lru_cache(maxsize=1024)
def local_part(sharding: Sharding, shape: tuple[int, ...]) -> LocalPart:
    """What this process has of arrays with this sharding and shape.

    Raises:
        ValueError: it is no block, so that it cannot be one NumPy array.
    """
    indices = [
        tuple(slice(*along.indices(n)[:2]) for along, n in zip(index, shape, strict=True))
        for index in sharding.addressable_devices_indices_map(shape).values()
        if index is not None
    ]
    bounds = [tuple((along.start, along.stop) for along in index) for index in indices]
    first = {bound: i for i, bound in reversed(list(enumerate(bounds)))}
    shards = sorted(first.values())
    starts = [min(bound[axis][0] for bound in bounds) for axis in range(len(shape))]
    stops = [max(bound[axis][1] for bound in bounds) for axis in range(len(shape))]
    box = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    if sum(math.prod(stop - start for start, stop in bounds[i]) for i in shards) != math.prod(box):
        raise ValueError(f"the shards of this process in {sharding} are no block of an array of shape {shape}")
    places = [
        tuple(slice(stop.start - start, stop.stop - start) for stop, start in zip(indices[i], starts, strict=True))
        for i in shards
    ]
    return LocalPart(box, tuple(shards), tuple(places))


def start(arrays: Sequence[jax.Array], parts: Sequence[LocalPart]) -> list[list[jax.Array]]:
    """Queues the copies of the shards of each array; none is waited for.

    Raises:
        RuntimeError: an array has been deleted or donated.
    """
    shards = [part.of(array) for array, part in zip(arrays, parts, strict=True)]
    copies = iter(_copies([shard for several in shards for shard in several]))
    return [[next(copies) for _ in several] for several in shards]


def to_host(copy: jax.Array) -> np.ndarray:
    """A copy as a NumPy array that nobody can write to. Blocking: until it is there; the GIL is free meanwhile."""
    with jax.transfer_guard_device_to_host("allow"):  # it has been asked for
        return np.asarray(copy)


def _copies(shards: list[jax.Array]) -> list[jax.Array]:
    """Copies in pinned memory; where there is none (left), the shards themselves, with what JAX does for them."""
    if all(_has_pinned(device) for shard in shards for device in shard.devices()):
        try:
            return jax.device_put(shards, [s.sharding.with_memory_kind(PINNED) for s in shards], may_alias=False)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
    for shard in shards:
        with jax.transfer_guard_device_to_host("allow"):
            shard.copy_to_host_async()
    return shards


@functools.cache
def _has_pinned(device: Device) -> bool:
    return any(memory.kind == PINNED for memory in device.addressable_memories())
