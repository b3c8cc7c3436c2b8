"""Rows: what last_batch does with batches that have fewer, or more, of them than the first."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device
from jaxprefetch.host.batching import LastBatch

P = PartitionSpec


def named(*axes: Any, shape: tuple[int, int] = (4, 2)) -> NamedSharding:
    devices = np.array(jax.devices()[: shape[0] * shape[1]])
    return NamedSharding(Mesh(devices.reshape(shape), ("data", "model")), P(*axes))


def rows(n: int, number: int = 0) -> np.ndarray:
    """A batch of `n` rows of three, none of them zero."""
    return np.arange(1, 3 * n + 1, dtype=np.float32).reshape(n, 3) + 100 * number


def batches_of(*counts: int) -> list[dict[str, np.ndarray]]:
    return [{"x": rows(n, number), "y": np.full(n, number, np.int32)} for number, n in enumerate(counts)]


def take(source: Any, **options: Any) -> list[Any]:
    with prefetch_to_device(source, **options) as batches:
        return list(batches)


def assert_padded(out: Any, raw: np.ndarray, to: int, axis: int = 0) -> None:
    """`out` is `raw` with zeros up to `to` rows."""
    widths = [(0, to - raw.shape[axis] if i == axis else 0) for i in range(raw.ndim)]
    np.testing.assert_array_equal(np.asarray(out), np.pad(raw, widths))
    assert out.dtype == raw.dtype


# ---- error


def test_error_delivers_every_batch_that_divides() -> None:
    """By default batches of any size that divides over the devices are delivered as they are."""
    source = batches_of(8, 4, 12, 8)
    for out, raw in zip(take(source, sharding=named("data")), source, strict=True):
        jax.tree.map(np.testing.assert_array_equal, out, raw)


def test_error_checks_nothing_where_no_leaf_is_split() -> None:
    """Without a leaf that is split by rows there is nothing to check."""
    for sharding in (None, jax.devices()[1], named(), named(None, None)):
        assert [len(out["x"]) for out in take(batches_of(8, 3, 5), sharding=sharding)] == [8, 3, 5]


# ---- drop


@pytest.mark.parametrize("sharding", [None, "split"])
@pytest.mark.parametrize("counts", [(8, 8, 4), (8, 8, 8), (8, 8, 1), (8,), ()])
def test_drop_leaves_out_a_short_last_batch(counts: tuple[int, ...], sharding: str | None) -> None:
    """A last batch with fewer rows than batch 0 is not delivered, whether it divides or not; pass after pass."""
    with prefetch_to_device(batches_of(*counts), sharding=named("data") if sharding else None, last_batch="drop") as it:
        for _ in range(3):
            assert [len(out["x"]) for out in it] == [n for n in counts if n == 8]


def test_drop_of_a_short_batch_in_the_middle_is_an_error() -> None:
    """A short batch that another follows is an error that names it, after the batches before it."""
    with prefetch_to_device(batches_of(8, 8, 4, 8), last_batch="drop") as batches:
        next(batches)
        next(batches)
        with pytest.raises(ValueError, match="Batch 2: 4 rows where batch 0 has 8, and it is not the last") as caught:
            next(batches)
        assert not getattr(caught.value, "__notes__", [])  # of the batch at which that was found


@pytest.mark.parametrize("at", ["pull", "stage"])
@pytest.mark.parametrize("counts", [(8, 8, 4, 8), (8, 8, 4, 8, 8, 8), (8, 8, 4)])
def test_drop_after_a_ctrl_c_behind_the_short_batch(monkeypatch: Any, counts: tuple[int, ...], at: str) -> None:
    """The short batch is not forgotten: an error where another follows, else the end; nothing comes after it."""
    interrupts = [KeyboardInterrupt, KeyboardInterrupt]

    def strike(number: int) -> None:
        if number == 3 and interrupts:
            raise interrupts.pop()

    class Source:
        def __init__(self) -> None:
            self.pulled = 0

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> Any:
            strike(self.pulled if at == "pull" else 0)
            if self.pulled == len(counts):
                raise StopIteration
            self.pulled += 1
            return batches_of(*counts)[self.pulled - 1]

    admit = LastBatch.admit

    def struck(policy: LastBatch, number: int, rows: int, shards: int) -> int | None:
        strike(number if at == "stage" else 0)
        return admit(policy, number, rows, shards)

    monkeypatch.setattr(LastBatch, "admit", struck)
    with prefetch_to_device(Source(), last_batch="drop", host_size=0, size=1) as batches:
        assert [len(next(batches)["x"]) for _ in range(2)] == [8, 8]
        while len(interrupts) > (2 if at == "stage" and len(counts) == 3 else 0):
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        for _ in range(2):
            with pytest.raises(StopIteration if len(counts) == 3 else ValueError, match=r"Batch 2: 4 rows|^$"):
                next(batches)


def test_drop_goes_by_the_rows_of_batch_0() -> None:
    """Batches larger than batch 0 are delivered, and batch 0 itself has to divide."""
    assert [len(out["x"]) for out in take(batches_of(4, 8, 12, 2), last_batch="drop")] == [4, 8, 12]
    with pytest.raises(ValueError, match="Batch 0, leaf x: axis 0 has 6 rows"):
        take(batches_of(6, 6), sharding=named("data"), last_batch="drop")


# ---- pad


@pytest.mark.parametrize("sharding", [None, "device", "split"])
@pytest.mark.parametrize("counts", [(8, 8, 8), (8, 8, 5), (8, 8, 1), (8, 3, 8, 1), (6, 6, 5), (1,)])
def test_pad_gives_every_batch_the_same_rows(counts: tuple[int, ...], sharding: str | None) -> None:
    """Every batch has the rows of batch 0, rounded up to the shards, and says which are real; pass after pass."""
    target = {None: None, "device": jax.devices()[2], "split": named("data")}[sharding]
    whole = -(-counts[0] // 4) * 4 if sharding == "split" else counts[0]
    source = batches_of(*counts)
    with prefetch_to_device(source, sharding=target, last_batch="pad") as batches:
        for _ in range(2):
            for out, raw in zip(batches, source, strict=True):
                assert set(out) == {"x", "y", "mask"}
                assert_padded(out["x"], raw["x"], whole)
                assert_padded(out["y"], raw["y"], whole)
                assert_padded(out["mask"], np.ones(len(raw["x"]), bool), whole)


def test_pad_compiles_one_step() -> None:
    """Padded and whole batches are served by one compiled step, whether or not batch 0 was whole."""
    for counts in ((8, 8, 5), (6, 6, 1)):
        step = jax.jit(lambda batch: (batch["x"].sum(axis=1) * batch["mask"]).sum())
        source = batches_of(*counts)
        for out, raw in zip(take(source, sharding=named("data"), last_batch="pad"), source, strict=True):
            with jax.numpy_dtype_promotion("standard"):
                assert float(step(out)) == raw["x"].sum()
        assert step._cache_size() == 1


class Pair(NamedTuple):
    x: Any
    label: Any


@pytest.mark.parametrize("batch", [rows(8), Pair(rows(8), None), [rows(8), 3], (rows(8), "text")])
def test_pad_puts_the_mask_beside_other_batches(batch: Any) -> None:
    """A batch that is no dict becomes (batch, mask)."""
    (out,) = take([batch], last_batch="pad", keep_on_host=lambda path, leaf: isinstance(leaf, str))
    inner, mask = out
    assert jax.tree.structure(inner) == jax.tree.structure(batch)
    np.testing.assert_array_equal(np.asarray(jax.tree.leaves(inner)[0]), rows(8))
    np.testing.assert_array_equal(np.asarray(mask), np.ones(8, bool))


def test_pad_uses_mask_key() -> None:
    """mask_key names the mask, and is free to sort anywhere among the batch's keys."""
    for key in ("A", "x_", "z"):
        (out,) = take(batches_of(4), last_batch="pad", mask_key=key)
        assert set(out) == {"x", "y", key}
        assert out[key].dtype == bool
        np.testing.assert_array_equal(np.asarray(out["x"]), rows(4))


