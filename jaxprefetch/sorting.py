"""Which leaves of a batch are copied, and which are sent from where they lie, stay on the host or need no memory.

Synopsis:

    sorting = Sorting(fresh_buffers=False, sent_directly=pinning.is_sent_directly)
    leaves = in_order(plan, order, leaves, rows)
    leaves, copied = sorting.sort(plan, leaves, number=0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxprefetch.device.plan import LeafPlan, Plan
from jaxprefetch.host.foreign import is_pinned_tensor
from jaxprefetch.host.leaves import Separate, check_range, copy_kept, fetch, is_number, memory_of


class Sorting:
    """Sorts the leaves of batches.

    Args:
        fresh_buffers: nobody writes again to what the source yields.
        fresh_tensors: nor to its tensors in pinned memory.
        sent_directly: whether such an array is best sent from where it lies: a copy would not be quicker.
    """

    def __init__(
        self, fresh_buffers: bool, sent_directly: Callable[[np.ndarray], bool], *, fresh_tensors: bool = False
    ):
        self._fresh_buffers = fresh_buffers
        self._fresh_tensors = fresh_tensors and not fresh_buffers
        self._sent_directly = sent_directly

    def sort(self, plan: Plan, leaves: list[Any], number: int) -> tuple[list[Any], Sequence[int]]:
        """The leaves of a plan, those that stay on the host as they are handed on, and which of them are to be copied.

        Raises:
            TypeError, OverflowError: a leaf cannot become what the plan has.
        """
        if plan.all_made and set(map(type, leaves)) == {np.ndarray}:
            for i in plan.cast:
                checked(leaves[i], plan.leaves[i], number)
            return leaves, self._all_but_sent(plan, leaves)
        out: list[Any] = []
        copied: list[int] = []
        separate = Separate()
        for i, (leaf, leaf_plan) in enumerate(zip(leaves, plan.leaves, strict=True)):
            if leaf_plan.target is None:
                leaf = self._kept(leaf, separate)
            elif leaf_plan.made:
                leaf = checked(leaf, leaf_plan, number)
                if not (is_number(leaf) or (i in plan.offsets and self._goes_as_it_is(leaf, leaf_plan, separate))):
                    copied.append(i)
            out.append(leaf)
        return out, copied

    def _all_but_sent(self, plan: Plan, leaves: list[Any]) -> Sequence[int]:
        """Which are to be copied where all are arrays."""
        whole = range(len(leaves))
        if not (self._fresh_buffers or self._fresh_tensors) or not (alone := [i for i in whole if i in plan.offsets]):
            return whole
        separate = Separate() if len(alone) > 1 else None
        sent = {i for i in alone if self._goes_as_it_is(leaves[i], plan.leaves[i], separate)}
        return [i for i in whole if i not in sent] if sent else whole

    def _kept(self, leaf: Any, separate: Separate) -> Any:
        if self._fresh_buffers and ((memory := memory_of(leaf)) is None or separate.claims(memory)):
            return leaf
        return copy_kept(leaf)

    def _goes_as_it_is(self, leaf: np.ndarray, plan: LeafPlan, separate: Separate | None) -> bool:
        """Nothing to be apart from (`separate` is None) is what a leaf has that is the only one sent from there."""
        return (
            (self._fresh_buffers or (self._fresh_tensors and is_pinned_tensor(leaf)))
            and (leaf.dtype, leaf.shape) == (plan.dtype, plan.shape)
            and self._sent_directly(leaf)
            and (separate is None or separate.claims(leaf))
        )


def checked(leaf: Any, plan: LeafPlan, number: int) -> Any:
    """The leaf as an array or a number, whose values fit where they go.

    Raises:
        TypeError, OverflowError: they do not; names the batch and the leaf.
    """
    if type(leaf) is np.ndarray and leaf.dtype == plan.dtype:
        return leaf
    where = f"Batch {number}, leaf {plan.path}"
    leaf = fetch(leaf, where) if isinstance(leaf, jax.Array) else leaf
    check_range(leaf, plan.dtype, where)
    return leaf


def in_order(plan: Plan, order: Sequence[int], leaves: Sequence[Any], rows: Any) -> list[Any]:
    """The leaves of a batch in the plan's order; one past the last is the mask, which says what rows are real."""
    if len(order) == len(leaves):
        return [*leaves]
    both = [*leaves, np.arange(plan.leaves[order.index(len(leaves))].shape[0]) < rows]
    return [both[at] for at in order]
