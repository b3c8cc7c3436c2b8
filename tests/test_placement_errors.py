"""Shardings that cannot be, and batches that do not fit them: what is wrong, where, and what to do."""

from __future__ import annotations

import collections
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device

P = PartitionSpec


def named(*axes: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")), P(*axes))


@pytest.mark.parametrize("sharding", [P("data"), P(), {"x": P("data"), "y": None}])
def test_a_partition_spec_needs_a_mesh(sharding: Any) -> None:
    """A PartitionSpec without a mesh in force is an error at the call, with the cure."""
    with pytest.raises(ValueError, match=r"sharding=.* needs a mesh in force: .* `with jax.set_mesh\(mesh\):`"):
        prefetch_to_device([], sharding=sharding)


@pytest.mark.parametrize("sharding", ["data", 3, object(), {"x": "data"}, [jax.devices, None]])
def test_what_is_no_sharding_is_refused(sharding: Any) -> None:
    """Anything but a placement is a TypeError at the call, with what it got."""
    with pytest.raises(TypeError, match=r"sharding: expected None, a Device, a Sharding, a PartitionSpec .* got"):
        prefetch_to_device([], sharding=sharding)


def test_a_mesh_is_no_sharding() -> None:
    """A Mesh, which says nothing of axes, is a TypeError at the call."""
    with pytest.raises(TypeError, match=r"sharding: expected .* got Mesh"):
        prefetch_to_device([], sharding=named().mesh)


@pytest.mark.parametrize("nothing", [None, {}, ()], ids=str)
def test_what_has_no_leaves_is_not_told_to_be_missing(nothing: Any) -> None:
    """A part of the batch without leaves is there, and fits any placement: only what is wrong is named."""
    batch, prefix = {"x": nothing, "y": np.zeros(8)}, {"x": None, "y": None}
    with prefetch_to_device([batch, batch | {"z": np.zeros(8)}], sharding=prefix) as batches:
        assert next(batches)["x"] == nothing
        with pytest.raises(ValueError, match=r"Batch 1: sharding .*: expected x, y, got x, y, z: z is too many"):
            next(batches)


@pytest.mark.parametrize(
    ("prefix", "told"),
    [
        ({"x": None}, "expected x, got x, y: y is too many"),
        ({"x": None, "y": None, "z": None}, "expected x, y, z, got x, y: z is missing"),
        ([None] * 12, "expected 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more, got x, y: 0, 1, .* x, y are too many"),
        ({"x": [None], "y": None}, "expected x/0, y, got x, y: x/0 is missing, x is too many"),
        ({"x": {}, "y": None}, "expected y, got x, y: x is too many"),
        ((), "expected none, got x, y: x, y are too many"),
        (collections.OrderedDict(x=None, y=None), r"PyTreeDef\(.*OrderedDict.* of PyTreeDef\({'x': "),
    ],
)
def test_a_prefix_that_does_not_match_is_an_error(prefix: Any, told: str) -> None:
    """A tree of shardings that is no prefix of a batch is an error in the place of that batch."""
    batch = {"x": np.zeros(8), "y": np.zeros(8)}
    with (
        prefetch_to_device([batch], sharding=prefix) as batches,
        pytest.raises(ValueError, match=f"Batch 0: sharding .*: {told}"),
    ):
        next(batches)


@pytest.mark.parametrize(
    ("prefix", "batch", "told"),
    [
        (
            [None, None],
            (1, 2),
            r": sharding is .*: it is a list, the batch a tuple\. Pass a tuple, or pass one .* for se",
        ),
        ((None, None), [1, 2], ": sharding is .*: it is a tuple, the batch a list. Pass a list, or pass one"),
        (
            {"x": [None]},
            {"x": (1,)},
            r": .* PyTreeDef\({'x': \[\*\]}\) of .*\(\*,\)}\)\. Pass the batch's own structure, or pass",
        ),
        (
            jax.devices(),
            {"x": 1},
            r": sharding is a list of 8 devices, one for each part .* over them pass NamedSharding\(mesh, ",
        ),
        (
            tuple(jax.devices()[:2]),
            [1, 2],
            ": sharding is a list of 2 devices, one for each part",
        ),
        (
            {},
            {"x": 1},
            ": sharding is not .* x is too many. Yield the keys that it has, or pass one .* for several dev",
        ),
    ],
)
def test_what_is_told_of_a_prefix_is_what_is_wrong_with_it(prefix: Any, batch: Any, told: str) -> None:
    """A list for a tuple is no matter of keys; a list of devices is meant to be split over."""
    with prefetch_to_device([batch], sharding=prefix) as batches, pytest.raises(ValueError, match=f"^Batch 0{told}"):
        next(batches)


@pytest.mark.parametrize("inner", [None, "placement"])
def test_a_prefix_covers_subtrees_and_none(inner: str | None) -> None:
    """One entry of a prefix serves a whole subtree of the batch, also where the batch has None leaves."""
    place = jax.devices()[4] if inner else None
    batch = {"a": {"x": np.zeros(8), "gone": None, "list": [np.zeros((8, 2)), np.zeros(())]}, "b": (None, np.zeros(8))}
    with prefetch_to_device([batch], sharding={"a": named("data"), "b": (place, place)}) as batches:
        out = next(batches)
    assert out["a"]["x"].sharding == named("data")
    assert out["a"]["list"][0].sharding == named("data")
    assert out["a"]["list"][1].sharding == named()
    assert out["a"]["gone"] is None
    assert out["b"][0] is None
    assert out["b"][1].committed == (inner is not None)


def test_axes_that_a_leaf_lacks_are_left_out() -> None:
    """One batch sharding fits leaves of any rank."""
    batch = [np.zeros((8, 2, 6)), np.zeros((8, 4)), np.zeros(8), np.zeros(()), 3, np.float32(2)]
    with prefetch_to_device([batch], sharding=named("data", None, "model")) as batches:
        out = next(batches)
    specs = [named("data", None, "model"), named("data"), named("data"), named(), named(), named()]
    for array, sharding in zip(out, specs, strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


@pytest.mark.parametrize("kept", [[], [5], [4, 8]])
def test_rows_that_do_not_divide_are_an_error(kept: list[int]) -> None:
    """The error names batch, leaf, axis, rows, devices, mesh axis and cure, after the batches before it."""
    source = [{"image": {"rgb": np.zeros((rows, 3))}} for rows in (*([8] * len(kept)), 6)]
    text = (
        f"Batch {len(kept)}, leaf image/rgb: axis 0 has 6 rows; the 4 devices along mesh axis 'data' need a multiple "
        "of 4. prefetch_to_device(..., last_batch='pad') fills a short last batch up and adds a mask, 'drop' leaves it "
        "out; else batch to a multiple of 4."
    )
    with prefetch_to_device(source, sharding=named("data")) as batches:
        for _ in kept:
            next(batches)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                next(batches)


def test_rows_over_two_mesh_axes_that_do_not_divide() -> None:
    """Rows split over several mesh axes name all of them."""
    text = "leaf batch: axis 0 has 12 rows; the 8 devices along mesh axis 'data' x 'model' need a multiple of 8"
    with (
        prefetch_to_device([np.zeros(12)], sharding=named(("data", "model"))) as batches,
        pytest.raises(ValueError, match=text),
    ):
        next(batches)


def test_inner_axes_that_do_not_divide_are_an_error() -> None:
    """For an axis that is not the rows the cure is another one."""
    text = r"leaf x: axis 1 has 3 \w+; the 2 devices along mesh axis 'model' need a multiple of 2. Pad that axis"
    with (
        prefetch_to_device([{"x": np.zeros((8, 3))}], sharding=named("data", "model")) as batches,
        pytest.raises(ValueError, match=text),
    ):
        next(batches)


@pytest.mark.parametrize("axis", ["rows", "inner"])
def test_moved_arrays_that_do_not_divide_are_an_error(axis: str) -> None:
    """The same holds for a jax.Array of the source's own."""
    shape, spec = ((6, 2), ("data",)) if axis == "rows" else ((8, 3), (None, "model"))
    made = jax.device_put(np.zeros(shape, np.float32))
    with (
        prefetch_to_device([{"x": made}], sharding=named(*spec)) as batches,
        pytest.raises(ValueError, match=r"Batch 0, leaf x: axis \d has \d \w+; the \d devices along mesh axis"),
    ):
        next(batches)


def test_batches_before_the_bad_one_are_right() -> None:
    """All batches before one that cannot be placed are delivered with their values."""
    source = [np.full(rows, rows, np.float32) for rows in (4, 8, 12, 5)]
    with prefetch_to_device(source, sharding=named("data"), size=3) as batches:
        for raw in source[:3]:
            np.testing.assert_array_equal(np.asarray(next(batches)), raw)
        with pytest.raises(ValueError, match="Batch 3, leaf batch: axis 0 has 5 rows"):
            next(batches)


@pytest.mark.parametrize("last_batch", ["error", "drop", "pad"])
def test_unequal_rows_in_a_batch_are_told_as_such(last_batch: Any) -> None:
    """More images than labels are no short batch, which padding would cure."""
    text = "leaf y: axis 0 has 15 rows; .* Other leaves have 16: give all leaves of a batch that are split by rows"
    batches = prefetch_to_device(
        [{"x": np.zeros((16, 3)), "y": np.zeros(15)}], sharding=named("data"), last_batch=last_batch
    )
    with batches, pytest.raises(ValueError, match=text):
        next(batches)