@pytest.mark.parametrize("key", ["x", "y"])
def test_pad_does_not_replace_a_leaf(key: str) -> None:
    """A batch that has the mask's key already is an error with the cure."""
    with pytest.raises(ValueError, match=f"Batch 0: padding adds the mask as '{key}', .* another mask_key"):
        take(batches_of(4), last_batch="pad", mask_key=key)


@pytest.mark.parametrize(
    ("spec", "axis", "mask_spec"),
    [
        (P("data"), 0, P("data")),
        (P("data", "model"), 0, P("data")),
        (P(("data", "model")), 0, P(("data", "model"))),
        (P("model", "data"), 1, P("data")),
        (P(None, "model"), 1, P("model")),
    ],
)
def test_the_mask_is_sharded_like_the_rows(spec: P, axis: int, mask_spec: P) -> None:
    """The mask is split as the batch axis is, and committed."""
    batch = np.moveaxis(np.ones((8, 8, 2), np.float32), 0, axis)
    (out,) = take([{"x": batch}], sharding=named(*spec), last_batch="pad", batch_axis=axis)
    assert out["mask"].sharding.is_equivalent_to(named(*mask_spec), 1)
    assert out["mask"].committed


@pytest.mark.parametrize("host_size", [0, 4])
def test_pad_leaves_a_table_alone_that_is_as_long_as_a_short_batch(host_size: int) -> None:
    """Which leaves have rows is told by the first batch."""
    source = [{"x": np.ones((rows, 2), np.float32), "z": np.arange(3)} for rows in (4, 3, 2)]
    sharding = {"x": named("data", shape=(1, 1)), "z": named(shape=(1, 1))}
    with prefetch_to_device(source, last_batch="pad", host_size=host_size, sharding=sharding) as batches:
        for out in batches:
            assert out["x"].shape == (4, 2)
            np.testing.assert_array_equal(out["z"], np.arange(3))


