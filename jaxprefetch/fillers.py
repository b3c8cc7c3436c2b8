"""Batches of padding, for a process whose source has ended while others go on.

Synopsis:

    fillers = Fillers()
    fillers.note(parts, rows, batch_axis)         # each batch, as it is staged
    fillers.batch()                               # one without rows, which last_batch="pad" then fills up
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxprefetch.host.leaves import copy_kept, fetch
from jaxprefetch.layout import Parts


class Fillers:
    """Remembers what a batch without rows looks like: the last one, cut to none; other leaves keep their values."""

    def __init__(self) -> None:
        self._treedef: Any = None
        self._leaves: list[Any] = []

    def note(self, parts: Parts, rows: int, axis: int) -> None:
        """This is the last batch so far, as it came from the source."""
        self._treedef = parts.structure.treedef
        self._leaves = [
            _without_rows(leaf, kept, rows, axis) for leaf, kept in zip(parts.leaves, parts.kept, strict=True)
        ]

    def batch(self) -> Any:
        """A batch without rows, to be staged with last_batch="pad"."""
        return jax.tree_util.tree_unflatten(self._treedef, self._leaves)


def _without_rows(leaf: Any, kept: bool, rows: int, axis: int) -> Any:
    shape = np.shape(leaf) if isinstance(leaf, (np.ndarray, jax.Array)) else ()
    if len(shape) > axis and shape[axis] == rows:
        return np.empty((*shape[:axis], 0, *shape[axis + 1 :]), leaf.dtype)
    if kept or not shape:
        return copy_kept(leaf)
    if not isinstance(leaf, jax.Array):
        return leaf.copy()
    return fetch(leaf, "padding") if leaf.is_fully_addressable else leaf
