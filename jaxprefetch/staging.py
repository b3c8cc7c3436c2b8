"""From what the source yields to what a put takes: leaves that nobody else can change, and the plan for them.

    stager = Stager(Placement(sharding), StagingOptions())
    stager.begin_pass()
    staged = stager.stage(batch, number=0)     # on the reader's thread
    arrays = staged.plan.put(staged.leaves)    # on the consumer's thread
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxprefetch.device.placement import Cost, Placement, Plan, Target, leaf_cost
from jaxprefetch.host.batching import LastBatch, Mode
from jaxprefetch.host.leaves import NUMBERS, as_host, check_range, copy_aligned, device_dtype, leaf_paths, plain

logger = logging.getLogger("jaxprefetch")

KeepOnHost = Callable[[str, Any], bool] | Sequence[str] | str | None


@dataclass(frozen=True)
class StagingOptions:
    """The arguments of `prefetch_to_device` that speak of leaves and rows; their meaning is told there."""

    keep_on_host: KeepOnHost = None
    last_batch: Mode = "error"
    mask_key: str = "mask"
    batch_axis: int = 0
    fresh_buffers: bool | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch from which can be sent: its leaves are in host memory of their own, or arrays on devices already."""

    leaves: list[Any]
    plan: Plan
    nbytes: int  # of host memory, until it has landed


@dataclass(frozen=True)
class _Structure:
    """What is so for every batch of one tree structure."""

    paths: tuple[str, ...]
    targets: tuple[Target, ...]
    kept: tuple[bool, ...]


@dataclass
class _Layout:
    """What is so for every batch of one structure with the same shapes and dtypes."""

    rows_leaf: int | None
    shards: int
    plans: dict[int | None, tuple[Plan, tuple[int, ...]]] = field(default_factory=dict)  # by rows delivered