@pytest.mark.parametrize("last_batch", ["drop", "pad"])
@pytest.mark.parametrize("sharding", [None, "replicated"])
def test_rows_that_nothing_tells_are_an_error(last_batch: Any, sharding: str | None) -> None:
    """Which of several lengths is that of the rows is not guessed, least of all by the order of the names."""
    source = [{"epoch": np.array([3]), "x": rows(n)} for n in (8, 8, 4)]
    placed = None if sharding is None else named()
    with (
        prefetch_to_device(source, last_batch=last_batch, sharding=placed) as batches,
        pytest.raises(ValueError, match=r"Batch 0: .*along axis 0 epoch has 1, x has 8\. Say which leaves have rows"),
    ):
        next(batches)
    told = {"epoch": named(shape=(1, 1)), "x": named("data", shape=(1, 1))}
    out = take(source, last_batch=last_batch, sharding=told)
    assert [len(batch["x"]) for batch in out] == ([8, 8, 8] if last_batch == "pad" else [8, 8])
    if last_batch == "pad":
        np.testing.assert_array_equal(np.asarray(out[2]["mask"]), np.arange(8) < 4)


@pytest.mark.parametrize("sharding", [None, "split"])
@pytest.mark.parametrize("last_batch", ["drop", "pad"])
def test_unequal_rows_of_a_short_batch_are_an_error(last_batch: Any, sharding: str | None) -> None:
    """Five images and four labels, where both had eight: no padding makes them fit."""
    source = [*batches_of(8), {"x": rows(5), "y": np.zeros(4, np.int32)}]
    with prefetch_to_device(source, last_batch=last_batch, sharding=sharding and named("data")) as batches:
        next(batches)
        with pytest.raises(ValueError, match="Batch 1, leaf y: 4 rows where leaf x has 5; before both had 8"):
            next(batches)


def test_a_table_that_is_as_long_as_the_first_batch_stays_whole() -> None:
    """It had the rows by chance, and keeps its length."""
    source = [{"x": rows(n), "table": np.arange(8)} for n in (8, 5)]
    told = {"x": named("data", shape=(1, 1)), "table": named(shape=(1, 1))}
    *_, out = take(source, last_batch="pad", sharding=told)
    np.testing.assert_array_equal(np.asarray(out["table"]), np.arange(8))
    assert_padded(out["x"], rows(5), 8)


