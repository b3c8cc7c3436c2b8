"""Single samples stacked to a batch, straight into the memory that it is given, by several threads where that pays.

Synopsis:

    spec = sample_spec(samples[0], where="Batch 0")
    stack(samples, out, where="Batch 0", copier=copier)      # out: a tree of arrays, with one more axis than samples
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxprefetch.errors import difference, some
from jaxprefetch.host import native
from jaxprefetch.host.copying import PARALLEL_BYTES, Copier, chunk_bytes
from jaxprefetch.host.leaves import as_host, cure_of_class, fetch, is_closed, is_number, leaf_paths, plain

SHARED_BYTES = 16 << 10
"""Leaves of samples that are smaller are copied on the calling thread: others would wait for the interpreter."""

BYTES_A_THREAD = 18 << 10
"""With NumPy a thread wants the GIL once a row, so that many wait for each other where rows are small. Measured on 16
cores, GiB/s by 1, 2, 4, 8 and 12 threads: rows of 36 KiB 6, 10, 11, 5, 5; of 72 KiB 5, 10, 15, 11, 9; of 155 KiB 5,
9, 16, 22, 18; of 310 KiB 6, 11, 18, 27, 29; of 618 KiB 6, 10, 20, 33, 44."""

NATIVE_BYTES_A_THREAD = 8 << 10
"""Native code wants it once for a piece. On 32 cores by 4, 8 and 12 threads, in pieces of 2 MiB: rows of 16 KiB 9, 9
and 8 GiB/s, of 36 KiB 17, 14 and 14, of 155 KiB 22, 32 and 22, of 618 KiB 19, 38 and 34."""

MOST_THREADS = 12
"""Of more some wait: on 32 cores NumPy stacks rows of 618 KiB at 35 GiB/s by 12 threads, 32 by 16 and 28 by 24."""

_NUMBERS = {kind: np.asarray(kind()).dtype for kind in (bool, int, float, complex)}
_INTS = np.iinfo(_NUMBERS[int])


def sample_spec(sample: Any, *, where: str) -> Any:
    """The tree of shapes and dtypes of a sample.

    Raises:
        TypeError: a leaf has no place in an array.
    """
    sample = plain(sample)
    leaves, treedef = jax.tree_util.tree_flatten(sample)
    arrays = [_as_array(leaf, f"{where}, sample 0{name}") for leaf, name in zip(leaves, _names(sample), strict=True)]
    return jax.tree_util.tree_unflatten(treedef, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])


def are_one(samples: Sequence[Any]) -> bool:
    """Whether there are several samples, and all have the very same arrays."""
    first, *others = (
        [leaf for leaf in jax.tree_util.tree_leaves(sample) if isinstance(leaf, np.ndarray)] for sample in samples
    )
    return bool(first and others) and all(
        len(other) == len(first) and all(map(operator.is_, other, first)) for other in others
    )


def stack(samples: Sequence[Any], out: Any, *, where: str, copier: Copier) -> None:
    """Copies sample i to row i of the arrays in `out`. Blocking: until it is done.

    Raises:
        ValueError: a sample differs from the first in its structure, or in the shape or dtype of a leaf.
        TypeError: a leaf has no place in an array.
    """
    arrays = jax.tree_util.tree_leaves(out)
    tasks, most = [], copier.threads
    for array, column in zip(arrays, _columns(samples, arrays, where), strict=True):
        size, rows, natively = array[:1].nbytes, len(column), native.can_stack(array, column)
        threads = _threads(size, copier.threads, natively=natively)
        if threads < 2 or size * rows <= PARALLEL_BYTES:
            _fill(array, column, 0, rows, natively)
        else:
            step = max(min(chunk_bytes(size * rows, threads) // size, -(-rows // threads)), 1)
            tasks += [functools.partial(_fill, array, column, at, at + step, natively) for at in range(0, rows, step)]
            most = min(most, threads)
    if tasks:
        copier.run(tasks, most=most)


def _threads(size: int, most: int, *, natively: bool) -> int:
    """How many stack rows of so many bytes best."""
    if size < SHARED_BYTES:
        return 1
    return max(min(size // (NATIVE_BYTES_A_THREAD if natively else BYTES_A_THREAD), most, MOST_THREADS), 2)


def _fill(array: np.ndarray, column: Sequence[Any], start: int, stop: int, natively: bool) -> None:
    rows, leaves = array[start : min(stop, len(column))], column[start:stop]
    if natively:
        native.stack(rows, leaves)
    elif rows.ndim == 1:
        rows[...] = leaves
    elif rows.flags.c_contiguous:  # by 8 threads half as much again as a loop of np.copyto; np.stack makes views first
        np.concatenate(leaves, out=rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:]))
    else:
        np.stack(leaves, out=rows)


def _columns(samples: Sequence[Any], arrays: Sequence[np.ndarray], where: str) -> Sequence[Sequence[Any]]:
    """For each array the leaves of all samples, which fit into its rows."""
    if any(is_closed(leaf) for leaf in jax.tree_util.tree_leaves(samples[0])):
        samples = [plain(sample) for sample in samples]
    leaves, structure = jax.tree_util.tree_flatten(tuple(samples))  # one call for all: a call for each is slow
    if structure != jax.tree_util.treedef_tuple([jax.tree_util.tree_structure(samples[0])] * len(samples)):
        _check_structures(samples, where)
    columns = [leaves[j :: len(arrays)] for j in range(len(arrays))]
    for j, (array, column) in enumerate(zip(arrays, columns, strict=True)):
        if not _are_rows(column, array):
            name = _names(samples[0])[j]
            columns[j] = [
                _checked(leaf, array.shape[1:], array.dtype, f"{where}, sample {i}{name}")
                for i, leaf in enumerate(column)
            ]
    return columns


def _are_rows(column: Sequence[Any], array: np.ndarray) -> bool:
    """Whether all are arrays, or numbers of one type, that fit into rows of the array: the quick way to tell."""
    kind, *others = set(map(type, column))
    if others:
        return False
    if kind is np.ndarray or issubclass(kind, np.generic):
        return {leaf.shape for leaf in column} == {array.shape[1:]} and {leaf.dtype for leaf in column} == {array.dtype}
    if kind is int and not (_INTS.min <= min(column) and max(column) <= _INTS.max):
        return False
    return kind in _NUMBERS and array.ndim == 1 and array.dtype == _NUMBERS[kind]


def _check_structures(samples: Sequence[Any], where: str) -> None:
    first = jax.tree_util.tree_structure(samples[0])
    for i, sample in enumerate(samples):
        if (structure := jax.tree_util.tree_structure(sample)) != first:
            told = difference(leaf_paths(samples[0]), leaf_paths(sample))
            told = told or f"its structure is {structure}, where sample 0 has {first}"
            raise ValueError(
                f"{where}, sample {i}: {told}{_none_in(0, samples[0], sample)}{_none_in(i, sample, samples[0])}. "
                "Give all samples of a batch the same keys, or leave out what only some have."
            )


def _none_in(i: int, sample: Any, other: Any) -> str:
    """Tells of what is None in this sample only: JAX has no leaf there."""
    here, there = ({*leaf_paths(each, with_none=True)} - {*leaf_paths(each)} for each in (sample, other))
    return f"; sample {i} has None, which counts as missing, at {some(sorted(here - there))}" if here - there else ""


def _checked(leaf: Any, shape: tuple[int, ...], dtype: np.dtype, where: str) -> np.ndarray:
    leaf = _as_array(leaf, where)
    if leaf.shape != shape:
        raise ValueError(
            f"{where}: its shape is {leaf.shape}, where sample 0 has {shape}. The samples of a batch are stacked: "
            "crop or pad them, or let samples of one shape follow one another (shapes may change between batches)."
        )
    if leaf.dtype != dtype:
        raise ValueError(
            f"{where}: its dtype is {leaf.dtype}, where sample 0 has {dtype}. Convert it where samples are made."
        )
    return leaf


def _as_array(leaf: Any, where: str) -> np.ndarray:
    if isinstance(leaf, jax.Array):
        return fetch(as_host(leaf, where), where)  # an explicit transfer
    what = type(leaf).__name__
    if is_number(leaf) or hasattr(leaf, "__array__"):
        array = np.asarray(as_host(leaf, where))
        if array.dtype.kind not in "OSU":
            return array
        what += f" of dtype {array.dtype}"
    raise TypeError(
        f"{where}: {what} cannot be stacked to an array of numbers. {cure_of_class(leaf)}"
        "Leave it out of the samples, or yield numbers in its place: tokens or bytes of one length, or an index into a "
        "table, which keep_on_host may name."
    )


def _names(sample: Any) -> list[str]:
    """What errors call the leaves."""
    bare = jax.tree_util.all_leaves([sample])
    return [""] if bare else [f", leaf {path}" for path in leaf_paths(sample)]
