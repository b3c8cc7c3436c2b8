"""What an example of a cache is, and rows of examples that are to go into it.

Synopsis:

    spec = ExampleSpec(first_examples, Placement(sharding))
    layout = ResidentLayout.of(spec.leaves, capacity, spec.context)
    leaves, n = spec.rows(examples, "insert", shards=layout.shards)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprefetch.device.examples import ExampleLeaf, ResidentLayout
from jaxprefetch.device.placement import Placement
from jaxprefetch.device.plan import device_dtype
from jaxprefetch.errors import WithoutOptions, difference
from jaxprefetch.host.leaves import as_host, check_range, leaf_paths, plain


class ExampleSpec:
    """The tree of an example, with the shape and dtype of each leaf.

    Args:
        examples: a tree of `jax.ShapeDtypeStruct` for one example, or rows of examples, `(rows, ...)`.
        placement: where rows go.

    Raises:
        TypeError, ValueError: it is neither, or `placement` does not fit it.
    """

    @WithoutOptions()
    def __init__(self, examples: Any, placement: Placement):
        examples = plain(examples)
        leaves, self.treedef = jax.tree_util.tree_flatten(examples)
        self.placement, self.context = placement, placement.context
        self.has_rows = not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        targets = placement.targets(examples, "examples")
        self.leaves = [
            self._described(leaf, path, target)
            for leaf, path, target in zip(leaves, leaf_paths(examples), targets, strict=True)
        ]

    @property
    def element_spec(self) -> Any:
        """The tree of `jax.ShapeDtypeStruct` of one example."""
        structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]
        return jax.tree_util.tree_unflatten(self.treedef, structs)

    @WithoutOptions()
    def rows(self, examples: Any, what: str, shards: int) -> tuple[list[Any], int]:
        """The leaves of some examples, as NumPy or JAX arrays, and how many rows they have.

        Raises:
            TypeError, ValueError, OverflowError: they are no examples of this cache; names the leaf.
        """
        examples = plain(examples)
        leaves, treedef = jax.tree_util.tree_flatten(examples)
        if treedef != self.treedef:
            told = difference([leaf.path for leaf in self.leaves], leaf_paths(examples))
            told = told or f"expected examples of the structure {self.treedef}, got {treedef}"
            raise ValueError(f"{what}: {told}. Pass a tree with the same keys as those that the cache was made with.")
        leaves = [self._checked(leaf, i, what) for i, leaf in enumerate(leaves)]
        n = len(leaves[0])
        for leaf, spec in zip(leaves, self.leaves, strict=True):
            if len(leaf) != n:
                raise ValueError(
                    f"{what}, leaf {spec.path}: expected {n} rows, as leaf {self.leaves[0].path} has, got {len(leaf)}."
                )
        if not n or n % shards:
            raise ValueError(
                f"{what}: expected a positive multiple of {shards} rows, which are split over the devices, got {n}."
            )
        return leaves, n

    def _described(self, leaf: Any, path: str, target: Any) -> ExampleLeaf:
        where = f"examples, leaf {path}"
        if not self.has_rows:
            shape = tuple(leaf.shape)
        else:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(f"{where}: pass arrays for all leaves, or a jax.ShapeDtypeStruct for each.")
            leaf = _array(leaf, where)
            shape = tuple(leaf.shape[1:])
        dtype = self._dtype(leaf, where)
        return ExampleLeaf(path, shape, dtype, target.fit(1 + len(shape)))

    def _checked(self, leaf: Any, i: int, what: str) -> Any:
        spec = self.leaves[i]
        where = f"{what}, leaf {spec.path}"
        leaf = _array(leaf, where)
        if tuple(leaf.shape[1:]) != spec.shape:
            expected = ", ".join(["rows", *map(str, spec.shape)]) + "," * (not spec.shape)
            raise ValueError(f"{where}: expected an array of shape ({expected}), got {tuple(leaf.shape)}.")
        if (dtype := self._dtype(leaf, where)) != spec.dtype:
            raise ValueError(
                f"{where}: expected {spec.dtype}, got {dtype}. Convert it with .astype({spec.dtype.name!r})."
            )
        if isinstance(leaf, np.ndarray) and leaf.dtype != spec.dtype:
            check_range(leaf, spec.dtype, where)
        return leaf

    def _dtype(self, leaf: Any, where: str) -> np.dtype:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{where}: {leaf.dtype} has no plain form. Keep jax.random.key_data(keys) in the cache, and wrap it in "
                "the step with jax.random.wrap_key_data."
            )
        return (
            leaf.dtype if isinstance(leaf, jax.Array) else device_dtype(np.dtype(leaf.dtype), self.context.x64, where)
        )


def _array(leaf: Any, where: str) -> Any:
    """A NumPy or JAX array that has rows."""
    leaf = as_host(leaf, where)
    if np.ndim(leaf) == 0:
        raise ValueError(f"{where}: expected an array with an axis of rows, got {type(leaf).__name__} {leaf!r}.")
    return leaf


def check_slots(slots: Any, layout: ResidentLayout, filled: int, what: str, *, rows: int | None = None) -> np.ndarray:
    """Slots, one a row, as `(shards, rows / shards)`: each row's on its own device, and with an example.

    Args:
        filled: slots of each device that hold one.
        rows: how many there must be, each slot once; None: any number, and any slot more than once.

    Raises:
        IndexError: there is no such slot, or it holds no example.
        ValueError: they are no integers of that shape, or a row is on another device than its slot.
    """
    array = np.asarray(slots)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array) or len(array) % layout.shards:
        raise ValueError(
            f"{what}: expected integers of shape (rows,), rows being a positive multiple of {layout.shards}, got "
            f"{array.dtype} of shape {array.shape}."
        )
    if rows is not None and (len(array) != rows or len(np.unique(array)) != rows):
        raise ValueError(f"{what}: expected {rows} different slots, one for each row, got {len(np.unique(array))}.")
    device, place = np.divmod(array, layout.each)
    own = np.repeat(np.arange(layout.shards), len(array) // layout.shards)
    for wrong, error, why in (
        ((array < 0) | (array >= layout.slots), IndexError, f"there are slots 0 to {layout.slots - 1:,}"),
        (device != own, ValueError, f"that row is on another device, which has {layout.each:,} slots of its own"),
        (place >= filled, IndexError, f"it holds no example: the first {filled:,} slots of each device do"),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise error(f"{what}: row {row} names slot {array[row]:,}, but {why}.")
    return array.astype(np.int32).reshape(layout.shards, -1)


def as_int32(indices: jax.Array, shards: int) -> jax.Array:
    """Slots that stay on the devices, where their values cannot be seen.

    Raises:
        ValueError: they are no integers of shape `(rows,)`.
    """
    if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer) or not len(indices) or len(indices) % shards:
        raise ValueError(
            f"take: expected integers of shape (rows,), rows being a positive multiple of {shards}, got "
            f"{indices.dtype} of shape {indices.shape}."
        )
    return indices if indices.dtype == np.int32 else indices.astype(np.int32)
