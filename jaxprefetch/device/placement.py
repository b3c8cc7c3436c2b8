"""Where each leaf of a batch goes: the `sharding` argument, resolved once.

Synopsis:

    placement = Placement(sharding)              # on the caller's thread: the contexts in force there count
    targets = placement.targets(batch, "Batch 0")    # one for each leaf
    targets[0].fit(ndim=1).local_shards(ndim=1)  # (8,): how this process's devices split its rows
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxprefetch.device.context import Context, Device, default_device
from jaxprefetch.errors import difference, some, typed

logger = logging.getLogger("jaxprefetch")


@dataclass(frozen=True)
class Target:
    """Where one leaf goes: an explicit sharding (committed), or the default device (uncommitted)."""

    sharding: Sharding
    committed: bool = True

    @property
    def is_local(self) -> bool:
        """Whether all of its devices are this process's."""
        return self.sharding.is_fully_addressable

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
        if self.is_local:
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
        if self.is_local:
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
        self._given = sharding
        leaves, self._prefix = jax.tree_util.tree_flatten(sharding, is_leaf=_is_placement)
        self._targets = [_resolve(leaf) for leaf in leaves]
        self.context = Context.current()

    @property
    def devices(self) -> tuple[Device, ...]:
        """This process's devices, each once."""
        return tuple(dict.fromkeys(d for t in self._targets for d in local_devices(t.sharding)))

    @property
    def all_devices(self) -> set[Device]:
        """Those of all processes."""
        return {device for target in self._targets for device in target.sharding.device_set}

    def targets(self, batch: Any, where: str) -> list[Target]:
        """One target a leaf of the batch, from the prefix.

        Raises:
            ValueError: `sharding` is not a prefix of the batch.
        """
        try:
            subtrees = self._prefix.flatten_up_to(batch)
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{where}: {self._mismatch(batch)}") from None
        counts = [jax.tree_util.tree_structure(subtree).num_leaves for subtree in subtrees]
        return [target for target, n in zip(self._targets, counts, strict=True) for _ in range(n)]

    def _mismatch(self, batch: Any) -> str:
        """What is said where the argument is no prefix of the batch."""
        given, named = self._given, "NamedSharding(mesh, PartitionSpec('data'))"
        listed = isinstance(given, (list, tuple))
        if listed and len(given) > 1 and all(isinstance(device, jax.Device) for device in given):
            return (
                f"sharding is a list of {len(given)} devices, one for each part of a batch that is such a list. To "
                f"split rows over them pass {named}, with mesh = Mesh(devices, ('data',))."
            )
        told, cure = self._difference(batch), "Yield the keys that it has"
        if listed and isinstance(batch, (list, tuple)) and type(given) is not type(batch):
            kind = type(batch).__name__
            told, cure = f"it is a {type(given).__name__}, the batch a {kind}", f"Pass a {kind}"
        elif not told:
            told = f"{self._prefix} of {jax.tree_util.tree_structure(batch)}"
            cure = "Pass the batch's own structure"
        last = f"or pass one sharding for all leaves; for several devices {named}"
        return f"sharding is not a prefix: {told}. {cure}, {last}."

    def _difference(self, batch: Any) -> str:
        """In paths; leaves of the batch below one of the prefix count as that one."""
        own = _paths(self._given, _is_placement)
        got = [next((p for p in own if f"{path}/".startswith(f"{p}/")), path) for path in _paths(batch, _is_empty)]
        return difference(own, list(dict.fromkeys(got)))


def _is_empty(tree: Any) -> bool:
    return not jax.tree_util.tree_leaves(tree)


def _paths(tree: Any, is_leaf: Callable[[Any], bool]) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "batch" for path, _ in paths]


def local_devices(sharding: Sharding) -> list[Device]:
    """This process's devices of a sharding, in a fixed order."""
    return sorted(sharding.addressable_devices, key=lambda device: device.id)


def warn_of_one_device(state: Any, batch: Any) -> None:
    """Says that the state is on several devices, to which each step then copies a batch that went to one."""
    held, given = (
        [leaf for leaf in jax.tree_util.tree_leaves(tree) if isinstance(leaf, jax.Array)] for tree in (state, batch)
    )
    devices = max((len(leaf.sharding.device_set) for leaf in held), default=0)
    if devices > 1 and given and not any(leaf.committed for leaf in given):
        logger.warning(
            "jaxprefetch: the state is on %d devices and the batches are on one, so that each step copies them to the "
            'others and all do the same. Pass sharding=NamedSharding(mesh, PartitionSpec("data")) with the source.',
            devices,
        )


def _is_placement(x: Any) -> bool:
    return x is None or isinstance(x, (Sharding, jax.Device, PartitionSpec))


def _resolve(leaf: Any) -> Target:
    if leaf is None:
        return Target(SingleDeviceSharding(default_device()), committed=False)
    if isinstance(leaf, jax.Device):
        return Target(SingleDeviceSharding(leaf))
    if isinstance(leaf, Sharding):
        if isinstance(leaf, NamedSharding):
            _check_spec(leaf.spec)
            if not isinstance(leaf.mesh, Mesh):
                raise ValueError(f"sharding={leaf} has an abstract mesh, without devices. Pass a mesh of devices.")
        return Target(leaf)
    if isinstance(leaf, PartitionSpec):
        _check_spec(leaf)
        mesh = jax.sharding.get_mesh()
        if mesh.empty or not isinstance(mesh, Mesh):
            raise ValueError(
                f"sharding={leaf} needs a mesh in force: call within `with jax.set_mesh(mesh):`, "
                "or pass NamedSharding(mesh, spec)."
            )
        _check_axes(leaf, mesh)
        return Target(NamedSharding(mesh, leaf))
    cure = ""
    if isinstance(leaf, (Mesh, AbstractMesh)):
        axes = leaf.axis_names or ("data",)
        cure = f' To split axis 0 over it pass NamedSharding(mesh, PartitionSpec("{axes[0]}")).'
    elif isinstance(leaf, str):
        cure = f" For an axis of a mesh pass NamedSharding(mesh, PartitionSpec({leaf!r}))."
    raise TypeError(
        f"sharding: expected None, a Device, a Sharding, a PartitionSpec or a pytree of these, got {typed(leaf)}.{cure}"
    )


def _check_axes(spec: PartitionSpec, mesh: Mesh) -> None:
    """As `NamedSharding` does, in a message of our own: this spec and the mesh in force were written in two places."""
    names = [name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))]
    if missing := [name for name in names if isinstance(name, str) and name not in mesh.axis_names]:
        raise ValueError(
            f"sharding: {spec} names {missing[0]!r}, but the axes of the mesh are {some(mesh.axis_names)}. Pass a "
            "PartitionSpec of these."
        )


def _check_spec(spec: PartitionSpec) -> None:
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
        raise ValueError(f"sharding: {spec} leaves an axis unconstrained; a batch needs a definite place on each axis.")
