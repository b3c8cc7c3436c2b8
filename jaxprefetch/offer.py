"""Host memory for a batch that its source writes itself, laid out so that the batch is sent from where it lies.

Synopsis:

    offer = stager.offer(source.element_spec, 0, reserve)
    offer.rows.append(source.read_into(offer.out))
    staged = stager.stage(offer, 0, reserve)

What cannot be written where it is sent from (its dtype differs, it lies in pieces there, padding would tear it apart)
is written beside it, into memory that serves one batch after the other. What stays on the host has an array of its own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxprefetch.device.plan import LeafPlan, Plan, laid_out
from jaxprefetch.host.copying import Copier
from jaxprefetch.host.leaves import zero_beyond
from jaxprefetch.host.slots import Fresh, Slot, array_in
from jaxprefetch.layout import Layout, Parts
from jaxprefetch.sorting import checked, in_order
from jaxprefetch.stowage import Stowage


class Described(NamedTuple):
    """A whole batch as its source describes it; leaves stand for their shapes and dtypes."""

    spec: list[Any] | None  # the leaves of what it gave; None: to be looked at each time
    whole: Parts
    layout: Layout
    length: int  # along the axis by which it is written
    rows: int | None  # by which it is split

    def is_of(self, leaves: list[Any], treedef: Any) -> bool:
        """Whether the source gave the same again, in objects that do not change."""
        return (
            set(map(type, leaves)) == {jax.ShapeDtypeStruct}
            and leaves == self.spec
            and treedef == self.whole.structure.treedef
        )


class Beside:
    """Memory beside the slots: sources write there what is copied before the next batch is written."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def arrays(self, leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Arrays like these, one after another, in the same memory each time; it grows as far as it has to."""
        starts, end = laid_out({i: leaf.nbytes for i, leaf in enumerate(leaves)})
        if end > len(self._memory):
            self._memory = Fresh().view(0, self._memory.dtype, (end,))
        return [array_in(self._memory, starts[i], leaf.dtype, leaf.shape) for i, leaf in enumerate(leaves)]

    def clear(self) -> None:
        """Gives it up; it goes with the arrays in it."""
        self._memory = np.empty(0, np.uint8)


class Places(NamedTuple):
    """Arrays for the leaves of a batch.

    Attributes:
        some: in the slot, with room for padding, by leaf of the plan: what is sent as it is written.
        written: where these begin, or beside the slot, by leaf of the batch.
        copied: from there into the slot, once all is written; None: then more has to be done.
        cast: of these, what has to fit into another dtype.
    """

    some: dict[int, np.ndarray]
    written: dict[int, np.ndarray]
    copied: list[tuple[np.ndarray, np.ndarray]] | None
    cast: list[tuple[np.ndarray, LeafPlan]]


