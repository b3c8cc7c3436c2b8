"""Small leaves travel together: packed into one buffer on the host, taken apart by one compiled call on the devices.

Synopsis:

    packing = find_packing(leaf_plans, known=set())  # None where it does not pay
    places = [packing.place(buffer, part) for part in packing.parts]  # on the host, to copy the leaves there
    arrays = packing.unpack(buffer)                  # traceable, once the buffer is on its devices

A put costs the host about as much for 64 bytes as for 64 kilobytes. Each device gets one row of the buffer, with its
shards of all packed leaves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxprefetch.device.context import STANDARD_DTYPES, Context, in_clean_thread
from jaxprefetch.device.pinning import GPU_PLATFORMS
from jaxprefetch.device.placement import Target, local_devices
from jaxprefetch.device.shards import Split, in_device_memory

PLATFORMS = GPU_PLATFORMS
"""Where packing pays. On a CPU a put is cheaper than the copies that it saves."""

LARGEST_BYTES = 1 << 20
"""Leaves with more bytes than this on a device travel alone."""

MOST_BYTES = 32 << 20
"""Of the leaves that travel together: on a device the batch in the loop's hands is there twice, packed and unpacked."""

FEWEST_LEAVES = 3
"""Fewer are not worth the call that takes them apart."""

MOST_PACKINGS = 8
"""Each is compiled, so batches whose shapes go on changing travel leaf by leaf after so many."""

_LEAF_ALIGNMENT, _ROW_ALIGNMENT = 16, 64


