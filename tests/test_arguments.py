"""Arguments that cannot be right, and caps too small for the batches: what is wrong, where, and what to do."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from gated import Loader, batch, number, up_to_error

from jaxprefetch import prefetch_to_device

by_size = pytest.mark.parametrize("size", [1, 2, 3])
by_host_size = pytest.mark.parametrize("host_size", [0, 1, 4])
BYTES = batch(0)["x"].nbytes


# ---- caps


@by_size
@by_host_size
@pytest.mark.parametrize(("delete_used", "fit"), [(False, 2), (True, 1)], ids=["keep", "delete_used"])
def test_least_max_bytes_is_enough(size, host_size, delete_used, fit):
    """Two batches have to fit, with `delete_used` one; with that every size delivers all and stays within."""
    cap = fit * BYTES
    with prefetch_to_device(Loader(7), size, host_size=host_size, max_bytes=cap, delete_used=delete_used) as batches:
        assert [number(b) for b in batches] == list(range(7))
        assert batches.statistics().peak_bytes_in_flight <= cap


@by_size
@by_host_size
@pytest.mark.parametrize(
    ("delete_used", "cap", "at", "held"),
    [(False, 2 * BYTES - 1, 1, BYTES), (False, BYTES - 1, 0, 0), (True, BYTES - 1, 0, 0)],
)
def test_too_small_max_bytes_is_an_error(size, host_size, delete_used, cap, at, held):
    """The first batch that cannot fit is an error with its bytes, those held, the cap and the cure."""
    text = (
        rf"Batch {at} needs {BYTES} bytes on a device, {held} are held .* max_bytes is {cap}\. "
        r"Two batches must fit, with prefetch_to_device\(\.\.\., delete_used=True\) one: raise max_bytes, or take"
    )
    with prefetch_to_device(Loader(5), size, host_size=host_size, max_bytes=cap, delete_used=delete_used) as batches:
        assert up_to_error(batches, ValueError, text)[0] == list(range(at))
        up_to_error(batches, ValueError, text)


@by_host_size
def test_batch_that_has_grown_too_large_is_an_error_in_its_place(host_size):
    """Smaller batches before the one that does not fit are delivered."""
    source = [batch(i, rows=4 if i < 3 else 400) for i in range(6)]
    with prefetch_to_device(source, host_size=host_size, max_bytes=1000) as batches:
        assert up_to_error(batches, ValueError, "Batch 3 needs 1,600 bytes on a device")[0] == [0, 1, 2]


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"size": 0}, ValueError, "size: expected an integer of at least 1, got 0"),
        ({"size": -1}, ValueError, "size: expected an integer of at least 1, got -1"),
        ({"size": True}, ValueError, "size: expected an integer of at least 1, got True"),
        ({"size": 2.0}, ValueError, "size: expected an integer of at least 1, got 2.0"),
        ({"size": "2"}, ValueError, "size: expected an integer of at least 1, got '2'"),
        ({"size": None}, ValueError, "size: expected an integer of at least 1, got None"),
        ({"host_size": -1}, ValueError, "host_size: expected an integer of at least 0, got -1"),
        ({"host_size": False}, ValueError, "host_size: expected an integer of at least 0, got False"),
        ({"batch_axis": -1}, ValueError, "batch_axis: expected an integer of at least 0, got -1"),
        ({"last_batch": "skip"}, ValueError, "last_batch: expected one of 'error', 'drop', 'pad', got 'skip'"),
        ({"last_batch": None}, ValueError, "last_batch: expected one of .*, got None"),
        *(
            ({"keep_on_host": value}, TypeError, rf"keep_on_host: expected None, a path .* got {got}\.")
            for value, got in [
                (3, "int 3"),
                (["a", 3], r"list \['a', 3\]"),
                (b"a", "bytes b'a'"),
                ({"a": True}, r"dict \{'a': True\}"),
                (True, "bool True"),
            ]
        ),
        ({"fresh_buffers": "no"}, TypeError, "fresh_buffers: expected True, False or None, got str 'no'"),
        ({"fresh_buffers": 1}, TypeError, "fresh_buffers: expected True, False or None, got int 1"),
        ({"sharding": "data"}, TypeError, "sharding: expected None, a Device, .* got str 'data'"),
        ({"sharding": jax.sharding.PartitionSpec("data")}, ValueError, "needs a mesh in force"),
        *(
            (
                {name: value},
                ValueError,
                rf"{name}: expected bytes as a positive integer .* got {re.escape(repr(value))}",
            )
            for name in ("max_bytes", "max_host_bytes")
            for value in (
                0,
                -1,
                1.5,
                np.int32(0),
                np.True_,
                True,
                "",
                "many",
                "GiB",
                "2 XiB",
                "-1GiB",
                "nan",
                "inf",
                "2GiB each",
            )
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_wrong_argument_is_an_error_at_once(arguments, kind, match):
    """An argument that cannot be right is refused by the call itself, with its name and what it was."""
    with pytest.raises(kind, match=match):
        prefetch_to_device([batch(0)], **arguments)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (np.int64(7), 7),
        (np.uint8(200), 200),
        ("1", 1),
        ("2GiB", 2 << 30),
        ("1.5 KiB", 1536),
        ("3 kB", 3000),
        ("500 MB", 500_000_000),
        (" 7 B", 7),
    ],
)
def test_max_bytes_as_text(text, nbytes):
    """Bytes may be written with a unit, binary or decimal, or be an integer of NumPy's."""
    with prefetch_to_device([], max_bytes=text, max_host_bytes=text) as batches:
        assert batches.statistics().bytes_bound == nbytes


@pytest.mark.parametrize("keep", [None, "a", (), ["a", "b/c"], {"a"}, lambda path, leaf: True], ids=str)
@pytest.mark.parametrize("fresh", [None, True, False])
def test_leaves_to_keep_and_switches_are_taken_as_they_are_documented(keep, fresh):
    """Every documented form of `keep_on_host` and `fresh_buffers` is taken."""
    with prefetch_to_device([], keep_on_host=keep, fresh_buffers=fresh) as batches:
        assert not list(batches)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (batch(0), "source: iterating a dict does not give batches"),
        ("file.npz", "source: iterating a str does not give batches"),
        (b"bytes", "source: iterating a bytes does not give batches"),
        (7, "source: expected an iterable of batches, got int"),
        (None, "source: expected an iterable of batches, got NoneType"),
        (object(), "source: expected an iterable of batches, got object"),
        (iter, "got builtin_function_or_method <built-in function iter>. Call it, and pass what it returns."),
    ],
    ids=["dict", "str", "bytes", "int", "None", "object", "function"],
)
def test_source_that_gives_no_batches_is_an_error_at_once(source, match):
    """What is no iterable of batches is refused by the call itself."""
    with pytest.raises(TypeError, match=re.escape(match)):
        prefetch_to_device(source)
