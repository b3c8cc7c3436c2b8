"""The plan of a batch: made once for each structure, shape and dtype, then whole batches are put with it.

Synopsis:

    leaf_plans = [plan_leaf("image", target, leaf, number=0, batch_axis=0, x64=False)]
    plan = Plan.of(treedef, leaf_plans, Context.current())
    arrays = plan.put(leaves)            # explicit transfers, nothing is waited for

A plan speaks of parcels: one a leaf, in their order, and one more for the leaves that are packed together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxprefetch.device.context import NARROW, STANDARD_DTYPES, Context
from jaxprefetch.device.cost import Cost, together
from jaxprefetch.device.packing import Packing, find_packing
from jaxprefetch.device.placement import Target, local_devices
from jaxprefetch.device.shards import ShardRows, scatters
from jaxprefetch.device.transfer import Transfer
from jaxprefetch.errors import KEEP, OPTION, add_note, deleted, difference, some

HOST_ALIGNMENT = 64
"""Bytes between the starts of leaves in host memory."""


@dataclass(frozen=True)
class LeafPlan:
    """How one leaf travels."""

    path: str
    target: Target | None  # None: it stays on the host
    foreign: bool  # an array of the source's own: passed or moved, never deleted by us
    shape: tuple[int, ...]  # of this process's part
    dtype: np.dtype
    spec: Any  # what is delivered
    cost: Cost
    source: np.dtype | None = None  # of the NumPy array that it is made from

    @property
    def made(self) -> bool:
        """Whether the delivered array is made from host data."""
        return self.target is not None and not self.foreign

    @property
    def nbytes(self) -> int:
        """Of this process's part."""
        return math.prod(self.shape) * self.dtype.itemsize

    def shard_rows(self) -> ShardRows | None:
        """How it lies in host memory, if that is shard by shard."""
        sharding = None if self.target is None else self.target.sharding
        if isinstance(sharding, NamedSharding) and scatters(self.shape, sharding):
            return ShardRows.of(self.shape, self.dtype, sharding, HOST_ALIGNMENT)
        return None


