"""Arrays and tables of other packages as NumPy arrays of the same memory; the packages are recognised, never imported.

Synopsis:

    convert = conversion(type(tensor))             # None: nothing special is known of this type
    array = convert(tensor, "Batch 3, leaf image")
    columns = table_columns(record_batch)          # {"image": an Arrow array, ...}
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxprefetch.errors import KEEP

Convert = Callable[[Any, str], np.ndarray]
"""From a leaf and where it is in which batch; raises TypeError."""


def is_of(kind: type, package: str, *names: str) -> bool:
    """Whether this type, or one that it is made from, has one of these names in this package."""
    return any(
        base.__name__ in names and (base.__module__ == package or base.__module__.startswith(f"{package}."))
        for base in kind.__mro__
    )


def conversion(kind: type) -> Convert | None:
    """What makes a NumPy array of a leaf of this type; None where `np.asarray` does."""
    if is_of(kind, "torch", "Tensor"):
        return from_torch
    if is_of(kind, "pyarrow", "Array", "ChunkedArray"):
        return from_arrow
    for name, cure in _RAGGED.items():
        if is_of(kind, "tensorflow", name):
            return _refusal(f"{name}s have no one shape, or not all of their values, and", cure)
    return None


# ---- PyTorch

_words: dict[Any, tuple[Any, np.dtype] | None] = {}
"""By PyTorch's dtype: one of NumPy's size that PyTorch hands over, and what NumPy is to see in its bits."""


def from_torch(tensor: Any, where: str) -> np.ndarray:
    """The tensor's memory as an array; from another device, or with a conjugation still to be done, a copy.

    Raises:
        TypeError: it has no such form: sparse, nested, quantised, without data, or of a dtype that NumPy lacks.
    """
    dtype = tensor.dtype
    word = _words[dtype] if dtype in _words else _words.setdefault(dtype, _find_word(dtype))
    try:
        if word is None:
            return tensor.numpy(force=True)
        return tensor.detach().view(word[0]).numpy(force=True).view(word[1])
    except (TypeError, RuntimeError) as error:
        what = f"this {type(tensor).__name__} of {dtype}, {tensor.layout} cannot become an array"
        why = str(error).partition("\n")[0].rstrip(".")
        raise TypeError(f"{where}: {what}: {why}. {_torch_cure(tensor)} {KEEP}") from error


def is_pinned_tensor(array: np.ndarray) -> bool:
    """Whether this is a view of a tensor that PyTorch keeps in pinned memory."""
    owner: Any = array.base
    while type(owner) is np.ndarray:
        owner = owner.base
    return owner is not None and is_of(type(owner), "torch", "Tensor") and owner.is_pinned()


def _find_word(dtype: Any) -> tuple[Any, np.dtype] | None:
    """NumPy knows the dtypes of ml_dtypes by name, since JAX imports that; PyTorch does not know that it does."""
    torch, name = sys.modules["torch"], str(dtype).removeprefix("torch.")
    if name != "bfloat16" and not name.startswith("float8_"):
        return None
    try:
        return torch.int16 if dtype.itemsize == 2 else torch.uint8, np.dtype(name)
    except TypeError:  # newer than this ml_dtypes
        return None


def _torch_cure(tensor: Any) -> str:
    if tensor.is_nested:
        return "Pad it (torch.nested.to_padded_tensor) or yield its values and lengths."
    if tensor.is_quantized:
        return "Yield tensor.int_repr() or tensor.dequantize()."
    if "sparse" in str(tensor.layout):
        return "Yield tensor.to_dense(), or its indices and values."
    return "Convert it to a dtype that NumPy or ml_dtypes has."


# ---- TensorFlow

_RAGGED = {
    "RaggedTensor": "Yield ragged.to_tensor(), or its flat_values and row_lengths().",
    "SparseTensor": "Yield tf.sparse.to_dense(tensor), or its indices and values.",
    "IndexedSlices": "Yield its indices and values.",
}


def _refusal(what: str, cure: str) -> Convert:
    def refuse(leaf: Any, where: str) -> np.ndarray:
        raise TypeError(f"{where}: {what} cannot go to a device. {cure} {KEEP}")

    return refuse


# ---- Arrow


def is_table(kind: type) -> bool:
    """Whether this is a table of Arrow's: its columns are leaves."""
    return is_of(kind, "pyarrow", "RecordBatch", "Table")


def table_columns(table: Any) -> dict[str, Any]:
    """The columns of an Arrow table by their names.

    Raises:
        ValueError: two have the same name.
    """
    columns = dict(zip(table.column_names, table.columns, strict=True))
    if len(columns) < len(table.column_names):
        raise ValueError(
            f"An Arrow {type(table).__name__} has two columns of one name: {table.column_names}. Rename them."
        )
    return columns


def from_arrow(column: Any, where: str) -> np.ndarray:
    """The column's memory as an array, `(rows, ...)` for lists and tensors of fixed size; bits and chunks are copied.

    Raises:
        TypeError: there are nulls in it, or what is in it is no array of numbers.
    """
    if hasattr(column, "chunks"):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which copies one, too
    shape: tuple[int, ...] = ()
    values, nulls = column, column.null_count
    while not nulls and hasattr(values.type, "list_size"):
        shape, values = (*shape, values.type.list_size), values.flatten()
        nulls = values.null_count
    if nulls:
        raise TypeError(
            f"{where}: {nulls} values of this Arrow column ({column.type}) are null. Fill them "
            f"(pyarrow.compute.fill_null), or drop the rows. {KEEP}"
        )
    whole = getattr(values, "to_numpy_ndarray", None)  # tensors of fixed shape
    array = np.asarray(values.to_numpy(zero_copy_only=False) if whole is None else whole())
    if array.dtype.hasobject:
        raise TypeError(
            f"{where}: an Arrow column of type {column.type} is no array of numbers. Use lists of fixed size for "
            f"lists, codes for strings, `flatten()` for structs. {KEEP}"
        )
    return array.reshape(len(column), *shape, *array.shape[1:]) if shape else array
