"""What a leaf of a batch is on the host, and a copy of it that the source cannot change any more.

    leaf = as_host(leaf, "Batch 3, leaf image")       # an array, a Python number or a jax.Array; else an error
    owned = copy_aligned(leaf, dtype, shape)          # from here on nobody else writes to it
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

ALIGNMENT = 64
"""Bytes. XLA's CPU client aliases host memory with this alignment, so no second copy is made there."""

NUMBERS = (bool, int, float, complex)
"""Python numbers stay weakly typed, as `jax.device_put` leaves them."""

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def plain(tree: Any) -> Any:
    """The same tree with mappings that JAX does not know as dicts."""
    while any(isinstance(leaf, Mapping) for leaf in jax.tree_util.tree_leaves(tree)):
        tree = jax.tree_util.tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, tree)
    return tree


def leaf_paths(tree: Any) -> tuple[str, ...]:
    """Names of the leaves, in order: `image/rgb`; the only leaf of a bare batch is called `batch`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") or "batch" for path, _ in paths)


def as_host(leaf: Any, where: str) -> Any:
    """A NumPy array, a Python number or a `jax.Array`, without copying where that is possible.

    Raises:
        TypeError: JAX has no such leaf.
        ValueError: the source deleted or donated this array.
    """
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(f"{where}: the source has deleted or donated this jax.Array. Yield arrays that are alive.")
        return leaf
    if type(leaf) in NUMBERS:
        return leaf
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{where}: masked arrays have no place on a device. Pass leaf.filled(value) and the mask.")
    if isinstance(leaf, (np.ndarray, np.generic)) or hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    raise TypeError(f"{where}: {type(leaf).__name__} cannot go to a device. {_KEEP}")


_KEEP = "Name it in keep_on_host to receive it as it is, or leave it out of the batch."


@functools.cache
def _device_dtype(dtype: np.dtype, x64: bool) -> np.dtype:
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    if native.kind in "USOmM" or native.names is not None:
        raise TypeError(native)
    narrow = native if x64 else np.dtype(_NARROW.get(native.name, native))
    with jax.enable_x64(x64):
        return np.dtype(jax.dtypes.canonicalize_dtype(narrow))


def device_dtype(dtype: np.dtype, x64: bool, where: str) -> np.dtype:
    """The dtype that a leaf has on the device.

    Raises:
        TypeError: JAX has no such dtype.
    """
    try:
        return _device_dtype(dtype, x64)
    except TypeError:
        raise TypeError(f"{where}: arrays of dtype {dtype} cannot go to a device. {_KEEP}") from None


def check_range(leaf: Any, dtype: np.dtype, where: str) -> None:
    """A 64-bit integer that would wrap in `dtype` is an error.

    Raises:
        OverflowError: with the value and the cure.
    """
    if dtype.kind not in "iu" or not np.size(leaf):
        return
    limits = np.iinfo(dtype)
    for value in (np.min(leaf), np.max(leaf)) if isinstance(leaf, np.ndarray) else (leaf,):
        if not limits.min <= value <= limits.max:
            raise OverflowError(
                f"{where}: {value} does not fit {dtype}, to which JAX narrows 64-bit integers while x64 is off. "
                "Set jax_enable_x64 before making the prefetcher, or map the values to a smaller range."
            )


def copy_aligned(leaf: np.ndarray, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    """A fresh contiguous copy; where `shape` is larger than the leaf's, the rest is zero."""
    out = _empty_aligned(shape, dtype)
    if tuple(shape) == leaf.shape:
        np.copyto(out, leaf, casting="unsafe")
    else:
        out[...] = np.zeros((), dtype)
        np.copyto(out[tuple(slice(n) for n in leaf.shape)], leaf, casting="unsafe")
    return out


def _empty_aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(tuple(shape))