class Offer:
    """Memory for one batch.

    Args:
        number: of the batch.
        described: by the source.
        plan: of the whole batch, by which the slot is laid out; None: there is no slot.
        order: which leaf of the batch each leaf of the plan is.
        slot: where the batch is sent from.
        beside: for what cannot be written there.

    Attributes:
        out: the tree of arrays that the source writes into.
        stowage: where leaves of the plan lie in the slot.
        rows: what `read_into` has returned, once it has: a list, for an interrupt cannot tear its `extend` apart.
    """

    def __init__(
        self,
        number: int,
        described: Described,
        plan: Plan | None,
        order: Sequence[int],
        slot: Slot | Fresh,
        beside: Beside,
    ):
        self.plan, self.slot = plan, slot
        self.rows: list[Any] = []
        self._number, self._described = number, described
        self.stowage: Stowage | None = None
        self._places = Places({}, {}, None, [])
        if plan is not None:
            stowage = self.stowage = slot.once(plan, Stowage)
            self._places = stowage.once(described, lambda: _places(described, plan, order, stowage, beside))
        written = self._places.written
        self._written = [
            written[at] if at in written else np.empty(leaf.shape, leaf.dtype)
            for at, leaf in enumerate(described.whole.leaves)
        ]
        self._given = [array.view() for array in self._written]  # a source may set shape, dtype or flags of these
        self.out = jax.tree_util.tree_unflatten(described.whole.structure.treedef, self._given)

    @property
    def layout(self) -> Layout | None:
        """Of what was written, if that is the whole batch as it was described."""
        return self._described.layout if self._count == self._described.length else None

    @property
    def ended(self) -> bool:
        """Whether the source has written nothing, which is its end, or raised StopIteration, which `map` ends with.

        Raises:
            TypeError, ValueError: what it returned is no number of rows that it can have written.
        """
        return not self.rows or self._count == 0

    def parts(self) -> Parts:
        """What was written: the leaves that are as long as the batch as far as the source has come, others whole."""
        rows, length, leaves = self._count, self._described.length, self._written
        self._check_written()
        if rows < length:
            leaves = [leaf[:rows] if leaf.ndim and len(leaf) == length else leaf for leaf in leaves]
        return self._described.whole._replace(leaves=leaves)

    def parcels(self, plan: Plan, copier: Copier) -> list[Any] | None:
        """What to put, if the source has written all that this plan sends; else None.

        Blocking: until what was written beside the slot is copied there.

        Raises:
            OverflowError: a value does not fit where it goes.
        """
        stowage, places = self.stowage, self._places
        if stowage is None or places.copied is None or plan is not self.plan:
            return None
        for array, leaf_plan in places.cast:
            checked(array, leaf_plan, self._number)
        if places.copied:
            copier.copy(places.copied)
        return stowage.all_parcels()

    def is_laid_out_for(self, plan: Plan) -> bool:
        """Whether leaves of this plan have their places in the slot; else these may overlap with what was written."""
        offered = self.plan
        if offered is None or plan is offered or isinstance(self.slot, Fresh):
            return plan is offered
        return (plan.offsets, plan.packing) == (offered.offsets, offered.packing)

    def in_place(self, i: int, leaf: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
        """What to send for a leaf of a plan that lies in the slot, zero beyond its rows; None: it has to be copied."""
        part = _begin(self._places.some.get(i), shape)
        if part is not None:
            zero_beyond(part, leaf.shape)
        return part

    def free(self) -> None:
        """The batch will not be sent."""
        self.slot.free()

    def _check_written(self) -> None:
        """Whether `out` is still what the source was given: what it has put in its place was not written."""
        leaves = jax.tree_util.tree_leaves(self.out)
        if len(leaves) == len(self._given) and all(map(operator.is_, leaves, self._given)):
            return
        paths, own = self._described.whole.structure.paths, {id(leaf) for leaf in self._given}
        others = [path for path, leaf in zip(paths, leaves, strict=False) if id(leaf) not in own]
        what = f", leaf {others[0]}" if others else ""
        raise ValueError(
            f"Batch {self._number}{what}: read_into has put something else into out, which is not sent. Write into the "
            "arrays that are there: out[name][:rows] = values."
        )

    @functools.cached_property
    def _count(self) -> int:
        length = self._described.length
        where = f"Batch {self._number}: read_into"
        try:
            if isinstance(self.rows[0], (bool, np.bool_)):
                raise TypeError
            rows = operator.index(self.rows[0])
        except TypeError:
            raise TypeError(
                f"{where} returned {self.rows[0]!r}, no number of rows. Return how many it has written: up to the "
                f"{length} of element_spec, fewer for a short batch, 0 at the end."
            ) from None
        if not 0 <= rows <= length:
            raise ValueError(
                f"{where} returned {rows} rows, but element_spec has {length}, which is what there was room for. "
                "Return how many it has written, fewer for a short batch, 0 at the end."
            )
        return rows


def stand_in(spec: Any, where: str) -> np.ndarray:
    """An array of this shape and dtype that takes no memory.

    Raises:
        TypeError: the source's `element_spec` has something else there.
    """
    try:
        return _stand_in(tuple(map(operator.index, spec.shape)), np.dtype(spec.dtype))
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"{where}: element_spec has {spec!r} there. It has to be a tree with a shape and a dtype for each leaf of "
            "a whole batch, such as jax.ShapeDtypeStruct((rows, 3), np.float32)."
        ) from None


@functools.lru_cache(maxsize=256)  # a tenth of the time, which a batch of many leaves takes for each
def _stand_in(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.broadcast_to(np.empty((), dtype), shape)


def _places(described: Described, plan: Plan, order: Sequence[int], stowage: Stowage, beside: Beside) -> Places:
    whole = described.whole.leaves
    some: dict[int, np.ndarray] = {}
    written: dict[int, np.ndarray] = {}
    copied: dict[int, np.ndarray] = {}  # by leaf of the plan
    apart: list[int] = []
    is_whole = True
    leaves = in_order(plan, order, whole, described.rows)
    for i, (at, leaf, leaf_plan) in enumerate(zip(order, leaves, plan.leaves, strict=True)):
        if at == len(whole):  # the mask, of a batch that is written whole
            copied[i] = leaf
            continue
        place = stowage.written(i) if leaf.dtype == leaf_plan.dtype else None
        begin = _begin(place, leaf.shape)
        if place is not None and begin is not None:
            some[i], written[at] = place, begin
        elif leaf_plan.made:
            apart.append(i)
        is_whole = is_whole and leaf_plan.made and leaf.shape == leaf_plan.shape
    for i, array in zip(apart, beside.arrays([leaves[i] for i in apart]), strict=True):
        written[order[i]] = copied[i] = array
    if not is_whole:
        return Places(some, written, None, [])
    return Places(some, written, stowage.pairs(copied, copied), [(copied[i], plan.leaves[i]) for i in plan.cast])


def _begin(array: np.ndarray | None, shape: Sequence[int]) -> np.ndarray | None:
    """The first rows of an array that are of this shape; None where there are none."""
    if array is None or array.shape == tuple(shape):
        return array
    if array.ndim and array.shape[1:] == tuple(shape[1:]) and len(array) >= shape[0]:
        return array[: shape[0]]
    return None
