"""How batches of one structure, with the same shapes and dtypes, are delivered: which rows, which mask, which plan.

Synopsis:

    layout = Layout(parts, options, number=0)
    rows = layout.rows(leaves)
    plan, order = layout.plan(leaves, rows, 0, context)
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprefetch.device.context import Context
from jaxprefetch.device.placement import Target
from jaxprefetch.device.plan import Plan, plan_leaf
from jaxprefetch.errors import some
from jaxprefetch.host.batching import Mode
from jaxprefetch.host.leaves import fetch, is_key, leaf_paths, warn_of_lists
from jaxprefetch.host.slots import Fresh, Slot

KeepOnHost = Callable[[str, Any], bool] | Sequence[str] | str | None


@dataclass(frozen=True)
class StagingOptions:
    """What the arguments of `prefetch_to_device` say of leaves and rows; their meaning is told there."""

    keep_on_host: KeepOnHost = None
    last_batch: Mode = "error"
    mask_key: Hashable = "mask"
    batch_axis: int = 0
    fresh_buffers: bool | None = None
    fresh_tensors: bool = False  # each batch has pinned tensors of its own
    pads_past_end: bool = False  # batches of padding may have to follow the source's end

    @property
    def names(self) -> tuple[str, ...]:
        """Those that `keep_on_host` gives."""
        keep = self.keep_on_host or ()
        return () if callable(keep) else (keep,) if isinstance(keep, str) else tuple(keep)


@dataclass(frozen=True, eq=False)
class Structure:
    """What is so for every batch of one tree structure; each of these equals itself only."""

    treedef: Any
    paths: tuple[str, ...]
    targets: tuple[Target, ...]
    named: tuple[bool, ...]  # by keep_on_host, as far as that gives names
    first_rows: list[tuple[int, set[int]]] = field(default_factory=list)  # of the first batch, and the leaves with them


class Parts(NamedTuple):
    """A batch taken apart: the tree, how such trees are staged, which leaves stay on the host, the leaves."""

    batch: Any
    structure: Structure
    kept: tuple[bool, ...]
    leaves: Sequence[Any]


class Staged(NamedTuple):
    """A batch from which can be sent: its leaves are in host memory of their own, or arrays on devices already."""

    leaves: list[Any]
    plan: Plan
    slot: Slot | Fresh


class Layout:
    """What is so for every batch of one structure with the same shapes, dtypes and leaves kept on the host.

    Attributes:
        shards: into how many parts this process's rows are split.
    """

    def __init__(self, parts: Parts, options: StagingOptions, number: int):
        structure, leaves = parts.structure, parts.leaves
        self._paths, self._targets, self._kept, self._options = structure.paths, structure.targets, parts.kept, options
        self._treedef, self._order = structure.treedef, tuple(range(len(leaves)))
        self._rows_leaf = self._find_rows(leaves, number, known=bool(structure.first_rows))
        self._row_leaves = self._find_row_leaves(leaves, number, structure.first_rows)
        self._plan: tuple[int | None, Plan] | None = None  # the last one, with its rows: a pass has one number of them
        self.shards = 1
        if self._rows_leaf is not None:
            ndim = np.ndim(leaves[self._rows_leaf])
            self.shards = self._targets[self._rows_leaf].local_shards(ndim)[options.batch_axis]
            if options.last_batch == "pad":
                self._treedef, self._order = _with_mask(parts.batch, structure.treedef, options.mask_key, number)

    def rows(self, leaves: Sequence[Any]) -> int | None:
        """The batch's rows; None when no leaf tells."""
        return None if self._rows_leaf is None else leaves[self._rows_leaf].shape[self._options.batch_axis]

    def length(self, leaves: Sequence[Any]) -> int | None:
        """How far the batch goes along axis 0, where sources write; None when no leaf has that axis."""
        if self._rows_leaf is not None and not self._options.batch_axis:
            return len(leaves[self._rows_leaf])
        return next((len(leaf) for leaf in leaves if np.ndim(leaf)), None)

    def plan(
        self, leaves: Sequence[Any], deliver: int | None, number: int, context: Context
    ) -> tuple[Plan, tuple[int, ...]]:
        """The plan to deliver so many rows, and where each of its leaves is in the batch (one past the last: mask)."""
        if self._plan is None or self._plan[0] != deliver:
            self._plan = deliver, self._make_plan(leaves, deliver, number, context)
        return self._plan[1], self._order

    def _lengths(self, leaves: Sequence[Any]) -> dict[int, int]:
        """How long leaves are along the batch axis, of those that have it and go to devices."""
        axis = self._options.batch_axis
        return {i: leaf.shape[axis] for i, leaf in enumerate(leaves) if not self._kept[i] and np.ndim(leaf) > axis}

    def _find_rows(self, leaves: Sequence[Any], number: int, *, known: bool) -> int | None:
        """The first leaf whose sharding splits the batch axis; to drop or pad, else the first that has the axis.

        Raises:
            ValueError: to drop or pad, where no sharding tells which of several lengths is that of the rows.
        """
        axis, mode, lengths = self._options.batch_axis, self._options.last_batch, self._lengths(leaves)
        split = [i for i in lengths if self._targets[i].mesh_axes(axis)]
        if split or mode == "error" or not lengths:
            return split[0] if split else None
        if not known and len(set(lengths.values())) > 1:
            told = some([f"{self._paths[i]} has {n}" for i, n in lengths.items()])
            raise ValueError(
                f"Batch {number}: last_batch={mode!r} goes by the rows, but along axis {axis} {told}. Say which leaves "
                "have rows: sharding={...}, a tree with NamedSharding(mesh, PartitionSpec('data')) for these and "
                "PartitionSpec() for others; a mesh of one device will do. Or leave the others out."
            )
        return next(iter(lengths))

    def _find_row_leaves(self, leaves: Sequence[Any], number: int, first: list[tuple[int, set[int]]]) -> set[int]:
        """Those as long as the batch; one that was not in the first batch of its structure is so by chance.

        Raises:
            ValueError: to drop or pad, one that was so is neither as long as this batch nor as it was.
        """
        rows, lengths = self.rows(leaves), self._lengths(leaves)
        found = {i for i, n in lengths.items() if n == rows}
        if not first:
            first.append((rows or 0, found))
        before, were = first[0]
        odd = [i for i in sorted(were - found) if lengths.get(i) not in (None, before)]
        if odd and self._options.last_batch != "error":
            raise ValueError(
                f"Batch {number}, leaf {self._paths[odd[0]]}: {lengths[odd[0]]} rows where leaf "
                f"{self._paths[self._rows_leaf or 0]} has {rows}; before both had {before}. Give all leaves of a batch "
                "that have rows the same number."
            )
        return found & were

    def _make_plan(self, leaves: Sequence[Any], deliver: int | None, number: int, context: Context) -> Plan:
        axis, rows = self._options.batch_axis, self.rows(leaves)
        made = [
            (self._paths[i], *self._delivered(i, leaf, rows, deliver, number)) for i, leaf in enumerate(leaves)
        ]  # path, target, stand-in
        if self._options.last_batch == "pad" and self._rows_leaf is not None and deliver is not None:
            mask_target = self._targets[self._rows_leaf].axis(axis)
            made.append((str(self._options.mask_key), mask_target, np.empty(deliver, bool)))
        leaf_plans = [
            plan_leaf(
                *made[i], number=number, batch_axis=axis, x64=context.x64, rows=None if i in self._row_leaves else rows
            )
            for i in self._order
        ]
        return Plan.of(self._treedef, leaf_plans, context)

    def _delivered(
        self, i: int, leaf: Any, rows: int | None, deliver: int | None, number: int
    ) -> tuple[Target | None, Any]:
        """Where a leaf goes, and something with the shape in which it is delivered."""
        if self._kept[i]:
            return None, leaf
        axis, target = self._options.batch_axis, self._targets[i]
        if deliver is None or rows == deliver or i not in self._row_leaves:
            return target, leaf
        if isinstance(leaf, jax.Array):
            if is_key(leaf):
                fetch(leaf, f"Batch {number}, leaf {self._paths[i]}")  # refuses
            if not target.committed:
                target = Target(leaf.sharding, leaf.committed)  # where the whole batches of this source are
        shape = (*leaf.shape[:axis], deliver, *leaf.shape[axis + 1 :])
        return target, np.broadcast_to(np.empty((), leaf.dtype), shape)


