"""From what the source yields to what a put takes: leaves that nobody else can change, and the plan for them.

Synopsis:

    stager = Stager(Placement(sharding), StagingOptions())
    stager.begin_pass()
    staged = stager.stage(batch, 0, reserve)   # on the reader's thread
    arrays = staged.plan.put(staged.leaves)    # on the consumer's thread
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxprefetch.device.pinning import Pinning
from jaxprefetch.device.placement import Placement, Target
from jaxprefetch.device.plan import LeafPlan, Plan
from jaxprefetch.errors import add_note
from jaxprefetch.host.batching import LastBatch
from jaxprefetch.host.leaves import (
    Separate,
    as_host,
    check_range,
    copy_kept,
    fetch,
    is_number,
    leaf_paths,
    memory_of,
    padded,
    plain,
    zero_beyond,
)
from jaxprefetch.host.slots import Fresh, FreshMemory, Slot, Slots
from jaxprefetch.layout import Layout, StagingOptions, Structure
from jaxprefetch.recent import Recent

logger = logging.getLogger("jaxprefetch")


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch from which can be sent: its leaves are in host memory of their own, or arrays on devices already."""

    leaves: list[Any]
    plan: Plan
    slot: Slot | Fresh


def stager(placement: Placement, options: StagingOptions, max_host_bytes: int | None) -> Stager:
    """A stager with the host memory that its devices are best fed from."""
    if any(device.platform == "cpu" for device in placement.devices):  # what was put is read there for good
        return Stager(placement, options)
    pinning = Pinning.of(placement.devices)
    if pinning is None:
        return Stager(placement, options, Slots(max_bytes=max_host_bytes))
    slots = Slots(register=pinning.register, max_bytes=max_host_bytes)
    return Stager(placement, options, slots, pinning.is_sent_directly)