class Stager:
    """Stages batches in order. Used by one thread at a time."""

    def __init__(self, placement: Placement, options: StagingOptions):
        self._placement = placement
        self._options = options
        self._policy = LastBatch(options.last_batch)
        self._structures: dict[Any, _Structure] = {}
        self._layouts: dict[Hashable, _Layout] = {}
        self._said_shapes = False
        self.element_spec: Any = None  # of the first batch, set by the thread that stages

    def begin_pass(self) -> None:
        """Batch numbers and the rows to compare with start again."""
        self._policy = LastBatch(self._options.last_batch)

    def stage(self, raw: Any, number: int) -> Staged | None:
        """One batch ready to be put; None for a short last batch that is left out.

        Raises:
            TypeError, ValueError, OverflowError: the batch cannot go where it should; names the batch and the leaf.
        """
        leaves, treedef = jax.tree_util.tree_flatten(raw)
        if any(isinstance(leaf, Mapping) for leaf in leaves):
            raw = plain(raw)
            leaves, treedef = jax.tree_util.tree_flatten(raw)
        structure = self._structures.get(treedef)
        if structure is None:
            structure = self._structures[treedef] = self._new_structure(raw, treedef, leaves, number)
        leaves = [self._on_host(structure, i, leaf, number) for i, leaf in enumerate(leaves)]
        layout = self._layout(treedef, structure, leaves)
        rows = deliver = None
        if layout.rows_leaf is not None:
            rows = np.shape(leaves[layout.rows_leaf])[self._options.batch_axis]
            deliver = self._policy.admit(number, rows, layout.shards)
            if deliver is None:
                return None
        if deliver not in layout.plans:
            layout.plans[deliver] = self._new_plan(treedef, structure, layout, leaves, rows, deliver, number)
        plan, order = layout.plans[deliver]
        return self._own(structure, plan, order, leaves, rows, number)

    # ---- once for each structure and shape

    def _new_structure(self, raw: Any, treedef: Any, leaves: list[Any], number: int) -> _Structure:
        paths = leaf_paths(raw)
        keep = _keep_predicate(self._options.keep_on_host, paths, number)
        kept = tuple(keep(path, leaf) for path, leaf in zip(paths, leaves, strict=True))
        return _Structure(paths, tuple(self._placement.targets(treedef, number)), kept)

    def _on_host(self, structure: _Structure, i: int, leaf: Any, number: int) -> Any:
        if structure.kept[i]:
            return leaf
        leaf = as_host(leaf, f"Batch {number}, leaf {structure.paths[i]}")
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            if not structure.targets[i].sharding.is_fully_addressable:
                return np.asarray(leaf)  # this process's rows of a global array
        return leaf

    def _layout(self, treedef: Any, structure: _Structure, leaves: list[Any]) -> _Layout:
        key = (treedef, tuple(_signature(leaf, kept) for leaf, kept in zip(leaves, structure.kept, strict=True)))
        layout = self._layouts.get(key)
        if layout is None:
            rows_leaf = self._find_rows(structure, leaves)
            shards = 1
            if rows_leaf is not None:
                ndim = np.ndim(leaves[rows_leaf])
                shards = structure.targets[rows_leaf].local_shards(ndim)[self._options.batch_axis]
            layout = self._layouts[key] = _Layout(rows_leaf, shards)
        return layout

    def _find_rows(self, structure: _Structure, leaves: list[Any]) -> int | None:
        """The first leaf whose sharding splits the batch axis; to drop or pad, else the first that has the axis."""
        axis = self._options.batch_axis
        having = [i for i, leaf in enumerate(leaves) if not structure.kept[i] and np.ndim(leaf) > axis]
        split = [i for i in having if structure.targets[i].mesh_axes(axis)]
        if self._options.last_batch != "error":
            split = split or having
        return split[0] if split else None

    def _new_plan(
        self,
        treedef: Any,
        structure: _Structure,
        layout: _Layout,
        leaves: list[Any],
        rows: int | None,
        deliver: int | None,
        number: int,
    ) -> tuple[Plan, tuple[int, ...]]:
        """The plan, and for each of its leaves the index of the batch's leaf (one past the last: the mask)."""
        paths, targets = list(structure.paths), list(structure.targets)
        leaves = [self._padded_struct(leaf, rows, deliver) for leaf in leaves]
        kept, order = [*structure.kept], tuple(range(len(leaves)))
        if self._options.last_batch == "pad" and layout.rows_leaf is not None:
            assert deliver is not None
            treedef, order = _with_mask(treedef, self._options.mask_key, number)
            targets.append(targets[layout.rows_leaf].axis(self._options.batch_axis))
            paths.append(self._options.mask_key)
            kept.append(False)
            leaves.append(np.empty(deliver, bool))
        plan = _PlanMaker(self._placement.x64, self._options, number)
        for i in order:
            plan.add(paths[i], None if kept[i] else targets[i], leaves[i])
        self._say_shapes(plan, number)
        return plan.make(treedef), order

    def _padded_struct(self, leaf: Any, rows: int | None, deliver: int | None) -> Any:
        """A stand-in with the shape that is delivered."""
        axis = self._options.batch_axis
        if rows == deliver or not hasattr(leaf, "shape") or len(leaf.shape) <= axis or leaf.shape[axis] != rows:
            return leaf
        shape = (*leaf.shape[:axis], deliver, *leaf.shape[axis + 1 :])
        return np.broadcast_to(np.empty((), leaf.dtype), shape)

    def _say_shapes(self, plan: _PlanMaker, number: int) -> None:
        if self.element_spec is None:
            return
        if not self._said_shapes:
            self._said_shapes = True
            logger.warning(
                "Batch %d has other shapes, dtypes or keys than batch 0 (%s): a step is compiled anew for each. "
                "last_batch='drop' or 'pad' gives a short last batch the shape of the others.",
                number,
                ", ".join(f"{path} {spec}" for path, spec in zip(plan.paths, plan.spec, strict=True))[:500],
            )

    # ---- once for each batch

    def _own(
        self,
        structure: _Structure,
        plan: Plan,
        order: tuple[int, ...],
        leaves: list[Any],
        rows: int | None,
        number: int,
    ) -> Staged:
        """Host memory of our own for every leaf that needs it."""
        out: list[Any] = []
        nbytes, seen = 0, set[int]()
        for position, i in enumerate(order):
            leaf = leaves[i] if i < len(leaves) else np.arange(plan.spec[position].shape[0]) < rows
            if plan.targets[position] is None:
                leaf = self._kept(leaf)
            elif position in plan.made:
                where = f"Batch {number}, leaf {plan.paths[position]}"
                leaf = self._made(leaf, plan.local[position], where, seen)
                nbytes += getattr(leaf, "nbytes", 0)
            out.append(leaf)
        if self.element_spec is None:
            self.element_spec = plan.element_spec
        return Staged(out, plan, nbytes)

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and not self._options.fresh_buffers:
            return leaf.copy()
        return leaf

    def _made(self, leaf: Any, local: tuple[tuple[int, ...], np.dtype], where: str, seen: set[int]) -> Any:
        shape, dtype = local
        if type(leaf) in NUMBERS:
            check_range(leaf, dtype, where)
            return leaf
        leaf = np.asarray(leaf)
        if leaf.dtype != dtype:
            check_range(leaf, dtype, where)
        elif self._options.fresh_buffers and leaf.shape == shape:
            address = leaf.__array_interface__["data"][0]
            if address not in seen:  # a leaf that shares memory with another of its batch is copied
                seen.add(address)
                return leaf
        return copy_aligned(leaf, dtype, shape)


