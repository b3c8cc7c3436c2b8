"""Where each leaf of a batch goes: shardings are resolved once, then whole batches are put with them.

    placement = Placement(sharding)                              # on the caller's thread: contexts count here
    plan = placement.plan(treedef, paths, leaves, where)         # once for each structure, shape and dtype
    arrays = plan.put(leaves)                                    # explicit transfers, nothing is waited for
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Cost = dict[jax.Device, int]


@dataclass(frozen=True)
class Target:
    """Where one leaf goes: an explicit sharding (committed), or the default device (uncommitted)."""

    sharding: Sharding
    committed: bool = True

    def fit(self, ndim: int) -> Target:
        """The same placement for a leaf of lower rank: axes that it does not have are left out."""
        if isinstance(self.sharding, NamedSharding) and len(self.sharding.spec) > ndim:
            spec = PartitionSpec(*self.sharding.spec[:ndim])
            return Target(NamedSharding(self.sharding.mesh, spec, memory_kind=self.sharding.memory_kind))
        return self

    def axis(self, axis: int) -> Target:
        """The placement of a one-axis leaf that is split as `axis` is here."""
        if isinstance(self.sharding, NamedSharding):
            entry = self.sharding.spec[axis] if axis < len(self.sharding.spec) else None
            kind = self.sharding.memory_kind
            return Target(NamedSharding(self.sharding.mesh, PartitionSpec(entry), memory_kind=kind), self.committed)
        return self

    def mesh_axes(self, axis: int) -> tuple[str, ...]:
        """Names of the mesh axes that split this axis; empty when it is not split by name."""
        if not isinstance(self.sharding, NamedSharding) or axis >= len(self.sharding.spec):
            return ()
        entry = self.sharding.spec[axis]
        return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)

    def local_shards(self, ndim: int) -> tuple[int, ...]:
        """Into how many parts this process's devices split each axis of its own rows."""
        if not isinstance(self.sharding, NamedSharding):
            return (1,) * ndim
        shards = self.global_shards(ndim)
        if self.sharding.is_fully_addressable:
            return shards
        indices = self.sharding.addressable_devices_indices_map(shards).values()
        return tuple(len({index[axis].indices(n) for index in indices if index}) for axis, n in enumerate(shards))

    def global_shards(self, ndim: int) -> tuple[int, ...]:
        """Into how many parts the mesh splits each axis of the global array."""
        if not isinstance(self.sharding, NamedSharding):
            return (1,) * ndim
        sizes = self.sharding.mesh.shape
        return tuple(math.prod(sizes[name] for name in self.mesh_axes(axis)) for axis in range(ndim))

    def global_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the global array that rows of shape `local` from every process make."""
        if self.sharding.is_fully_addressable:
            return tuple(local)
        whole, here = self.global_shards(len(local)), self.local_shards(len(local))
        return tuple(n * g // h for n, g, h in zip(local, whole, here, strict=True))


class Placement:
    """The `sharding` argument, resolved.

    Args:
        sharding: `None` (the default device in force now, uncommitted as `jax.device_put(x)` leaves it), a `Device`,
            a `Sharding`, a `PartitionSpec` under the mesh in force now, or a pytree prefix of these.

    Raises:
        TypeError: for anything else.
        ValueError: for a `PartitionSpec` with no mesh in force.
    """

    def __init__(self, sharding: Any = None):
        leaves, self._prefix = jax.tree_util.tree_flatten(sharding, is_leaf=_is_placement)
        self._targets = [_resolve(leaf) for leaf in leaves]
        self.x64: bool = jax.config.jax_enable_x64

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """This process's devices, each once."""
        return tuple(dict.fromkeys(d for t in self._targets for d in local_devices(t.sharding)))

    def targets(self, treedef: Any, number: int) -> list[Target]:
        """One target a leaf of `treedef`, from the prefix.

        Raises:
            ValueError: `sharding` is not a prefix of the batch.
        """
        skeleton = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
        try:
            subtrees = self._prefix.flatten_up_to(skeleton)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"Batch {number}: sharding={self._prefix} is not a prefix of the batch {treedef} ({error}). "
                "Pass one sharding for all leaves, or a tree with the batch's own keys."
            ) from None
        counts = [jax.tree_util.tree_structure(subtree).num_leaves for subtree in subtrees]
        return [target for target, n in zip(self._targets, counts, strict=True) for _ in range(n)]