def signatures(leaves: Iterable[Any]) -> list[Any]:
    """What batches have in common whose leaves travel in the same way."""
    return [(leaf.shape, leaf.dtype) if type(leaf) is np.ndarray else _signature(leaf) for leaf in leaves]


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding, leaf.committed, getattr(leaf, "weak_type", False)  # not of keys
    return type(leaf)


def named(paths: Sequence[str], names: Sequence[str]) -> tuple[bool, ...]:
    """Which leaves have one of the names, or are in a subtree of that name."""
    return tuple(any(_is_under(path, name) for name in names) for path in paths)


def _is_under(path: str, name: str) -> bool:
    return path == name or path.startswith(name + "/")


def check_first(batch: Any, names: Sequence[str], number: int) -> None:
    """What is looked at in the first batch only: that each name of `keep_on_host` is that of a leaf, and lists.

    Raises:
        ValueError: there is no such leaf; tells those that there are.
    """
    warn_of_lists(batch, number, lambda path: any(_is_under(path, name) for name in names))
    paths = leaf_paths(batch, with_none=True)
    for name in names:
        if not any(_is_under(path, name) for path in paths):
            some = ", ".join(paths[:10]) + (f" and {len(paths) - 10} more" if len(paths) > 10 else "")
            raise ValueError(f"Batch {number}: keep_on_host names {name!r}, but no leaf is called so. Leaves: {some}.")


_DICTS = dict, collections.OrderedDict, collections.defaultdict
"""What JAX itself flattens by key; their subclasses are nodes of somebody else's, who says what belongs into them."""


def _with_mask(batch: Any, treedef: Any, key: Hashable, number: int) -> tuple[Any, tuple[int, ...]]:
    """The structure with a mask beside the batch, and which leaf goes where in it (one past the last: the mask).

    Only dicts are made anew, for other nodes may refuse anything but real leaves.
    """
    n = treedef.num_leaves
    if type(batch) not in _DICTS:
        return jax.tree_util.treedef_tuple((treedef, jax.tree_util.tree_structure(0))), tuple(range(n + 1))
    if key in batch:
        raise ValueError(
            f"Batch {number}: padding adds the mask as {key!r}, but the batch has that key already. "
            "Pass another mask_key."
        )
    mask, padded = object(), batch.copy()
    padded[key] = mask
    try:
        leaves, treedef = jax.tree_util.tree_flatten(padded)
    except ValueError:  # the keys alone could be sorted
        keys = ", ".join(map(repr, list(batch)[:10]))
        raise ValueError(
            f"Batch {number}: padding adds the mask as {key!r}, which cannot be sorted among the batch's keys "
            f"{keys}. Pass a mask_key of their type."
        ) from None
    at = next(i for i, leaf in enumerate(leaves) if leaf is mask)
    return treedef, (*range(at), n, *range(at, n))
