"""Batches whose shapes, dtypes or keys are not those of the first: each means a compiled step, which is said once.

Synopsis:

    shapes = Shapes("error", batch_axis=0)
    shapes.compare(plan, number=0)
    shapes.first                             # the plan of the first batch
"""

from __future__ import annotations

import logging

from jaxprefetch.device.plan import Plan
from jaxprefetch.errors import OPTION
from jaxprefetch.host.batching import Mode

logger = logging.getLogger("jaxprefetch")


class Shapes:
    """The plan of the first batch, and whether it was said that others differ. Written by the thread that stages.

    Args:
        last_batch: as for `prefetch_to_device`; None: no step is compiled for these batches, so that nothing is said.
        batch_axis: the axis of rows.
    """

    def __init__(self, last_batch: Mode | None, batch_axis: int = 0):
        self._last_batch, self._batch_axis = last_batch, batch_axis
        self._said = last_batch is None
        self.first: Plan | None = None

    def compare(self, plan: Plan, number: int) -> None:
        """Warns of the first batch that differs."""
        if self.first is None:
            self.first = plan
        if plan is self.first or self._said or not (difference := plan.difference(self.first)):
            return
        self._said = True
        hint = ""
        if self._last_batch == "error" and _rows_differ(plan, self.first, self._batch_axis):
            hint = f" Give them one shape; {OPTION}last_batch='pad') does so for a short last one, 'drop' omits it."
        logger.warning(
            "jaxprefetch: batch %d has other shapes, dtypes or keys than batch 0, and a step is compiled anew for each "
            "(%s).%s",
            number,
            difference,
            hint,
        )


class Alike(Shapes):
    """Batches of a queue have to be like the first one, and two of them to fit: a consumer's and the next.

    Args:
        max_bytes: on one device; None: as much as there is.
    """

    def __init__(self, max_bytes: int | None):
        super().__init__("error")
        self._max_bytes = max_bytes
        self._first: dict[str, Plan] = {}  # under "plan"; written with setdefault, which is atomic

    def compare(self, plan: Plan, number: int) -> None:
        """Refuses one that is not.

        Raises:
            ValueError: names the leaf, or the bytes.
        """
        if self._max_bytes is not None and 2 * plan.most > self._max_bytes:
            raise ValueError(
                f"Batch {number}: it takes {plan.most:,} bytes on a device, and that of a consumer and the next one "
                f"have to fit, {2 * plan.most:,}; max_bytes is {self._max_bytes:,}. Raise it, or put smaller batches."
            )
        self.first = self._first.setdefault("plan", plan)
        if difference := plan.difference(self.first):
            cure = "pad them" if _rows_differ(plan, self.first, self._batch_axis) else "put only batches like it"
            raise ValueError(
                f"Batch {number}: {difference}, against the first batch ever put into this queue. All have "
                f"the same structure, shapes and dtypes, for which a step is compiled once: {cure}, or make another "
                "queue."
            )


def _rows_differ(plan: Plan, first: Plan, axis: int) -> bool:
    """Whether the leaves are the same but for their rows, which padding mends."""
    now, before = ([leaf for leaf in each.leaves if leaf.target is not None] for each in (plan, first))
    others = [
        [(leaf.path, leaf.dtype, leaf.shape[:axis], leaf.shape[axis + 1 :]) for leaf in leaves]
        for leaves in (now, before)
    ]
    return others[0] == others[1] and [leaf.shape for leaf in now] != [leaf.shape for leaf in before]