@dataclass(frozen=True)
class Part:
    """One leaf in the buffer: at the same place of each row."""

    leaf: int
    dtype: np.dtype
    shape: tuple[int, ...]  # of a shard
    offset: int
    sharding: Sharding
    split: Split | None  # None: there is one device

    @property
    def end(self) -> int:
        """Where the next may begin."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packing:
    """Which leaves share a buffer, and how it travels."""

    parts: tuple[Part, ...]
    target: Target
    shape: tuple[int, ...]  # of the buffer: (devices, bytes), or (bytes,) without a mesh

    @property
    def nbytes(self) -> int:
        """Of the buffer on the host."""
        return math.prod(self.shape)

    @property
    def cost(self) -> dict[Any, int]:
        """Bytes of the buffer on each device."""
        return dict.fromkeys(local_devices(self.target.sharding), self.shape[-1])

    def place(self, buffer: np.ndarray, part: Part) -> np.ndarray:
        """Where a leaf goes in the buffer on the host, divided by `part.split` if there is one."""
        place = buffer[..., part.offset : part.end].view(part.dtype)
        return place.reshape(part.shape if part.split is None else (*self._mesh_shape, *part.shape))

    def unpack(self, buffer: Any) -> list[Any]:
        """The leaves, each with the sharding that it would have alone; for use under `jax.jit`."""
        sharding = self.target.sharding
        if not isinstance(sharding, NamedSharding):
            return self._take_apart(buffer)
        return jax.shard_map(
            lambda rows: self._take_apart(rows[0]),
            mesh=sharding.mesh,
            in_specs=sharding.spec,
            out_specs=[part.sharding.spec for part in self.parts],  # pyright: ignore[reportAttributeAccessIssue]
            check_vma=False,
        )(buffer)

    @property
    def _mesh_shape(self) -> tuple[int, ...]:
        return tuple(self.target.sharding.mesh.shape.values())  # pyright: ignore[reportAttributeAccessIssue]

    def _take_apart(self, row: Any) -> list[Any]:
        return [_decode(row[part.offset : part.end], part.dtype, part.shape) for part in self.parts]


def find_packing(leaves: Sequence[Any], known: set[Packing]) -> Packing | None:
    """How the small ones of these `LeafPlan`s travel together; None where they had better go alone.

    Args:
        known: the packings so far, to which a new one is added.
    """
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.made and not leaf.target.is_local:
            return None
        if (group := _group(leaf)) is not None:
            groups.setdefault(group, []).append(i)
    members = _smallest(leaves, max(groups.values(), key=len, default=[]))
    if len(members) < FEWEST_LEAVES:
        return None
    packing = _pack(leaves, members)
    if packing not in known:
        if len(known) == MOST_PACKINGS:
            return None
        known.add(packing)
    return packing


def _smallest(leaves: Sequence[Any], members: list[int]) -> list[int]:
    """As many of them, the smallest, as have `MOST_BYTES` together."""
    by_size = sorted(members, key=lambda i: max(leaves[i].cost.values()))
    ends = itertools.accumulate(max(leaves[i].cost.values()) for i in by_size)
    return sorted(i for i, end in zip(by_size, ends, strict=True) if end <= MOST_BYTES)


@functools.lru_cache(maxsize=64)
def compiled_unpack(packing: Packing, context: Context) -> Any:
    """The call that takes a buffer apart, the same for every prefetcher of the process."""
    sharding = packing.target.sharding
    shardings = [part.sharding for part in packing.parts] if isinstance(sharding, NamedSharding) else None

    def jaxprefetch_unpack(buffer: Any) -> list[Any]:
        return packing.unpack(buffer)

    def compiled() -> Any:
        with context.entered():
            return jax.jit(jaxprefetch_unpack, out_shardings=shardings).lower(buffer_struct(packing)).compile()

    return in_clean_thread(compiled)


def buffer_struct(packing: Packing) -> jax.ShapeDtypeStruct:
    """The buffer, as a compiler has to know it."""
    sharding = packing.target.sharding if packing.target.committed else None
    return jax.ShapeDtypeStruct(packing.shape, np.uint8, sharding=sharding)


def _group(leaf: Any) -> Any:
    """What leaves must have in common to share a buffer; None for one that travels alone."""
    if not (leaf.source is not None and _has_whole_bytes(leaf.dtype)):
        return None
    sharding, devices = leaf.target.sharding, local_devices(leaf.target.sharding)
    if any(device.platform not in PLATFORMS for device in devices):
        return None
    if not 0 < max(leaf.cost.values()) <= LARGEST_BYTES:
        return None
    if not in_device_memory(sharding):
        return None
    if isinstance(sharding, NamedSharding):
        return sharding.mesh
    return (devices[0], leaf.target.committed) if isinstance(sharding, SingleDeviceSharding) else None


def _has_whole_bytes(dtype: np.dtype) -> bool:
    """Whether a device keeps it as NumPy does, byte for byte (bool as 0 or 1)."""
    return dtype.name in STANDARD_DTYPES or dtype.name == "bfloat16" or dtype.name.startswith("float8_")


def _pack(leaves: Sequence[Any], members: Sequence[int]) -> Packing:
    target, parts, end = leaves[members[0]].target, [], 0
    mesh = target.sharding.mesh if isinstance(target.sharding, NamedSharding) else None
    for i in members:
        leaf = leaves[i]
        split = None if mesh is None or mesh.size == 1 else Split.of(leaf.shape, leaf.target.sharding, mesh.axis_names)
        shape = leaf.target.sharding.shard_shape(leaf.shape)
        parts.append(Part(i, leaf.dtype, tuple(shape), _aligned(end, _LEAF_ALIGNMENT), leaf.target.sharding, split))
        end = parts[-1].end
    end = max(_aligned(end, _ROW_ALIGNMENT), _ROW_ALIGNMENT)
    if mesh is None:
        return Packing(tuple(parts), target, (end,))
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return Packing(tuple(parts), Target(rows), (mesh.size, end))


def _aligned(n: int, to: int) -> int:
    return -(-n // to) * to


def _decode(raw: Any, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    """The array whose bytes these are."""
    if dtype.kind == "b":
        return (raw != 0).reshape(shape)
    if dtype.kind == "c":
        real = np.dtype(f"float{dtype.itemsize * 4}")
        pairs = _decode(raw, real, (*shape, 2))
        return jax.lax.complex(pairs[..., 0], pairs[..., 1])
    if dtype.itemsize > 1:
        raw = raw.reshape((-1, dtype.itemsize))
    return jax.lax.bitcast_convert_type(raw, dtype).reshape(shape)