def test_pad_leaves_other_leaves_alone() -> None:
    """Leaves without the batch's rows are not padded: other lengths, no axis, numbers, kept ones, None."""
    batch = {"x": rows(5), "table": rows(4), "scale": np.float32(2), "n": 3, "ids": np.arange(5), "none": None}
    source = [{**batch, "x": rows(8), "ids": np.arange(8)}, batch]
    with prefetch_to_device(
        source,
        last_batch="pad",
        keep_on_host="ids",
        sharding={"x": named("data")} | dict.fromkeys(["table", "scale", "n", "ids", "none"]),
    ) as batches:
        assert batches.element_spec["ids"].shape == (8,)
        _, out = batches
    assert_padded(out["x"], rows(5), 8)
    for name in ("table", "scale", "n", "ids"):
        np.testing.assert_array_equal(np.asarray(out[name]), batch[name])
    assert isinstance(out["ids"], np.ndarray)
    np.testing.assert_array_equal(np.asarray(out["mask"]), np.arange(8) < 5)


@pytest.mark.parametrize("short", [5, 8])
def test_kept_leaves_are_described_as_they_are(short: int) -> None:
    """element_spec of a kept leaf shows the rows that are delivered, not padded ones."""
    source = [{"x": rows(short), "ids": np.arange(short)}]
    with prefetch_to_device(source, sharding=named("data"), last_batch="pad", keep_on_host="ids") as batches:
        assert batches.element_spec["ids"].shape == next(batches)["ids"].shape == (short,)


def test_pad_refuses_more_rows_than_the_first() -> None:
    """A batch that has more rows than every batch gets is an error in its place."""
    with prefetch_to_device(batches_of(6, 7), sharding=named("data"), last_batch="pad") as batches:
        next(batches)
        with pytest.raises(ValueError, match="Batch 1: 7 rows where batch 0 has 6: padding gives"):
            next(batches)


@pytest.mark.parametrize("sharding", [None, "split"])
def test_pad_along_another_axis(sharding: str | None) -> None:
    """batch_axis says which axis is padded."""
    source = [{"x": np.ascontiguousarray(rows(n).T), "y": np.arange(n)} for n in (8, 5)]
    options = {"last_batch": "pad", "batch_axis": 1, "sharding": named(None, "data") if sharding else None}
    for out, raw in zip(take(source, **options), source, strict=True):
        assert_padded(out["x"], raw["x"], 8, axis=1)
        np.testing.assert_array_equal(np.asarray(out["y"]), raw["y"])
        np.testing.assert_array_equal(np.asarray(out["mask"]), np.arange(8) < len(raw["y"]))


@pytest.mark.parametrize("columns", [3, 300, 20_000])
@pytest.mark.parametrize("delete_used", [False, True])
@pytest.mark.parametrize("sharding", [None, "split"])
@pytest.mark.parametrize("device", [None, 3])
def test_pad_of_arrays_of_the_source(device: int | None, sharding: str | None, delete_used: bool, columns: int) -> None:
    """A jax.Array is padded into a new one where whole ones go; the source's own stays alive."""
    target = device and jax.devices()[device]
    made = [jax.device_put(np.tile(rows(n), columns), target) for n in (8, 5)]
    options = {"sharding": named("data") if sharding else None, "last_batch": "pad", "delete_used": delete_used}
    taken, placed = [], []
    with prefetch_to_device([{"x": array} for array in made], **options) as batches:
        for out in batches:
            taken.append(np.array(out["x"]))
            placed.append((out["x"].sharding, out["x"].committed))
    for out, raw in zip(taken, made, strict=True):
        assert_padded(out, np.asarray(raw), 8)
    assert placed[0] == placed[1]


def test_pad_of_typed_keys() -> None:
    """Typed PRNG keys cannot be padded; the error names the leaf and the way out."""
    keys = [jax.random.split(jax.random.key(0), n) for n in (4, 3)]
    source = [{"x": rows(len(key)), "keys": key} for key in keys]
    with prefetch_to_device(source, last_batch="pad") as batches:
        assert next(batches)["keys"] is keys[0]
        with pytest.raises(TypeError, match=r"Batch 1, leaf keys: typed PRNG keys can neither be padded .*key_data"):
            next(batches)


