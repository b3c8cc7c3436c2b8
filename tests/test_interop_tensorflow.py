"""tf.data: eager tensors without a copy before staging, passes, and what has no array form.

pip install ".[test,interop]" && pytest -m interop
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from gated import LIMIT_S, reader_threads
from interop_rows import LENGTH, in_order, rows

from jaxprefetch import batched, prefetch_to_device
from jaxprefetch.host.leaves import as_host

pytestmark = pytest.mark.interop

EXACT = ["bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "float32", "complex64", "bfloat16"]
EXACT += ["float8_e4m3fn", "float8_e5m2"]


def data(**columns: Any) -> Any:
    """All rows, with further columns."""
    import tensorflow as tf

    y = np.arange(LENGTH, dtype=np.int32)
    columns = {"x": np.repeat(y[:, None], 3, 1).astype(np.float32), "y": y} | columns
    return tf.data.Dataset.from_tensor_slices(columns)


def deliver_one(batch: Any, **options: Any) -> Any:
    with prefetch_to_device([batch], **options) as batches:
        (delivered,) = batches
    return delivered


@pytest.mark.parametrize("name", EXACT)
def test_tensors_arrive_bit_by_bit(name):
    """Every dtype of up to 32 bits (64 for complex) arrives with its bits, bfloat16 and float8 among them."""
    import tensorflow as tf

    dtype = np.dtype(name)
    raw = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, 64 * dtype.itemsize, np.uint8)
    batch = raw.view(dtype).reshape(8, 8)
    out = deliver_one({"x": tf.constant(batch)})["x"]  # tf.data itself fails to make a data set of some of these
    assert out.dtype == dtype
    assert np.asarray(out).tobytes() == raw.tobytes()


@pytest.mark.parametrize("host_size", [0, 4])
def test_a_data_set_is_gone_through_pass_by_pass(host_size):
    """Each pass yields the data set from its beginning, with a short last batch, and its thread ends."""
    with prefetch_to_device(data().batch(5).prefetch(2), host_size=host_size) as batches:
        for _ in range(3):
            assert rows(batches) == in_order(5)
            for thread in reader_threads():
                thread.join(LIMIT_S)
                assert not thread.is_alive()


def test_structures_arrive_as_they_are():
    """Tuples and nested dicts keep their structure; 64-bit integers follow JAX's setting."""
    import tensorflow as tf

    elements = ({"a": np.arange(8)}, (np.ones((8, 2)), np.zeros(8, np.uint8)))
    first, _ = prefetch_to_device(tf.data.Dataset.from_tensor_slices(elements).batch(4))
    assert jax.tree.structure(first) == jax.tree.structure(elements)
    assert [leaf.dtype for leaf in jax.tree.leaves(first)] == ["int32", "float32", "uint8"]


def test_tensors_are_not_copied_before_they_are_staged():
    """A leaf is a view of the tensor's memory, and with fresh_buffers a CPU device reads it right there."""
    import tensorflow as tf

    for dtype in (tf.float32, tf.bfloat16):
        tensor = tf.ones(1 << 12, dtype)
        assert np.shares_memory(as_host(tensor, ""), as_host(tensor, ""))
    tensor = tf.ones(1 << 12)
    address = as_host(tensor, "").__array_interface__["data"][0]
    assert deliver_one(tensor, fresh_buffers=True).unsafe_buffer_pointer() == address
    assert deliver_one(tensor).unsafe_buffer_pointer() != address


def test_a_generator_that_reuses_its_memory_is_safe():
    """Tensors that share one array, which is filled over and over: what was delivered does not change."""
    import tensorflow as tf

    def filled():
        x, y = np.empty((4, 3), np.float32), np.empty(4, np.int32)
        for want in in_order(4):
            y[:] = want
            x[:] = y[:, None]
            yield {"x": tf.convert_to_tensor(x), "y": tf.experimental.dlpack.from_dlpack(y.__dlpack__())}

    with prefetch_to_device(filled()) as batches:
        assert rows(list(batches)) == in_order(4)


def test_samples_become_batches():
    """`batched` stacks the elements of a data set."""
    assert rows(prefetch_to_device(batched(data(), 5))) == in_order(5)


def test_what_has_no_array_form_is_refused_with_the_cure():
    """String, ragged and sparse tensors are an error with batch, leaf and cure."""
    import tensorflow as tf

    unfit = [
        (tf.constant(["a", "b"]), "arrays of dtype object cannot go to a device.*keep_on_host"),
        (tf.ragged.constant([[1], [2, 3]]), r"RaggedTensors have no one shape.*ragged\.to_tensor\(\).*keep_on_host"),
        (tf.sparse.from_dense([[1, 0]]), r"SparseTensors .*tf\.sparse\.to_dense\(tensor\).*keep_on_host"),
    ]
    for tensor, message in unfit:
        with prefetch_to_device([{"a": {"t": tf.ones(3)}}, {"a": {"t": tensor}}]) as batches:
            next(batches)
            with pytest.raises(TypeError, match=f"^Batch 1, leaf a/t: {message}"):
                next(batches)


def test_strings_and_ragged_tensors_can_stay_on_the_host():
    """They are delivered as tensors where keep_on_host names them."""
    import tensorflow as tf

    words = data(s=[f"s{i}" for i in range(LENGTH)], r=tf.ragged.range(np.arange(LENGTH))).batch(4)
    with prefetch_to_device(words, keep_on_host=["s", "r"]) as batches:
        delivered = list(batches)
    assert rows(delivered) == in_order(4)
    assert delivered[1]["s"].numpy().tolist() == [b"s4", b"s5", b"s6", b"s7"]
    assert delivered[0]["r"].to_list() == [[], [0], [0, 1], [0, 1, 2]]


def test_an_error_of_the_data_set_keeps_its_place():
    """TensorFlow's own error comes after the batches before it."""
    import tensorflow as tf

    checked = data().map(lambda row: {**row, "x": tf.debugging.check_numerics(row["x"] / (13.0 - row["x"]), "found")})
    delivered = []
    with (
        prefetch_to_device(checked.batch(4)) as batches,
        pytest.raises(tf.errors.InvalidArgumentError, match="found : Tensor had Inf"),
    ):
        for batch in batches:
            delivered.append(batch["y"])
    assert [np.asarray(y).tolist() for y in delivered] == in_order(4)[:3]


def test_resume_by_replay_with_a_seeded_shuffle():
    """A data set has no state to resume by; replay repeats its passes, each of which a seed shuffles anew."""

    def shuffled():
        return data().shuffle(LENGTH, seed=7).batch(4)

    with prefetch_to_device(shuffled()) as batches, pytest.raises(TypeError, match=r"a _\w+Dataset cannot be resumed"):
        batches.get_state()
    with prefetch_to_device(shuffled(), resume="replay") as batches:
        first = rows(batches)
        second = rows([next(iter(batches)), next(batches)])
        state = batches.get_state()
        expected = rows(batches), rows(batches)
    assert sorted(itertools.chain(*first)) == list(range(LENGTH))
    assert second != first[:2]
    with prefetch_to_device(shuffled(), resume="replay") as batches:
        batches.set_state(state)
        assert (rows(batches), rows(batches)) == expected


def test_replay_of_an_unseeded_shuffle_is_refused():
    """A shuffle without a seed does not repeat its order, wherever it is in the pipeline."""
    with pytest.raises(ValueError, match=r"shuffles without a seed, .*shuffle\(\.\.\., seed=0\)"):
        prefetch_to_device(data().shuffle(4).batch(4).prefetch(1), resume="replay")
