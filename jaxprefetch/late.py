"""Metrics that are read late: when their step is surely done, so that no step waits for them.

Synopsis:

    late = LateMetrics()
    late.add(1, {"loss": loss}, fetch=True)      # starts the copies to the host, waits for nothing
    for step, metrics in late.due():             # {"loss": 0.25}, of steps that are done
        ...
    for step, metrics in late.rest():            # of all others; waits for them
        ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

AHEAD = 8
"""Steps that may be dispatched and not done; the loop waits for the oldest of more, while the device has the others."""


class Pending(NamedTuple):
    """The metrics of a step, as they came from it."""

    step: int
    leaves: list[Any]
    treedef: Any
    fetch: bool  # else they are only waited for


class LateMetrics:
    """Keeps the metrics of the last steps until they are done, in order."""

    def __init__(self, ahead: int = AHEAD):
        self._ahead = ahead
        self._pending: deque[Pending] = deque()
        self._names: tuple[Any, list[str]] | None = None  # of the structure seen last

    def add(self, step: int, metrics: Any, *, fetch: bool) -> None:
        """Takes what a step returned; `fetch` tells whether anybody will read it."""
        leaves, treedef = jax.tree_util.tree_flatten(metrics)
        if fetch:
            for leaf in leaves:
                if isinstance(leaf, jax.Array):
                    leaf.copy_to_host_async()
        self._pending.append(Pending(step, leaves, treedef, fetch))

    def due(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Steps and metrics that are there. Blocking: for the oldest while more than `ahead` are not done."""
        pending = self._pending
        while pending and (len(pending) > self._ahead or _is_ready(pending[0].leaves)):
            yield from self._take()

    def rest(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Steps and metrics of all that was added. Blocking: until they are done."""
        while self._pending:
            yield from self._take()

    def read(self, step: int, metrics: Any) -> dict[str, Any]:
        """The metrics of one step on the host. Blocking: until it is done."""
        leaves, treedef = jax.tree_util.tree_flatten(metrics)
        return self._read(Pending(step, leaves, treedef, True))

    def _take(self) -> Iterator[tuple[int, dict[str, Any]]]:
        oldest = self._pending.popleft()
        if oldest.fetch:
            yield oldest.step, self._read(oldest)
        else:
            jax.block_until_ready([leaf for leaf in oldest.leaves if not _is_deleted(leaf)])

    def _read(self, pending: Pending) -> dict[str, Any]:
        if self._names is None or self._names[0] != pending.treedef:
            self._names = pending.treedef, _names(pending.treedef)
        names = self._names[1]
        for name, leaf in zip(names, pending.leaves, strict=True):
            if _is_deleted(leaf):
                raise ValueError(
                    f"Step {pending.step}, metric {name}: the array was deleted before it was read: it belongs to the "
                    "state, and a later step has donated that. Let the step return a copy of it (jnp.copy) as metric."
                )
        with jax.transfer_guard_device_to_host("allow"):  # as in jax.device_get, which would begin the copies again
            return dict(zip(names, map(_value, pending.leaves), strict=True))


def _names(treedef: Any) -> list[str]:
    """`loss`, `accuracy/top5`; metrics that are one bare value are the loss."""
    tree = jax.tree_util.tree_unflatten(treedef, range(treedef.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "loss" for path in paths]


def _value(leaf: Any) -> Any:
    """On the host; a number where it is one."""
    if isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
    return leaf.item() if isinstance(leaf, (np.ndarray, np.generic)) and leaf.ndim == 0 else leaf


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _is_ready(leaves: list[Any]) -> bool:
    """Whether reading them waits for nothing, be it that it fails."""
    arrays: list[Any] = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return all(array.is_deleted() or array.is_ready() for array in arrays)
