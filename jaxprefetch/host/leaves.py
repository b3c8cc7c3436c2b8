"""What a leaf of a batch is on the host, and a copy of it that the source cannot change any more.

Synopsis:

    leaf = as_host(leaf, "Batch 3, leaf image")       # an array, a Python number or a jax.Array; else an error
    np.copyto(zero_beyond(out, leaf.shape), leaf)     # rows that the leaf lacks are zero
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprefetch.errors import KEEP, add_note, deleted
from jaxprefetch.host.foreign import Convert, conversion, is_table, table_columns

logger = logging.getLogger("jaxprefetch")


def is_number(leaf: Any) -> bool:
    """Whether this is a number of Python's: these stay weakly typed, as `jax.device_put` leaves them."""
    return isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic)


def plain(tree: Any) -> Any:
    """The same tree with mappings that JAX does not know, and Arrow's tables, as dicts.

    Raises:
        ValueError: columns of a table share a name.
    """
    while any(is_closed(leaf) for leaf in jax.tree_util.tree_leaves(tree)):
        tree = jax.tree_util.tree_map(lambda leaf: _opened(leaf) if is_closed(leaf) else leaf, tree)
    return tree


_closed: dict[type, bool] = {}


def is_closed(leaf: Any) -> bool:
    """Whether `plain` makes a dict of it."""
    kind = type(leaf)
    known = _closed.get(kind)
    return _closed.setdefault(kind, issubclass(kind, Mapping) or is_table(kind)) if known is None else known


def _opened(leaf: Any) -> dict[Any, Any]:
    return table_columns(leaf) if is_table(type(leaf)) else dict(leaf)


def leaf_paths(tree: Any, *, with_none: bool = False) -> tuple[str, ...]:
    """Names of the leaves, in order: `image/rgb`; the only leaf of a bare batch is called `batch`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=(lambda x: x is None) if with_none else None)
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") or "batch" for path, _ in paths)


MANY = 16
"""A list of so many numbers was meant to be an array, such are the columns of unformatted tables; a batch that is a
list of so many trees alike was meant to be stacked."""


def warn_of_lists(tree: Any, number: int, is_kept: Callable[[str], bool]) -> None:
    """Says that a list of many numbers, or of samples, is as many arrays, unless it stays as it is."""
    lists: dict[Any, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        is_number_like = is_number(leaf) or isinstance(leaf, np.generic)
        if path and isinstance(path[-1], jax.tree_util.SequenceKey) and is_number_like:
            lists[path[:-1]] = lists.get(path[:-1], 0) + 1
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): n for path, n in lists.items() if n >= MANY}
    if many := [name for name in names if not is_kept(name)]:
        logger.warning(
            "jaxprefetch: batch %d: %s is a list of %d numbers, each of which goes to the device as an array of its "
            'own. Yield arrays (Hugging Face: with_format("numpy"); else np.asarray).',
            number,
            many[0] or "it",
            names[many[0]],
        )
    elif _is_of_samples(tree) and not is_kept("0"):
        logger.warning(
            "jaxprefetch: batch %d is a list of %d trees alike, each of which goes to the devices, and is split over "
            "them, by itself. If they are samples pass batched(samples, %d).",
            number,
            len(tree),
            len(tree),
        )


def _is_of_samples(tree: Any) -> bool:
    if not isinstance(tree, list) or len(tree) < MANY:
        return False
    first, *others = (
        (jax.tree_util.tree_structure(part), [(type(leaf), np.shape(leaf)) for leaf in jax.tree_util.tree_leaves(part)])
        for part in tree
    )
    return bool(first[1]) and all(other == first for other in others)


def as_host(leaf: Any, where: str) -> Any:
    """A NumPy array, a Python number or a `jax.Array`, without copying where that is possible.

    Raises:
        TypeError: JAX has no such leaf.
        ValueError: the source deleted or donated this array.
        Exception: what the leaf's own `__array__` raises.
    """
    kind = type(leaf)
    convert = _conversions.get(kind) or _conversions.setdefault(kind, _find_conversion(leaf))
    return convert(leaf, where)


_conversions: dict[type, Convert] = {}
"""By the type of leaf: asked for each leaf of each batch, and found once."""


def _find_conversion(leaf: Any) -> Convert:
    if isinstance(leaf, jax.Array):
        return _alive
    if is_number(leaf):
        return _as_it_is
    if isinstance(leaf, np.ma.MaskedArray):
        return _refuse_masked
    return conversion(type(leaf)) or (_as_array if hasattr(leaf, "__array__") else _refuse)


def _alive(leaf: Any, where: str) -> Any:
    if leaf.is_deleted():
        raise deleted(where)
    return leaf


def _as_it_is(leaf: Any, where: str) -> Any:
    return leaf


def _as_array(leaf: Any, where: str) -> np.ndarray:
    try:
        return np.asarray(leaf)
    except Exception as error:
        add_note(error, f"jaxprefetch: {where}: raised where {type(leaf).__name__} became a NumPy array")
        raise


def _refuse_masked(leaf: Any, where: str) -> Any:
    raise TypeError(f"{where}: masked arrays have no place on a device. Pass leaf.filled(value) and the mask.")


def _refuse(leaf: Any, where: str) -> Any:
    raise TypeError(f"{where}: {type(leaf).__name__} cannot go to a device. {cure_of_class(leaf)}{KEEP}")


def cure_of_class(leaf: Any) -> str:
    """What makes a tree of a dataclass that JAX takes for a leaf; "" for others."""
    if isinstance(leaf, type) or not dataclasses.is_dataclass(leaf):
        return ""
    return f"A dataclass becomes a tree of its fields by jax.tree_util.register_dataclass({type(leaf).__name__}). "


def check_range(leaf: Any, dtype: np.dtype, where: str) -> None:
    """A 64-bit integer that would wrap in `dtype` is an error.

    Raises:
        OverflowError: with the value and the cure.
    """
    if dtype.kind not in "iu" or not np.size(leaf):
        return
    least, most = _limits(dtype)
    ends = (np.minimum.reduce(leaf, None), np.maximum.reduce(leaf, None)) if isinstance(leaf, np.ndarray) else (leaf,)
    for value in map(int, ends):
        if not least <= value <= most:
            cure = "Set jax_enable_x64 first, before anything of jaxprefetch is made, or map"
            raise OverflowError(
                f"{where}: {value} does not fit {dtype}, which is what JAX keeps such integers in now (64-bit types "
                f"need x64). {'Map' if dtype.itemsize == 8 else cure} the values to a smaller range."
            )


@functools.cache
def _limits(dtype: np.dtype) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return limits.min, limits.max


def is_key(leaf: jax.Array) -> bool:
    """Whether this is a typed PRNG key, which has no host form."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def fetch(leaf: jax.Array, where: str) -> np.ndarray:
    """An array of the source's in host memory, where there is no way around it.

    Raises:
        TypeError: for a typed PRNG key.
    """
    if is_key(leaf):
        raise TypeError(
            f"{where}: typed PRNG keys can neither be padded nor become rows of a global array. "
            "Yield jax.random.key_data(keys) and wrap it in the step with jax.random.wrap_key_data."
        )
    return jax.device_get(leaf)


