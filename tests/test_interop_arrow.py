"""Arrow: record batches and tables as dicts of columns, of the same memory where numbers lie as NumPy has them.

pip install ".[test,interop]" && pytest -m interop
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interop_rows import LENGTH, in_order, rows

from jaxprefetch import batched, prefetch_to_device
from jaxprefetch.host.leaves import as_host

pytestmark = pytest.mark.interop


def table() -> Any:
    """All rows; x are lists of fixed size."""
    import pyarrow as pa

    y = np.arange(LENGTH, dtype=np.int32)
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(y, 3).astype(np.float32)), 3)
    return pa.table({"x": x, "y": pa.array(y)})


def deliver_one(batch: Any, **options: Any) -> Any:
    with prefetch_to_device([batch], **options) as batches:
        (delivered,) = batches
    return delivered


def test_record_batches_of_a_table_arrive_pass_by_pass():
    """A list of record batches is gone through again and again."""
    with prefetch_to_device(table().to_batches(max_chunksize=5)) as batches:
        assert [rows(batches) for _ in range(2)] == [in_order(5)] * 2


def test_a_file_is_read_batch_by_batch(tmp_path, caplog):
    """A Parquet file's `iter_batches` is a generator of one pass; a data set's `to_batches` keeps up to a size."""
    import pyarrow.dataset
    import pyarrow.parquet

    pyarrow.parquet.write_table(table(), tmp_path / "rows.parquet")
    with prefetch_to_device(pyarrow.parquet.ParquetFile(tmp_path / "rows.parquet").iter_batches(5)) as batches:
        assert [rows(batches) for _ in range(2)] == [in_order(5), []]
    assert "is spent, so this pass is empty" in caplog.text
    assert rows(prefetch_to_device(pyarrow.dataset.dataset(tmp_path).to_batches(batch_size=5))) == in_order(5)


def test_a_stream_is_read_and_closed():
    """A record batch reader (IPC, Flight) is a source of one pass, which is closed at its end."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table().schema) as writer:
        writer.write_table(table(), max_chunksize=5)
    assert rows(prefetch_to_device(pa.ipc.open_stream(sink.getvalue()))) == in_order(5)


def test_tables_are_opened_wherever_they_are():
    """Tables, chunked ones too, become dicts at any depth; their columns have paths of their own."""
    import pyarrow as pa

    whole = pa.concat_tables([table(), table()])
    out = deliver_one(({"t": whole}, pa.record_batch({"s": ["a", "b"], "n": [1, 2]})), keep_on_host="1/s")
    assert sorted(out[0]["t"]) == ["x", "y"]
    assert out[0]["t"]["x"].shape == (2 * LENGTH, 3)
    assert out[1]["s"].to_pylist() == ["a", "b"]
    np.testing.assert_array_equal(np.asarray(out[1]["n"]), [1, 2])


@pytest.mark.parametrize(
    "name", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "bool", "bool8"]
)
def test_columns_arrive_bit_by_bit(name):
    """Every type of numbers of up to 32 bits arrives, and so do bits; sliced, too."""
    import pyarrow as pa

    values = np.arange(12) % 2 == 0 if name.startswith("bool") else np.arange(12).astype(name)
    column = pa.array(values) if name != "bool8" else pa.Bool8Array.from_storage(pa.array(values.astype(np.int8)))
    out = deliver_one(pa.record_batch({"c": column}).slice(3, 7))["c"]
    assert out.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(out), values[3:10])


def test_tensors_and_nested_lists_of_fixed_size_have_their_shape():
    """Tensor columns and nested lists of fixed size are arrays with as many axes, also of a slice."""
    import pyarrow as pa

    values = np.arange(4 * 6, dtype=np.float32).reshape(4, 2, 3)
    inner = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 3)
    columns = {"t": pa.FixedShapeTensorArray.from_numpy_ndarray(values)}
    columns["l"] = pa.FixedSizeListArray.from_arrays(inner, 2)
    out = deliver_one(pa.record_batch(columns).slice(1, 2))
    np.testing.assert_array_equal(np.asarray(out["t"]), values[1:3])
    np.testing.assert_array_equal(np.asarray(out["l"]), values[1:3])


def test_columns_are_not_copied_before_they_are_staged():
    """A column of numbers, a list column or a tensor column is a view of Arrow's memory."""
    import pyarrow as pa

    values = np.arange(24, dtype=np.float32)
    flat = pa.array(values)
    for column in (flat, pa.FixedSizeListArray.from_arrays(flat, 3), pa.chunked_array([flat])):
        assert np.shares_memory(as_host(column, ""), flat.to_numpy())
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(values.reshape(4, 6))
    assert np.shares_memory(as_host(tensor, ""), tensor.storage.values.to_numpy())


def test_columns_without_an_array_form_are_refused_with_the_cure():
    """Nulls, strings, lists of varying length, structs and codes are an error with batch, column and cure."""
    import pyarrow as pa

    unfit = [
        (pa.array([1, None]), r"1 values of this Arrow column \(int64\) are null.*fill_null"),
        (pa.array([[1, None]], pa.list_(pa.int32(), 2)), "1 values of this Arrow column .* are null"),
        (pa.array(["a", "b"]), "an Arrow column of type string is no array of numbers"),
        (pa.array([[1], [2, 3]]), ".*of type list<item: int64> is no array of numbers.*fixed size"),
        (pa.array([{"a": 1}]), r".*of type struct<a: int64> is no array of numbers.*`flatten\(\)` for structs"),
        (pa.array(["a"]).dictionary_encode(), ".*of type dictionary<.* is no array of numbers.*codes for strings"),
        (pa.array([1], pa.timestamp("s")), "arrays of dtype datetime64.s. cannot go to a device"),
    ]
    for column, message in unfit:
        with prefetch_to_device([pa.record_batch({"c": pa.array([1])}), pa.record_batch({"c": column})]) as batches:
            next(batches)
            with pytest.raises(TypeError, match=f"^Batch 1, leaf c: {message}.*keep_on_host"):
                next(batches)


def test_columns_of_one_name_are_refused():
    """A table with two columns of one name is an error instead of a dict that lacks one."""
    import pyarrow as pa

    twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with (
        prefetch_to_device([twice]) as batches,
        pytest.raises(ValueError, match=r"two columns of one name: \['a', 'a'\]\. Rename them"),
    ):
        next(batches)


def test_arrow_rows_become_batches():
    """`batched` stacks tables of as many rows, as it does arrays."""
    out = next(prefetch_to_device(batched(table().to_batches(max_chunksize=4), 6)))
    assert (out["x"].shape, out["y"].shape) == ((6, 4, 3), (6, 4))
