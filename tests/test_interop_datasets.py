"""Hugging Face datasets: map-style and streaming, in NumPy, JAX and Arrow form, and going on after a restart.

pip install ".[test,interop]" && pytest -m interop
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest
from interop_rows import LENGTH, in_order, rows

from jaxprefetch import batched, prefetch_to_device
from jaxprefetch.host.states import from_json, to_json

pytestmark = pytest.mark.interop


def data(kind: str = "map", **columns: Any) -> Any:
    """All rows, with further columns, as a map-style or a streaming data set without a format."""
    from datasets import Array2D, Dataset, Features, List, Value

    features = {"x": List(Value("float32"), length=3), "y": Value("int32"), "image": Array2D((2, 2), "uint8")}
    features |= {"s": Value("string"), "r": List(Value("int32"))}
    made = {"x": np.repeat(np.arange(LENGTH)[:, None], 3, 1).tolist(), "y": list(range(LENGTH))} | columns
    table = Dataset.from_dict(made, features=Features({name: features[name] for name in made}))
    return table if kind == "map" else table.to_iterable_dataset(num_shards=3)


def resumed(make, taken, passes, **options):
    """The batches of so many passes after the place, without and with a restart there."""
    with prefetch_to_device(make(), **options) as batches:
        for _ in range(taken):
            next(batches)
        if taken == 5:  # all of them: and the end was told
            assert next(batches, None) is None
        state = json.dumps(to_json(batches.get_state()))
        expected = [rows(batches) for _ in range(passes)]
    with prefetch_to_device(make(), **options) as batches:
        batches.set_state(from_json(json.loads(state)))
        return expected, [rows(batches) for _ in range(passes)]


@pytest.mark.parametrize("form", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("kind", ["map", "streaming"])
def test_batches_in_every_format(kind, form):
    """`with_format(...).batch(n)` gives arrays of the columns' types, pass by pass."""
    source = data(kind, image=np.arange(4 * LENGTH).reshape(-1, 2, 2).tolist()).with_format(form).batch(5)
    with prefetch_to_device(source) as batches:
        delivered = list(batches)
        assert rows(batches) == in_order(5)
    assert rows(delivered) == in_order(5)
    assert isinstance(delivered[0]["x"], jax.Array)
    assert (delivered[0]["x"].dtype, delivered[0]["image"].shape) == ("float32", (5, 2, 2))
    np.testing.assert_array_equal(np.asarray(delivered[1]["image"]).ravel(), np.arange(20, 40))


@pytest.mark.parametrize("kind", ["map", "streaming"])
def test_iter_is_a_generator_of_one_pass(kind, caplog):
    """`iter(batch_size=n)` gives the same batches, once."""
    with prefetch_to_device(data(kind).with_format("numpy").iter(batch_size=5)) as batches:
        assert [rows(batches) for _ in range(2)] == [in_order(5), []]
    assert "is spent, so this pass is empty" in caplog.text


@pytest.mark.parametrize("kind", ["map", "streaming"])
def test_rows_become_batches(kind):
    """`batched` stacks the rows of a data set."""
    with prefetch_to_device(batched(data(kind).with_format("numpy"), 5)) as batches:
        assert [rows(batches) for _ in range(2)] == [in_order(5)] * 2


@pytest.mark.parametrize("kind", ["map", "streaming"])
def test_columns_without_a_format_are_said_once(kind, caplog):
    """Without a format columns are lists, each number an array of its own: that is said, with the cure."""
    with prefetch_to_device(data(kind).batch(16)) as batches:
        first = next(batches)
    assert len(first["y"]) == 16
    (record,) = [record for record in caplog.records if "numbers, each of which" in record.getMessage()]
    assert "y is a list of 16 numbers" in record.getMessage()
    assert 'with_format("numpy")' in record.getMessage()


@pytest.mark.parametrize(("column", "message"), [("s", "arrays of dtype"), ("r", "arrays of dtype object")])
def test_columns_without_an_array_form_are_refused_or_kept(column, message):
    """Strings and lists of varying length are an error naming the column, or stay on the host."""
    values = {"s": [f"s{i}" for i in range(LENGTH)], "r": [[1] * (i % 3) for i in range(LENGTH)]}[column]
    source = data(**{column: values}).with_format("numpy").batch(4)
    with (
        prefetch_to_device(source) as batches,
        pytest.raises(TypeError, match=f"^Batch 0, leaf {column}: {message}.* cannot go to a device"),
    ):
        next(batches)
    with prefetch_to_device(source, keep_on_host=column) as batches:
        assert list(next(batches)[column][2]) == list(values[2])


def test_an_error_of_the_data_set_keeps_its_place():
    """An exception in `map` comes after the batches before it."""

    def checked(row):
        if row["y"] == 13:
            raise ValueError("row 13 is broken")
        return row

    delivered = []
    with (
        prefetch_to_device(data("streaming").with_format("numpy").map(checked).batch(4)) as batches,
        pytest.raises(ValueError, match="row 13 is broken"),
    ):
        for batch in batches:
            delivered += rows([batch])
    assert delivered == in_order(4)[:3]


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_a_stream_goes_on_where_it_was(taken):
    """A streaming data set is brought back by its own state, and later passes begin at its beginning again."""
    expected, got = resumed(lambda: data("streaming").with_format("numpy").batch(5), taken, passes=3)
    assert got == expected
    assert got[1:] == [in_order(5)] * 2


def test_a_stream_goes_on_in_its_epoch():
    """The epoch that `set_epoch` has set is part of the state."""

    def make(epoch=0):
        source = data("streaming").with_format("numpy").batch(5)
        source.set_epoch(epoch)
        return source

    with prefetch_to_device(make(2)) as batches:
        first, state = rows([next(batches)]), batches.get_state()
        expected = first + rows(batches)
    assert state["source"]["epoch"] == 2
    source = make()
    with prefetch_to_device(source) as batches:
        batches.set_state(state)
        assert rows(batches) == expected[1:]
    assert source.epoch == 2
    assert sorted(itertools.chain(*expected)) == list(range(LENGTH))


def test_a_shuffled_stream_is_resumed_by_replay_only():
    """The state of a stream with a shuffle buffer leaves out the buffer: refused, with the cure that works."""

    def make():
        return data("streaming").shuffle(seed=3, buffer_size=6).with_format("numpy").batch(5)

    with (
        prefetch_to_device(make()) as batches,
        pytest.raises(TypeError, match=r'state leaves out what is in the buffer .*pass resume="replay"'),
    ):
        batches.get_state()
    expected, got = resumed(make, 2, 2, resume="replay")
    assert got == expected


@pytest.mark.parametrize("joined", ["interleave_datasets", "concatenate_datasets"])
def test_a_shuffle_is_found_below_other_streams(joined):
    """The same where a stream that is shuffled is one of several."""
    import datasets

    parts = [data("streaming").shuffle(seed=3, buffer_size=6), data("streaming")]
    source = getattr(datasets, joined)(parts).with_format("numpy").batch(5)
    with (
        prefetch_to_device(source) as batches,
        pytest.raises(TypeError, match=r'state leaves out what is in the buffer .*pass resume="replay"'),
    ):
        batches.get_state()


def test_a_map_style_data_set_is_resumed_by_replay():
    """It has no state of its own."""

    def make():
        return data().shuffle(seed=3).with_format("numpy").batch(5)

    with prefetch_to_device(make()) as batches, pytest.raises(TypeError, match="a Dataset cannot be resumed"):
        batches.get_state()
    expected, got = resumed(make, 2, 2, resume="replay")
    assert got == expected