@dataclass(frozen=True, eq=False)
class Plan:
    """How batches of one structure travel; the tuples of indices name parcels. Each plan equals itself only."""

    treedef: Any
    leaves: tuple[LeafPlan, ...]
    cost: Cost  # of what is put
    most: int  # bytes on the fullest device
    packing: Packing | None  # its buffer is the last parcel; the leaves in it have none
    offsets: dict[int, int]  # where in host memory parcels are sent from that lie there in one piece
    by_shard: dict[int, tuple[int, ShardRows]]  # and where those that lie there shard by shard
    host_bytes: int  # of these, with what lies between them
    foreign: tuple[int, ...]
    made: tuple[int, ...]  # made from host data
    all_made: bool  # every leaf is
    cast: tuple[int, ...]  # made from arrays of other dtypes
    transfer: Transfer

    @classmethod
    def of(cls, treedef: Any, leaves: Iterable[LeafPlan], context: Context) -> Plan:
        """The plan for a tree of these leaves."""
        leaves = tuple(leaves)
        packing = find_packing(leaves, context.packings)
        packed = {part.leaf for part in packing.parts} if packing else set()
        alone = {i: leaf for i, leaf in enumerate(leaves) if leaf.target is not None and i not in packed}
        targets: dict[int, Target] = {i: leaf.target for i, leaf in alone.items() if leaf.target}
        rows = {i: leaf.shard_rows() for i, leaf in alone.items() if leaf.made and leaf.source is not None}
        rows = {i: shards for i, shards in rows.items() if shards is not None}
        sizes = {i: rows[i].nbytes if i in rows else leaf.nbytes for i, leaf in alone.items() if leaf.made}
        costs = [leaf.cost for leaf in alone.values()]
        if packing:
            targets[len(leaves)], sizes[len(leaves)] = packing.target, packing.nbytes
            costs.append(packing.cost)
        offsets, host_bytes = laid_out(sizes)
        cost = together(costs)
        return cls(
            treedef=treedef,
            leaves=leaves,
            cost=cost,
            most=max(cost.values(), default=0),
            packing=packing,
            offsets={i: start for i, start in offsets.items() if i not in rows},
            by_shard={i: (offsets[i], shards) for i, shards in rows.items()},
            host_bytes=host_bytes,
            foreign=tuple(i for i, leaf in alone.items() if leaf.foreign),
            made=tuple(sizes),
            all_made=all(leaf.made for leaf in leaves),
            cast=tuple(i for i, leaf in enumerate(leaves) if leaf.source is not None and leaf.source != leaf.dtype),
            transfer=_transfer(targets, sizes.keys(), rows, context),
        )

    @property
    def element_spec(self) -> Any:
        """The tree of shapes, dtypes and shardings that batches of this plan are delivered with."""
        try:
            return jax.tree_util.tree_unflatten(self.treedef, [leaf.spec for leaf in self.leaves])
        except Exception as error:  # a node that checks its fields, as it would under jax.eval_shape
            add_note(
                error, "jaxprefetch: raised by a node of the batch when element_spec gave it shapes for its leaves"
            )
            raise

    def difference(self, other: Plan) -> str:
        """What a compiled step would see as new, against batches of the other plan; "" where that is nothing.

        Leaves that stay on the host are no concern of a step.
        """
        now = {leaf.path: leaf.spec for leaf in self.leaves if leaf.target is not None}
        before = {leaf.path: leaf.spec for leaf in other.leaves if leaf.target is not None}
        changed = [
            f"leaf {path} was {_short(before[path])} and is {_short(spec)}"
            for path, spec in now.items()
            if spec != before.get(path, spec)
        ]
        told = [difference(list(before), list(now))] if now.keys() != before.keys() else []
        return "; ".join([*told, some(changed)] if changed else told)

    def put(self, leaves: Sequence[Any]) -> list[Any]:
        """Puts one batch: a list of parcels as arrays, with the leaves that stay on the host as they are.

        Blocking: only for the allocation of device memory; the copies are queued.

        Raises:
            ValueError: the source has deleted or donated an array since it was staged.
        """
        if self.foreign:
            self.check_alive(leaves)
        return self.transfer.put(leaves)

    def check_alive(self, leaves: Sequence[Any], number: int | None = None) -> None:
        """Whether the source's own arrays are alive: passed ones are its own still, moved ones may share their buffers.

        Raises:
            ValueError: one is not; names the leaf, and the batch where its number is given.
        """
        for i in self.foreign:
            if leaves[i].is_deleted():
                path = self.leaves[i].path
                raise deleted(f"Leaf {path}" if number is None else f"Batch {number}, leaf {path}")