class Stager:
    """Stages batches in order. Used by one thread at a time.

    Args:
        placement: where leaves go.
        options: how.
        memory: gives the host memory from which they are sent.
        sent_directly: whether an array that nobody writes to again is best sent from where it lies.
    """

    def __init__(
        self,
        placement: Placement,
        options: StagingOptions,
        memory: Slots | FreshMemory | None = None,
        sent_directly: Callable[[np.ndarray], bool] = lambda leaf: True,
    ):
        self._memory = memory or FreshMemory()
        self._copier = self._memory.copier
        self._sent_directly = sent_directly
        self._placement = placement
        self._options = options
        names = options.keep_on_host or ()
        self._names = () if callable(names) else (names,) if isinstance(names, str) else tuple(names)
        self._policy = LastBatch(options.last_batch)
        self._structures: Recent[Any, Structure] = Recent()  # by treedef
        self._layouts: Recent[Any, Layout] = Recent()  # by structure, leaves kept, shapes and dtypes
        self._said_shapes = False
        self._first: Plan | None = None  # of the first batch, set by the thread that stages

    @property
    def element_spec(self) -> Any:
        """Of the first batch; None before it."""
        return None if self._first is None else self._first.element_spec

    def close(self) -> None:
        """Gives up the host memory that is free; the rest goes when its batches do."""
        self._memory.clear()

    def begin_pass(self) -> None:
        """Batch numbers and the rows to compare with start again."""
        self._policy = LastBatch(self._options.last_batch)

    def stage(self, raw: Any, number: int, reserve: Callable[[int], None]) -> Staged | None:
        """One batch ready to be put; None for a short last batch that is left out.

        Blocking: in `reserve`, which is told how many bytes of host memory the batch takes.

        Raises:
            TypeError, ValueError, OverflowError: the batch cannot go where it should; names the batch and the leaf.
            Exception: what a leaf, a node or the predicate of `keep_on_host` raises, with the batch in a note.
        """
        try:
            return self._stage(raw, number, reserve)
        except Exception as error:
            add_note(error, f"jaxprefetch: raised while batch {number} was staged", unless=f"Batch {number}")
            raise

    def _stage(self, raw: Any, number: int, reserve: Callable[[int], None]) -> Staged | None:
        leaves, treedef = jax.tree_util.tree_flatten(raw)
        if any(type(leaf) is not np.ndarray and isinstance(leaf, Mapping) for leaf in leaves):
            raw = plain(raw)
            leaves, treedef = jax.tree_util.tree_flatten(raw)
        structure = self._structures.get(treedef, lambda: self._new_structure(raw, treedef, number))
        kept = self._kept(structure, leaves)
        leaves = [
            leaf if keep or type(leaf) is np.ndarray else self._on_host(leaf, target, f"Batch {number}, leaf {path}")
            for leaf, keep, target, path in zip(leaves, kept, structure.targets, structure.paths, strict=True)
        ]
        key = structure, kept, [_signature(leaf) for leaf, keep in zip(leaves, kept, strict=True) if not keep]
        layout = self._layouts.get(key, lambda: Layout(structure, kept, raw, leaves, self._options, number))
        rows = deliver = layout.rows(leaves)
        if rows is not None:
            deliver = self._policy.admit(number, rows, layout.shards)
            if deliver is None:
                return None
        plan, order = layout.plan(leaves, deliver=deliver, number=number, context=self._placement.context)
        self._compare_with_first(plan, number)
        reserve(plan.host_bytes)
        return self._own(plan, order, leaves, rows, number)

    # ---- what is cached

    def _new_structure(self, raw: Any, treedef: Any, number: int) -> Structure:
        if self._first is None:
            _check_names(self._names, leaf_paths(raw, with_none=True), number)
        paths = leaf_paths(raw)
        named = tuple(any(_is_under(path, name) for name in self._names) for path in paths)
        return Structure(treedef, paths, tuple(self._placement.targets(raw, number)), named)

    # ---- each batch

    def _kept(self, structure: Structure, leaves: list[Any]) -> tuple[bool, ...]:
        keep = self._options.keep_on_host
        if callable(keep):
            return tuple(bool(keep(path, leaf)) for path, leaf in zip(structure.paths, leaves, strict=True))
        return structure.named

    def _on_host(self, leaf: Any, target: Target, where: str) -> Any:
        leaf = as_host(leaf, where)
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and not target.is_local:
            return fetch(leaf, where)  # this process's rows of a global array
        return leaf

    def _compare_with_first(self, plan: Plan, number: int) -> None:
        if self._first is None:
            self._first = plan
        if plan is self._first or self._said_shapes or (difference := plan.difference(self._first)) is None:
            return
        self._said_shapes = True
        hint = ""
        if self._options.last_batch == "error":
            hint = " last_batch='drop' or 'pad' gives a short last batch the shape of the others."
        logger.warning(
            "jaxprefetch: batch %d has other shapes, dtypes or keys than batch 0, and a step is compiled anew for each "
            "(%s).%s",
            number,
            difference,
            hint,
        )

    def _own(self, plan: Plan, order: tuple[int, ...], leaves: list[Any], rows: Any, number: int) -> Staged:
        """Host memory of our own for every leaf that needs it."""
        out: list[Any] = []
        copied: list[int] = []
        separate = Separate()
        for i, (at, leaf_plan) in enumerate(zip(order, plan.leaves, strict=True)):
            leaf = leaves[at] if at < len(leaves) else np.arange(leaf_plan.shape[0]) < rows
            if leaf_plan.target is None:
                leaf = self._kept_leaf(leaf, separate)
            elif leaf_plan.made:
                leaf = self._checked(leaf, leaf_plan, number)
                alone = i in plan.offsets
                if not (is_number(leaf) or (alone and self._goes_as_it_is(leaf, leaf_plan, separate))):
                    copied.append(i)
            out.append(leaf)
        slot = self._memory.take(plan.host_bytes) if copied else Fresh()
        try:
            self._copy(plan, out, copied, slot)
        except BaseException:
            slot.free()
            raise
        return Staged(out, plan, slot)

    def _copy(self, plan: Plan, leaves: list[Any], which: Sequence[int], slot: Slot | Fresh) -> None:
        pairs = []
        for i in which:
            if i in plan.offsets:
                leaf, leaf_plan = leaves[i], plan.leaves[i]
                leaves[i] = slot.view(plan.offsets[i], leaf_plan.dtype, leaf_plan.shape)
                pairs.append((zero_beyond(leaves[i], leaf.shape), leaf))
        if (packing := plan.packing) is not None:
            buffer = slot.view(plan.offsets[len(leaves)], np.dtype(np.uint8), packing.shape)
            for position, part in enumerate(packing.parts):
                leaf = padded(leaves[part.leaf], plan.leaves[part.leaf].shape)
                pairs.append(packing.pair(buffer, position, leaf))
                leaves[part.leaf] = None
            leaves.append(buffer)
        self._copier.copy(pairs)

    def _kept_leaf(self, leaf: Any, separate: Separate) -> Any:
        if self._options.fresh_buffers and ((memory := memory_of(leaf)) is None or separate.claims(memory)):
            return leaf
        return copy_kept(leaf)

    def _checked(self, leaf: Any, plan: LeafPlan, number: int) -> Any:
        """The leaf as an array or a number, whose values fit where they go."""
        if type(leaf) is np.ndarray and leaf.dtype == plan.dtype:
            return leaf
        where = f"Batch {number}, leaf {plan.path}"
        leaf = fetch(leaf, where) if isinstance(leaf, jax.Array) else leaf
        check_range(leaf, plan.dtype, where)
        return leaf

    def _goes_as_it_is(self, leaf: np.ndarray, plan: LeafPlan, separate: Separate) -> bool:
        """Whether a leaf that nobody writes to again is sent from where it lies: a copy would not be quicker."""
        return (
            bool(self._options.fresh_buffers)
            and leaf.dtype == plan.dtype
            and leaf.shape == plan.shape
            and self._sent_directly(leaf)
            and separate.claims(leaf)
        )


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding
    return type(leaf)


def _is_under(path: str, name: str) -> bool:
    return path == name or path.startswith(name + "/")


def _check_names(names: Sequence[str], paths: Sequence[str], number: int) -> None:
    for name in names:
        if not any(_is_under(path, name) for path in paths):
            some = ", ".join(paths[:10]) + (f" and {len(paths) - 10} more" if len(paths) > 10 else "")
            raise ValueError(f"Batch {number}: keep_on_host names {name!r}, but no leaf is called so. Leaves: {some}.")
        """Copies leaves to where they are sent from; those that travel packed leave a buffer at the end instead."""