def copy_kept(leaf: Any) -> Any:
    """A leaf that stays on the host, as the batch's own: arrays of any library and writable buffers are copied.

    The copy has the leaf's type, but for arrays that cannot be copied as what they are: these become NumPy arrays. All
    else, strings and other objects, is the leaf itself.
    """
    if isinstance(leaf, (np.ndarray, np.void)):
        return leaf.copy()
    if isinstance(leaf, memoryview):
        own = np.array(leaf).data  # with the same shape and format
        return own.toreadonly() if leaf.readonly else own
    is_array = _is_array(leaf)
    if not (is_array or _is_writable_buffer(leaf)):
        return leaf
    try:
        if hasattr(leaf, "clone"):  # PyTorch's: deepcopy refuses those that a gradient goes through
            return (leaf.detach() if hasattr(leaf, "detach") else leaf).clone()
        return copy.deepcopy(leaf)
    except Exception:
        return np.asarray(leaf).copy() if is_array else leaf


def memory_of(leaf: Any) -> np.ndarray | None:
    """A view of the memory that a kept leaf has; None where there is none or it does not show."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if isinstance(leaf, (jax.Array, str)):
        return None
    try:
        return np.from_dlpack(leaf) if hasattr(type(leaf), "__dlpack__") else np.asarray(memoryview(leaf))
    except Exception:  # no buffer, or on a device, or of a type that NumPy does not know
        return None


def _is_array(leaf: Any) -> bool:
    """Whether this is an array of some library that may change; NumPy's scalars and JAX's arrays never do."""
    names = "__array__", "__array_interface__", "__dlpack__"
    return not isinstance(leaf, (jax.Array, np.generic)) and any(hasattr(type(leaf), name) for name in names)


def _is_writable_buffer(leaf: Any) -> bool:
    try:
        return not memoryview(leaf).readonly
    except (TypeError, ValueError, BufferError):
        return False


class Separate:
    """Tells whether leaves of one batch lie apart in memory, as the leaves of what is delivered must."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def claims(self, leaf: np.ndarray) -> bool:
        """Whether no leaf so far overlaps with this one; then it has its place from now on."""
        if leaf.flags.c_contiguous:  # a third of the time
            start = leaf.__array_interface__["data"][0]
            end = start + leaf.nbytes
        else:
            start, end = np.lib.array_utils.byte_bounds(leaf)
        i = bisect.bisect_left(self._starts, end)  # the leaves that start before this one ends
        if i and self._ends[i - 1] > start:
            return False
        self._starts.insert(i, start)
        self._ends.insert(i, end)
        return True


def zero_beyond(out: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The part of `out` that takes an array of this shape; the rest is made zero."""
    if out.shape == tuple(shape):
        return out
    for axis, n in enumerate(shape):
        out[(*(slice(None),) * axis, slice(n, None))] = np.zeros((), out.dtype)
    return out[tuple(slice(n) for n in shape)]


def padded(leaf: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The leaf in this shape, filled up with zeros where it lacks rows."""
    if leaf.shape == tuple(shape):
        return leaf
    out = np.empty(tuple(shape), leaf.dtype)
    zero_beyond(out, leaf.shape)[...] = leaf
    return out
