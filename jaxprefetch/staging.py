"""From what the source yields to what a put takes: leaves that nobody else can change, and the plan for them.

Synopsis:

    stager = Stager(Placement(sharding), StagingOptions())
    staged = stager.stage(batch, 0, reserve)   # on the reader's thread
    arrays = staged.plan.put(staged.leaves)    # on the consumer's thread
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxprefetch.device.pinning import Pinning
from jaxprefetch.device.placement import Placement, Target
from jaxprefetch.device.plan import Plan
from jaxprefetch.errors import Noted, add_note
from jaxprefetch.fillers import Fillers
from jaxprefetch.host.batching import LastBatch
from jaxprefetch.host.leaves import (
    as_host,
    fetch,
    is_closed,
    leaf_paths,
    plain,
)
from jaxprefetch.host.pipeline import Reserve
from jaxprefetch.host.slots import Fresh, FreshMemory, Slot, Slots
from jaxprefetch.layout import Layout, Parts, Staged, StagingOptions, Structure, check_first, named, signatures
from jaxprefetch.offer import Beside, Described, Offer, stand_in
from jaxprefetch.recent import Recent
from jaxprefetch.shapes import Shapes
from jaxprefetch.sorting import Sorting, checked, in_order
from jaxprefetch.stowage import Stowage

FEW_BYTES = 1 << 20
"""So many are sent as quickly from memory that the driver does not know."""


def stager(
    placement: Placement, options: StagingOptions, max_host_bytes: int | None, shapes: Shapes | None = None
) -> Stager:
    """A stager with the host memory that its devices are best fed from."""
    make = functools.partial(Stager, placement, options, shapes=shapes)
    if any(device.platform == "cpu" for device in placement.devices):  # what was put is read there for good
        return make()
    pinning = Pinning.of(placement.devices)
    if pinning is None:
        return make(Slots(max_bytes=max_host_bytes))
    return make(Slots(register=pinning.register, max_bytes=max_host_bytes), pinning.is_sent_directly)


class Stager:
    """Stages batches in order. Used by one thread at a time.

    Args:
        placement: where leaves go.
        options: how.
        memory: gives the host memory from which they are sent.
        sent_directly: whether an array that nobody writes to again is best sent from where it lies.
        shapes: compares each batch with the first; None: as `last_batch` has it.
    """

    def __init__(
        self,
        placement: Placement,
        options: StagingOptions,
        memory: Slots | FreshMemory | None = None,
        sent_directly: Callable[[np.ndarray], bool] = lambda leaf: True,
        *,
        shapes: Shapes | None = None,
    ):
        self._memory = memory or FreshMemory()
        self._copier = self._memory.copier
        self._sorting = Sorting(bool(options.fresh_buffers), sent_directly, fresh_tensors=options.fresh_tensors)
        self._placement = placement
        self._options = options
        self._policy = LastBatch(options.last_batch)
        self._structures: Recent[Any, Structure] = Recent()  # by treedef
        self._layouts: Recent[Any, Layout] = Recent()  # by structure, leaves kept, shapes and dtypes
        self._described: Described | None = None  # what a source has described last
        self._beside = Beside()
        self._shapes = shapes or Shapes(options.last_batch, options.batch_axis)
        self._fillers = Fillers() if options.pads_past_end else None

    @property
    def element_spec(self) -> Any:
        """Of the first batch; None before it."""
        return None if self._shapes.first is None else self._shapes.first.element_spec

    def close(self) -> None:
        """Gives up the host memory that is free; the rest goes when its batches do."""
        self._memory.clear()
        self._beside.clear()

    @property
    def rows(self) -> int | None:
        """Of batch 0 of this pass; None before it, or where batches have none."""
        return self._policy.rows

    def begin_pass(self, rows: int | None = None) -> None:
        """Batch numbers start again, and the rows to compare with, unless they are those of a batch 0 taken before."""
        self._policy = LastBatch(self._options.last_batch, rows)

    def offer(self, spec: Any, number: int, reserve: Reserve) -> Offer:
        """Host memory that the source can write a batch into, which it describes by shapes and dtypes.

        Blocking: in `reserve`, which is told how many bytes of host memory the batch takes.

        Raises:
            TypeError, ValueError: `spec` is no such description, or such a batch cannot go where it should.
        """
        with Noted(f"jaxprefetch: raised while batch {number} was staged", unless="Batch "):
            return self._offer(spec, number, reserve)

    def stage(self, raw: Any, number: int, reserve: Reserve) -> Staged | None:
        """One batch ready to be put, or an offer that has been written; None for a short last one that is left out.

        Blocking: in `reserve`, which is told how many bytes of host memory the batch takes.

        Raises:
            TypeError, ValueError, OverflowError: the batch cannot go where it should; names the batch and the leaf.
            Exception: what a leaf, a node or the predicate of `keep_on_host` raises, with the batch in a note.
        """
        try:  # here, once a batch, `Noted` would take longer than it should
            return self._stage(raw, number, reserve)
        except Exception as error:
            add_note(error, f"jaxprefetch: raised while batch {number} was staged", unless="Batch ")
            raise

    def filler(self, number: int) -> Staged | None:
        """A batch like the last one, all of it padding."""
        return None if self._fillers is None else self.stage(self._fillers.batch(), number, lambda nbytes: None)

    def _offer(self, spec: Any, number: int, reserve: Reserve) -> Offer:
        leaves, treedef = jax.tree_util.tree_flatten(spec)
        if self._described is None or not self._described.is_of(leaves, treedef):
            self._described = self._describe(spec, number)
        described = self._described
        room = described.rows
        if room is not None:
            room = self._policy.room(room, described.layout.shards)
            if room is None:  # all that can be done with what is written is to leave it out
                return Offer(number, described, None, (), Fresh(), self._beside)
        plan, order = described.layout.plan(described.whole.leaves, room, number, self._placement.context)
        reserve(plan.host_bytes)
        return Offer(number, described, plan, order, self._memory.take(plan.host_bytes), self._beside)

    def _describe(self, spec: Any, number: int) -> Described:
        spec = plain(spec)
        described, treedef = jax.tree_util.tree_flatten(spec)
        structure = self._structure(spec, treedef, number)
        where = f"Batch {number}, leaf"
        leaves = [stand_in(leaf, f"{where} {path}") for leaf, path in zip(described, structure.paths, strict=True)]
        whole = Parts(spec, structure, self._kept(structure, leaves), leaves)
        layout = self._layout(whole, number)
        if (length := layout.length(leaves)) is None:
            raise ValueError(f"Batch {number}: element_spec has no leaf with an axis of rows. Describe whole batches.")
        repeats = not callable(self._options.keep_on_host)  # which may decide otherwise each time
        return Described(described if repeats else None, whole, layout, length, layout.rows(leaves))

    def _stage(self, raw: Any, number: int, reserve: Reserve) -> Staged | None:
        offer = raw if isinstance(raw, Offer) else None
        parts = self._apart(raw, number) if offer is None else offer.parts()
        layout = (offer and offer.layout) or self._layout(parts, number)
        rows = deliver = layout.rows(parts.leaves)
        if rows is not None:
            deliver = self._policy.admit(number, rows, layout.shards)
            if deliver is None:
                if offer is not None and offer.plan is not None:
                    reserve(-offer.plan.host_bytes)
                return None
            if self._fillers is not None:
                self._fillers.note(parts, rows, self._options.batch_axis)
        plan, order = layout.plan(parts.leaves, deliver, number, self._placement.context)
        if plan is not self._shapes.first:
            self._shapes.compare(plan, number)
        if offer is not None and (parcels := offer.parcels(plan, self._copier)) is not None:
            return Staged(parcels, plan, offer.slot)
        leaves = in_order(plan, order, parts.leaves, rows)
        if offer is None or offer.plan is None:
            reserve(plan.host_bytes)
            return self._own(plan, leaves, number)
        reserve(-offer.plan.host_bytes)  # a batch must not wait for what it has itself
        reserve(plan.host_bytes)
        return self._in_place(offer, plan, leaves, number)

    def _apart(self, raw: Any, number: int) -> Parts:
        leaves, treedef = jax.tree_util.tree_flatten(raw)
        plain_arrays = set(map(type, leaves)) == {np.ndarray}
        if not plain_arrays and any(is_closed(leaf) for leaf in leaves):
            raw = plain(raw)
            leaves, treedef = jax.tree_util.tree_flatten(raw)
        structure = self._structure(raw, treedef, number)
        kept = self._kept(structure, leaves)
        if not plain_arrays:
            leaves = [
                leaf
                if keep or type(leaf) is np.ndarray
                else self._on_host(leaf, target, f"Batch {number}, leaf {path}")
                for leaf, keep, target, path in zip(leaves, kept, structure.targets, structure.paths, strict=True)
            ]
        return Parts(raw, structure, kept, leaves)

    # ---- what is cached

    def _structure(self, raw: Any, treedef: Any, number: int) -> Structure:
        return self._structures.get(treedef, lambda: self._new_structure(raw, treedef, number))

    def _new_structure(self, raw: Any, treedef: Any, number: int) -> Structure:
        if self._shapes.first is None:
            check_first(raw, self._options.names, number)
        paths = leaf_paths(raw)
        return Structure(
            treedef, paths, tuple(self._placement.targets(raw, f"Batch {number}")), named(paths, self._options.names)
        )

    def _layout(self, parts: Parts, number: int) -> Layout:
        leaves = parts.leaves
        if True in parts.kept:
            leaves = [leaf for leaf, keep in zip(leaves, parts.kept, strict=True) if not keep]
        key = parts.structure, parts.kept, signatures(leaves)
        return self._layouts.get(key, lambda: Layout(parts, self._options, number))

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

    def _in_place(self, offer: Offer, plan: Plan, leaves: list[Any], number: int) -> Staged:
        """What the source has written, sent from where it lies; what cannot be is copied."""
        as_offered = offer.is_laid_out_for(plan)
        out: list[Any] = []
        copied: list[int] = []
        for i, (leaf, leaf_plan) in enumerate(zip(leaves, plan.leaves, strict=True)):
            placed = offer.in_place(i, leaf, leaf_plan.shape) if as_offered or i in plan.offsets else None
            if leaf_plan.made and placed is None:
                leaf = checked(leaf, leaf_plan, number)
                copied.append(i)
            out.append(leaf if placed is None else placed)
        stowage = offer.stowage if plan is offer.plan else None
        parcels = self._copied(plan, out, copied, offer.slot if as_offered else Fresh(), stowage)
        return Staged(parcels, plan, offer.slot)

    def _own(self, plan: Plan, leaves: list[Any], number: int) -> Staged:
        """Host memory of our own for every leaf that needs it."""
        leaves, copied = self._sorting.sort(plan, leaves, number)
        slot = self._take(plan, copied) if copied else Fresh()
        try:
            return Staged(self._copied(plan, leaves, copied, slot), plan, slot)
        except Exception:  # after a Ctrl-C a copying thread may still write there: it goes when that has ended
            slot.free()
            raise

    def _take(self, plan: Plan, copied: Sequence[int]) -> Slot | Fresh:
        """Memory to copy these leaves into: a slot, but not for few bytes beside many that are sent as they are.

        For the labels of images that a loader has pinned it would be another batch of pinned memory.
        """
        if len(copied) < len(plan.leaves):
            nbytes = sum([plan.leaves[i].nbytes for i in copied])
            if nbytes <= FEW_BYTES <= plan.host_bytes - nbytes:
                return Fresh()
        return self._memory.take(plan.host_bytes)

    def _copied(
        self,
        plan: Plan,
        leaves: list[Any],
        which: Sequence[int],
        slot: Slot | Fresh,
        stowage: Stowage | None = None,
    ) -> list[Any]:
        """What to put, once these leaves are where they are sent from."""
        if not (which or plan.packing):
            return leaves
        stowage = stowage or slot.once(plan, Stowage)
        self._copier.copy(stowage.pairs(leaves, which))
        return stowage.parcels(leaves, which)