# ---- what is said


@pytest.mark.parametrize(
    ("last_batch", "counts", "first"),
    [
        *((mode, (8, 8, 8), None) for mode in ("error", "drop", "pad")),
        ("error", (8, 8, 4), 2),
        ("error", (8, 4, 12, 8, 4), 1),
        ("drop", (8, 8, 4), None),
        ("drop", (4, 8, 12, 4, 3), 1),
        ("pad", (8, 8, 4), None),
        ("pad", (8, 4, 8, 4), None),
    ],
)
def test_changing_shapes_are_said_once(last_batch: Any, counts: Any, first: int | None, caplog: Any) -> None:
    """Batches that are delivered in changing shapes are said once, and those that are delivered in one shape never."""
    with prefetch_to_device(batches_of(*counts), last_batch=last_batch) as batches:
        for _ in range(2):
            assert len({out["x"].shape for out in batches}) > 1 or first is None
    said = [record.getMessage() for record in caplog.records if "compiled anew" in record.getMessage()]
    assert len(said) == (first is not None)
    assert first is None or said[0].startswith(f"jaxprefetch: batch {first} has other shapes")


@pytest.mark.parametrize(
    ("other", "told", "pads"),
    [
        ({"x": (4, 2), "y": (4,)}, "(leaf x was float32[8, 2] and is float32[4, 2], leaf y was float32[8]", True),
        ({"x": (8, 2)}, "(expected x, y, got x: y is missing).", False),
        ({"x": (4, 2)}, "(expected x, y, got x: y is missing; leaf x was float32[8, 2]", False),
        ({"x": (8, 3), "y": (8,)}, "(leaf x was float32[8, 2] and is float32[8, 3]).", False),
    ],
)
def test_padding_is_advised_where_rows_alone_differ(other: Any, told: str, pads: bool, caplog: Any) -> None:
    """Missing keys, and axes other than that of the rows, no `last_batch` mends."""
    shapes = [{"x": (8, 2), "y": (8,)}, other]
    take([{name: np.zeros(shape, np.float32) for name, shape in batch.items()} for batch in shapes])
    (said,) = [record.getMessage() for record in caplog.records]
    assert told in said
    assert ("last_batch='pad'" in said) == pads


def test_other_dtypes_with_the_same_result_are_not_said(caplog: Any) -> None:
    """What arrives in the same shape and dtype needs no new compilation, so nothing is said."""
    assert len({out.dtype for out in take([np.zeros(4, dtype) for dtype in ("i8", "i4", ">i4")])}) == 1
    assert not caplog.records


# ---- the model


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    shards=st.sampled_from([None, 1, 2, 4, 8]),
    size=st.integers(1, 3),
    host_size=st.sampled_from([0, 1, 4]),
    inner=st.integers(0, 3),
)
def test_pad_is_what_numpy_pads(counts: list[int], shards: int | None, size: int, host_size: int, inner: int) -> None:
    """Padding is np.pad to the rows of batch 0, rounded up, with the mask of real rows, or an error where too large."""
    source = [{"x": np.full((n, inner), number + 1, np.int32), "n": n} for number, n in enumerate(counts)]
    target = None if shards is None else named("data", shape=(shards, 1))
    whole = -(-counts[0] // (shards or 1)) * (shards or 1)
    fitting = next((i for i, n in enumerate(counts) if n > counts[0]), len(counts))
    with prefetch_to_device(source, size, sharding=target, last_batch="pad", host_size=host_size) as batches:
        for raw in source[:fitting]:
            out = next(batches)
            assert_padded(out["x"], raw["x"], whole)
            assert out["n"] == raw["n"]
            np.testing.assert_array_equal(np.asarray(out["mask"]), np.arange(whole) < raw["n"])
        if fitting < len(counts):
            with pytest.raises(ValueError, match=f"Batch {fitting}: {counts[fitting]} rows where batch 0"):
                next(batches)
        else:
            with pytest.raises(StopIteration, match=r"^$"):
                next(batches)