def laid_out(sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Where parcels of these sizes lie one after another, and the bytes that they take together."""
    offsets, end = {}, 0
    for i, nbytes in sizes.items():
        offsets[i] = end
        end += -(-nbytes // HOST_ALIGNMENT) * HOST_ALIGNMENT
    return offsets, end


def _transfer(
    targets: dict[int, Target], made: Collection[int], rows: dict[int, ShardRows], context: Context
) -> Transfer:
    placed = {i: target.sharding for i, target in targets.items() if target.committed}
    loose = tuple(i for i in made if i not in placed)
    devices = {i: shards.of_device for i, shards in rows.items()}
    return Transfer(context, loose, tuple(placed), tuple(placed.values()), devices)


def plan_leaf(
    path: str, target: Target | None, leaf: Any, *, number: int, batch_axis: int, x64: bool, rows: int | None = None
) -> LeafPlan:
    """How a leaf like this one travels; no target: it stays on the host.

    Args:
        rows: of the batch, where this leaf has others.

    Raises:
        TypeError: JAX has no such dtype.
        ValueError: it cannot be split as its sharding says.
    """
    if target is None:
        return LeafPlan(path, None, False, (), np.dtype(bool), _host_spec(leaf), {})
    where, shape = f"Batch {number}, leaf {path}", tuple(np.shape(leaf))
    target = target.fit(len(shape))
    foreign = isinstance(leaf, jax.Array)
    dtype = leaf.dtype if foreign else device_dtype(_host_dtype(leaf), x64, where)
    sharding = leaf.sharding if foreign and not target.committed else target.sharding
    stays = foreign and sharding == leaf.sharding
    if not stays:
        check_splits(target, shape, where, batch_axis, rows)
    whole = shape if stays else target.global_shape(shape)
    try:
        cost = leaf_cost(whole, dtype.itemsize, sharding)
    except ValueError as error:
        raise ValueError(f"{where}: shape {shape} does not fit {sharding}: {error}") from None
    weak = leaf.weak_type if foreign and hasattr(leaf, "weak_type") else is_weak(leaf) and target.is_local
    spec = jax.ShapeDtypeStruct(whole, dtype, sharding=sharding, weak_type=weak)
    source = leaf.dtype if isinstance(leaf, np.ndarray) else None
    return LeafPlan(path, target, foreign, shape, dtype, spec, cost, source)


def check_splits(target: Target, shape: Sequence[int], where: str, batch_axis: int, rows: int | None = None) -> None:
    """Whether every axis divides over its shards.

    Raises:
        ValueError: with the axis, its length, the mesh axes and what to do.
    """
    for axis, (n, shards) in enumerate(zip(shape, target.local_shards(len(shape)), strict=True)):
        if n % shards:
            names = " x ".join(repr(name) for name in target.mesh_axes(axis))
            cure = (
                f"{OPTION}last_batch='pad') fills a short last batch up and adds a mask, 'drop' leaves it out; else "
                f"batch to a multiple of {shards}."
            )
            if axis == batch_axis and rows not in (None, n):
                cure = f"Other leaves have {rows}: give all leaves of a batch that are split by rows the same number."
            elif axis != batch_axis:
                cure = "Pad that axis in the source, or choose a sharding that does not split it."
            raise ValueError(
                f"{where}: axis {axis} has {n} rows; the {shards} devices along mesh axis {names} "
                f"need a multiple of {shards}. {cure}"
            )


def _short(spec: Any) -> str:
    return f"{spec.dtype}{list(spec.shape)}" if isinstance(spec, jax.ShapeDtypeStruct) else str(spec)


def is_weak(leaf: Any) -> bool:
    """Whether JAX gives this number a weak type."""
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, (bool, np.generic))


def _host_dtype(leaf: Any) -> np.dtype:
    """Numbers of Python's have one dtype each, however large they are."""
    for kind, dtype in ((bool, np.bool_), (int, np.int64), (float, np.float64), (complex, np.complex128)):
        if isinstance(leaf, kind) and not isinstance(leaf, np.generic):
            return np.dtype(dtype)
    return leaf.dtype


def leaf_cost(shape: Sequence[int], itemsize: int, sharding: Sharding) -> Cost:
    """Bytes of one leaf on each of this process's devices; replicated leaves count in full."""
    n = math.prod(sharding.shard_shape(tuple(shape))) * itemsize
    return {device: n for device in local_devices(sharding)}


def _host_spec(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if isinstance(leaf, (np.ndarray, np.generic)) and any(
        jnp.issubdtype(leaf.dtype, kind) for kind in (np.number, np.bool_)
    ):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return type(leaf)


@functools.cache
def _device_dtype(dtype: np.dtype, x64: bool) -> np.dtype:
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    if native == jax.dtypes.float0:
        raise TypeError  # JAX would pass it through as it is
    if native.name not in STANDARD_DTYPES:
        jax.device_put(np.zeros((), native))  # ml_dtypes: some JAX takes, which depends on its version
    return native if x64 else np.dtype(NARROW.get(native.name, native))


def device_dtype(dtype: np.dtype, x64: bool, where: str) -> np.dtype:
    """The dtype that a leaf has on the device.

    Raises:
        TypeError: JAX has no such dtype.
    """
    try:
        return _device_dtype(dtype, x64)
    except (TypeError, ValueError, jax.errors.JaxRuntimeError):
        raise TypeError(f"{where}: arrays of dtype {dtype} cannot go to a device. {KEEP}") from None