@dataclass(frozen=True)
class Plan:
    """How batches of one structure travel. `targets[i]` is None for a leaf that stays on the host."""

    treedef: Any
    paths: tuple[str, ...]
    targets: tuple[Target | None, ...]
    local: tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of this process's part
    spec: tuple[Any, ...]
    cost: Cost
    foreign: tuple[int, ...]  # leaves that are arrays of the source's own
    made: tuple[int, ...]  # leaves that are made from host data
    x64: bool

    @property
    def element_spec(self) -> Any:
        """The tree of shapes, dtypes and shardings that batches of this plan are delivered with."""
        return jax.tree_util.tree_unflatten(self.treedef, self.spec)

    def put(self, leaves: Sequence[Any]) -> list[Any]:
        """Puts one batch: a leaf list of arrays, with the leaves that stay on the host as they are.

        Blocking: only for the allocation of device memory; the copies are queued.
        """
        out = list(leaves)
        for target, indices in self._groups():
            with _context(self.x64, target):
                for index, array in zip(indices, _put([leaves[i] for i in indices], target), strict=True):
                    out[index] = array
        return out

    def _groups(self) -> list[tuple[list[Sharding] | jax.Device, list[int]]]:
        """Leaves that go in one call: those with shardings together, then those of each default device."""
        explicit = [i for i, target in enumerate(self.targets) if target is not None and target.committed]
        groups: list[tuple[list[Sharding] | jax.Device, list[int]]] = []
        if explicit:
            groups.append(([t.sharding for i in explicit if (t := self.targets[i]) is not None], explicit))
        loose = [i for i in self.made if (t := self.targets[i]) is not None and not t.committed]
        if loose and (target := self.targets[loose[0]]) is not None:
            (device,) = target.sharding.device_set
            groups.append((device, loose))
        return groups


def leaf_cost(shape: Sequence[int], itemsize: int, sharding: Sharding) -> Cost:
    """Bytes of one leaf on each of this process's devices; replicated leaves count in full."""
    n = math.prod(sharding.shard_shape(tuple(shape))) * itemsize
    return {device: n for device in local_devices(sharding)}


def local_devices(sharding: Sharding) -> list[jax.Device]:
    """This process's devices of a sharding, in a fixed order."""
    return sorted(sharding.addressable_devices, key=lambda device: device.id)


def _is_placement(x: Any) -> bool:
    return x is None or isinstance(x, (Sharding, jax.Device, PartitionSpec))


def _resolve(leaf: Any) -> Target:
    if leaf is None:
        return Target(SingleDeviceSharding(default_device()), committed=False)
    if isinstance(leaf, jax.Device):
        return Target(SingleDeviceSharding(leaf))
    if isinstance(leaf, Sharding):
        return Target(leaf)
    if isinstance(leaf, PartitionSpec):
        mesh = jax.sharding.get_mesh()
        if mesh.empty or not isinstance(mesh, Mesh):
            raise ValueError(
                f"sharding={leaf} needs a mesh in force: call within `with jax.set_mesh(mesh):`, "
                "or pass NamedSharding(mesh, spec)."
            )
        return Target(NamedSharding(mesh, leaf))
    raise TypeError(
        f"sharding: expected None, a Device, a Sharding, a PartitionSpec or a pytree of these, "
        f"got {type(leaf).__name__} {leaf!r}."
    )


def default_device() -> jax.Device:
    """The device on which `jax.device_put(x)` would put now, on this thread."""
    device = jax.config.jax_default_device
    if isinstance(device, jax.Device):
        return device
    return jax.local_devices(backend=device)[0]


def _context(x64: bool, target: list[Sharding] | jax.Device) -> contextlib.ExitStack:
    """What was in force where the prefetcher was made, wherever `next()` is called."""
    stack = contextlib.ExitStack()
    if jax.config.jax_enable_x64 != x64:
        stack.enter_context(jax.enable_x64(x64))
    if isinstance(target, jax.Device) and jax.config.jax_default_device is not target:
        stack.enter_context(jax.default_device(target))
    return stack


def _put(leaves: list[Any], target: list[Sharding] | jax.Device) -> list[jax.Array]:
    if isinstance(target, jax.Device):
        return jax.device_put(leaves)
    if all(sharding.is_fully_addressable for sharding in target):
        return jax.device_put(leaves, target)
    return [_put_local(leaf, sharding) for leaf, sharding in zip(leaves, target, strict=True)]


def _put_local(leaf: Any, sharding: Sharding) -> jax.Array:
    """This process's part of a global array, without a collective."""
    if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    rows = np.asarray(leaf)
    return jax.make_array_from_process_local_data(sharding, rows, Target(sharding).global_shape(rows.shape))