class _PlanMaker:
    """Gathers a plan leaf by leaf."""

    def __init__(self, x64: bool, options: StagingOptions, number: int):
        self._x64, self._options, self._number = x64, options, number
        self.paths: list[str] = []
        self.spec: list[Any] = []
        self._targets: list[Target | None] = []
        self._local: list[tuple[tuple[int, ...], np.dtype]] = []
        self._cost: Cost = {}
        self._foreign: list[int] = []
        self._made: list[int] = []

    def add(self, path: str, target: Target | None, leaf: Any) -> None:
        """One leaf of the batch, as it will be delivered; no target: it stays on the host."""
        where, index = f"Batch {self._number}, leaf {path}", len(self.paths)
        self.paths.append(path)
        shape = np.shape(leaf) if target is not None else ()
        if target is None:
            self._targets.append(None)
            self._local.append(((), np.dtype(bool)))
            self.spec.append(_host_spec(leaf))
            return
        target = target.fit(len(shape))
        foreign = isinstance(leaf, jax.Array)
        dtype = leaf.dtype if foreign else device_dtype(np.asarray(leaf).dtype, self._x64, where)
        placed = leaf.sharding if foreign and not target.committed else target.sharding
        if not (foreign and placed == leaf.sharding):
            check_splits(target, shape, where, self._options.batch_axis)
        whole = shape if foreign and not leaf.is_fully_addressable else target.global_shape(shape)
        try:
            cost = leaf_cost(whole, dtype.itemsize, placed)
        except ValueError as error:
            raise ValueError(f"{where}: shape {shape} does not fit {placed}: {error}") from None
        for device, n in cost.items():
            self._cost[device] = self._cost.get(device, 0) + n
        (self._foreign if foreign else self._made).append(index)
        self._targets.append(target)
        self._local.append((tuple(shape), dtype))
        weak = type(leaf) in NUMBERS
        self.spec.append(jax.ShapeDtypeStruct(whole, dtype, sharding=placed, weak_type=weak))

    def make(self, treedef: Any) -> Plan:
        """The plan of all leaves so far."""
        return Plan(
            treedef=treedef,
            paths=tuple(self.paths),
            targets=tuple(self._targets),
            local=tuple(self._local),
            spec=tuple(self.spec),
            cost=self._cost,
            foreign=tuple(self._foreign),
            made=tuple(self._made),
            x64=self._x64,
        )


def check_splits(target: Target, shape: Sequence[int], where: str, batch_axis: int) -> None:
    """Whether every axis divides over its shards.

    Raises:
        ValueError: with the axis, its length, the mesh axes and what to do.
    """
    for axis, (n, shards) in enumerate(zip(shape, target.local_shards(len(shape)), strict=True)):
        if n % shards:
            names = " x ".join(repr(name) for name in target.mesh_axes(axis))
            cure = f"Pass last_batch='pad' or 'drop', or batch to a multiple of {shards}."
            if axis != batch_axis:
                cure = "Pad that axis in the source, or choose a sharding that does not split it."
            raise ValueError(
                f"{where}: axis {axis} has {n} rows; the {shards} devices along mesh axis {names} "
                f"need a multiple of {shards}. {cure}"
            )


def _signature(leaf: Any, kept: bool) -> Hashable:
    if kept:
        return None
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding
    return type(leaf)


def _host_spec(leaf: Any) -> Any:
    if isinstance(leaf, (np.ndarray, np.generic, jax.Array)) and np.dtype(leaf.dtype).kind in "biufc":
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return type(leaf)


def _keep_predicate(keep: KeepOnHost, paths: tuple[str, ...], number: int) -> Callable[[str, Any], bool]:
    """`keep_on_host` as a function of a leaf's path and value."""
    if keep is None:
        return lambda path, leaf: False
    if callable(keep):
        return lambda path, leaf: bool(keep(path, leaf))
    names = (keep,) if isinstance(keep, str) else tuple(keep)

    def named(path: str, name: str) -> bool:
        return path == name or path.startswith(name + "/")

    for name in names:
        if not any(named(path, name) for path in paths):
            raise ValueError(
                f"Batch {number}: keep_on_host names {name!r}, but no leaf is called so. Leaves: {', '.join(paths)}."
            )
    return lambda path, leaf: any(named(path, name) for name in names)


def _with_mask(treedef: Any, key: str, number: int) -> tuple[Any, tuple[int, ...]]:
    """The structure with a mask beside the batch, and which leaf goes where in it (the last is the mask)."""
    n = treedef.num_leaves
    skeleton = jax.tree_util.tree_unflatten(treedef, range(n))
    if isinstance(skeleton, dict):
        if key in skeleton:
            raise ValueError(
                f"Batch {number}: last_batch='pad' adds the mask as {key!r}, but the batch has that key already. "
                "Pass another mask_key."
            )
        skeleton = {**skeleton, key: n}
    else:
        skeleton = (skeleton, n)
    order, padded = jax.tree_util.tree_flatten(skeleton)
    return padded, tuple(order)
