"""Sources that write their batches themselves, into the memory that they are sent from."""

from __future__ import annotations

import functools
import gc
import tracemalloc
import types
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from assembling import Reads, Rows, Sent, address
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device
from jaxprefetch.device import packing
from jaxprefetch.host import pipeline
from jaxprefetch.host.copying import Copier

by_host_size = pytest.mark.parametrize("host_size", [0, 4])


def split(*axes: Any) -> NamedSharding:
    """Eight devices along `data`."""
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec(*(axes or ("data",))))


def arrays(rows: int) -> dict[str, np.ndarray]:
    """Leaves that are written where they are sent from, no two rows alike."""
    x = np.arange(1, rows * 6 + 1, dtype=np.float32).reshape(rows, 2, 3)
    return {"x": x, "y": np.arange(rows, dtype=np.int32)}


def parts(tree: Any, size: int) -> list[Any]:
    """The same rows as batches."""
    rows = len(jax.tree.leaves(tree)[0])
    return [jax.tree.map(lambda a, at=at: a[at : at + size], tree) for at in range(0, rows, size)]


def assert_same(batches: Any, expected: Any) -> None:
    for out, raw in zip(batches, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(out), raw)


def taken_through_two_interrupts(batches: Any) -> list[Any]:
    """All batches, of which the second is interrupted twice."""
    taken = [next(batches)]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    taken += batches
    return taken


# ---- what arrives


@by_host_size
@pytest.mark.parametrize("sharding", [None, "split"])
def test_rows_of_a_memory_mapped_file(tmp_path, host_size, sharding) -> None:
    """A file is read into the batches that are sent, pass after pass; the source's own iteration is not used."""
    images = np.random.default_rng(0).integers(0, 255, (40, 5, 3), np.uint8)
    np.save(tmp_path / "images.npy", images)
    source = Rows({"image": np.load(tmp_path / "images.npy", mmap_mode="r")}, 16)
    target = split() if sharding else None
    with prefetch_to_device(source, sharding=target, host_size=host_size) as batches:
        assert batches.element_spec["image"].shape == (16, 5, 3)
        for _ in range(3):
            assert_same(batches, parts({"image": images}, 16))
        assert batches.statistics().pulled == 9
    assert [reads.calls for reads in source.passes] == [4, 4, 4]
    assert all(reads.closed for reads in source.passes)


@by_host_size
@pytest.mark.parametrize("last_batch", ["error", "pad", "drop"])
@pytest.mark.parametrize("sharding", [None, "split"])
@pytest.mark.parametrize("rows", [32, 24, 8, 0])
def test_short_ends(monkeypatch, rows, sharding, last_batch, host_size) -> None:
    """What was written is sent from where it lies, short or padded with zeros: no leaf is copied a second time."""
    sent, source = Sent(monkeypatch), Rows(arrays(rows), 16)
    options = {"sharding": split() if sharding else None, "last_batch": last_batch, "host_size": host_size}
    expected = parts(arrays(rows), 16)
    if last_batch == "drop":
        expected = [raw for raw in expected if len(raw["y"]) == len(expected[0]["y"])]
    with prefetch_to_device(source, **options) as batches:
        for _ in range(2):
            sent.addresses.clear()
            count = 0
            for out, raw in zip(batches, expected, strict=True):
                mask = out.pop("mask", None)
                real = len(raw["y"])
                jax.tree.map(lambda a, b, n=real: np.testing.assert_array_equal(np.asarray(a)[:n], b), out, raw)
                assert mask is None or np.asarray(mask).tolist() == [i < real for i in range(len(out["x"]))]
                assert not np.asarray(out["x"])[real:].any()
                assert not np.asarray(out["y"])[real:].any()
                count += 1
            names = sorted([*arrays(1), *(["mask"] if last_batch == "pad" else [])])
            for put, written in zip(sent.addresses, source.passes[-1].written[:count], strict=True):
                put = dict(zip(names, put, strict=True))
                assert [put["x"], put["y"]] == written
        assert count == len(expected)


def test_pad_goes_by_the_rows_that_are_written(monkeypatch) -> None:
    """A first batch that is short of its description is padded to its own rows, rounded up to the shards."""
    Sent(monkeypatch)
    with prefetch_to_device(Rows(arrays(9), 32), sharding=split(), last_batch="pad") as batches:
        (out,) = batches
    assert out["x"].shape == (16, 2, 3)
    np.testing.assert_array_equal(np.asarray(out["x"])[:9], arrays(9)["x"])
    assert np.asarray(out["mask"]).sum() == 9


def test_a_short_batch_that_does_not_divide_is_an_error() -> None:
    """Rows that the devices cannot share are refused as those of any other batch."""
    with (
        prefetch_to_device(Rows(arrays(20), 16), sharding=split()) as batches,
        pytest.raises(ValueError, match="Batch 1, leaf x: axis 0 has 4 rows; the 8 devices"),
    ):
        list(batches)


class Changing(Reads):
    """Describes each batch anew: the shapes of the next array."""

    def __init__(self, batches: list[Any]):
        super().__init__(None, 0)
        self.batches = batches

    @property
    def element_spec(self) -> Any:
        if self.at == len(self.batches):
            raise StopIteration
        return self.batches[self.at]

    def read_into(self, out: Any) -> int:
        self.calls += 1
        jax.tree.map(np.copyto, out, self.batches[self.at])
        self.written.append([address(leaf) for leaf in jax.tree.leaves(out)])
        self.at += 1
        return len(jax.tree.leaves(out)[0])


@by_host_size
def test_changing_shapes_reuse_slots(monkeypatch, host_size) -> None:
    """200 batches of changing lengths arrive whole, from a bounded number of bytes of host memory."""
    sent = Sent(monkeypatch)
    lengths = np.random.default_rng(0).choice([700, 800, 900, 1000], 200)
    raw = [{"tokens": np.full((64, n), i, np.int32), "n": np.full(64, n, np.int32)} for i, n in enumerate(lengths)]
    with prefetch_to_device(Changing(raw), host_size=host_size) as batches:
        assert_same(batches, raw)
        largest = max(batch["tokens"].nbytes for batch in raw)
        assert sent.slots.mapped_bytes <= 4 * (4 + 3 + 1) * 1.2 * largest


def test_a_smaller_last_batch_may_be_described_as_such(monkeypatch) -> None:
    """A source that describes what is left at its end has it padded or left out; a smaller one in the middle, not."""
    Sent(monkeypatch)
    raw = [arrays(8), arrays(8), arrays(3)]
    with prefetch_to_device(Changing(raw), sharding=split(), last_batch="pad") as batches:
        assert [int(batch["mask"].sum()) for batch in batches] == [8, 8, 3]
    with prefetch_to_device(Changing(raw), sharding=split(), last_batch="drop") as batches:
        assert len(list(batches)) == 2
    with (
        prefetch_to_device(Changing([*raw, arrays(8)]), sharding=split(), last_batch="drop") as batches,
        pytest.raises(ValueError, match="Batch 2: 3 rows where batch 0 has 8, and it is not the last"),
    ):
        list(batches)


@by_host_size
@pytest.mark.parametrize("x64", [False, True])
def test_leaves_of_another_dtype_than_the_device_s(monkeypatch, x64, host_size) -> None:
    """64-bit leaves are converted on the way where JAX has 32 bits, and sent as they are where it has 64."""
    sent, source = Sent(monkeypatch), Rows({"a": np.arange(20), "b": np.linspace(0, 1, 20), **arrays(20)}, 8)
    with jax.enable_x64(x64), prefetch_to_device(source, host_size=host_size) as batches:
        taken = list(batches)
    assert taken[0]["a"].dtype == (np.int64 if x64 else np.int32)
    for out, raw in zip(taken, parts(source.arrays, 8), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b.astype(a.dtype)), out, raw)
    for put, written in zip(sent.addresses, source.passes[0].written[:3], strict=True):
        assert put[2:] == written[2:]
        assert (put[:2] == written[:2]) == x64


@by_host_size
def test_integers_that_would_wrap_are_an_error(monkeypatch, host_size) -> None:
    """A value beyond 32 bits names batch and leaf; what lies behind a short end does not count."""
    sent, source = Sent(monkeypatch), Rows({"a": np.array([1, 2, 3, 1 << 40])}, 3)
    with prefetch_to_device(source, host_size=host_size) as batches:
        assert np.asarray(next(batches)["a"]).tolist() == [1, 2, 3]
        with pytest.raises(OverflowError, match="Batch 1, leaf a: 1099511627776 does not fit int32"):
            next(batches)
    assert not sent.free()  # closed


@pytest.mark.parametrize("keep", ["ids", lambda path, leaf: leaf.dtype.kind == "M"])
def test_leaves_that_stay_on_the_host_are_the_batch_s_own(monkeypatch, keep) -> None:
    """Leaves in keep_on_host are written into arrays that no later batch writes to, cut to the rows."""
    sent = Sent(monkeypatch)
    ids = np.arange(20).astype("M8[s]")
    source = Rows({"ids": ids, **arrays(20)}, 8)
    with prefetch_to_device(source, keep_on_host=keep) as batches:
        taken = [batch["ids"] for batch in batches]
    np.testing.assert_array_equal(np.concatenate(taken), ids)
    written = [addresses[0] for addresses in source.passes[0].written[:3]]
    assert [address(leaf) for leaf in taken] == written
    assert len(set(written)) == 3
    assert sent.addresses == [a[1:] for a in source.passes[0].written[:3]]


class Pair(NamedTuple):
    image: Any
    rest: Any


def test_any_tree_of_anything_with_shape_and_dtype() -> None:
    """Descriptions are any pytree, of arrays, too; leaves with another leading axis, or none, are sent whole."""
    seen = []

    class Source:
        element_spec = Pair(np.zeros((8, 2), np.float32), [np.zeros((3,), np.int32), None, np.zeros((), np.int8)])
        left = 2

        def read_into(self, out: Any) -> int:
            seen.append(out)
            self.left -= 1
            out.image[...], out.rest[0][...], out.rest[2][...] = 1, 2, 3
            return [5, 8][self.left] if self.left >= 0 else 0

    with prefetch_to_device(Source()) as batches:
        first, short = batches
    assert isinstance(first, Pair)
    assert first.rest[1] is None
    assert (first.image.shape, short.image.shape, short.rest[0].shape, int(short.rest[2])) == ((8, 2), (5, 2), (3,), 3)
    for leaf in jax.tree.leaves(seen):
        assert leaf.flags.c_contiguous
        assert leaf.flags.writeable
        assert not address(leaf) % 64


@pytest.mark.parametrize("last_batch", ["error", "pad", "drop"])
def test_rows_are_counted_along_axis_0_whatever_the_batch_axis(last_batch) -> None:
    """Microbatches, stacked along axis 0 and split along axis 1, may end with fewer of them."""
    source = Rows({"x": np.arange(7 * 8 * 2, dtype=np.float32).reshape(7, 8, 2)}, 4)
    options = {"sharding": split(None, "data"), "batch_axis": 1, "last_batch": last_batch}
    with prefetch_to_device(source, **options) as batches:
        first, second = batches
    np.testing.assert_array_equal(np.asarray(first["x"]), source.arrays["x"][:4])
    np.testing.assert_array_equal(np.asarray(second["x"]), source.arrays["x"][4:])
    assert "mask" not in first or first["mask"].shape == (8,)


def test_padding_along_another_axis() -> None:
    """Where padding would tear the array apart, it is written elsewhere and copied: the same arrives."""
    source = Rows({"x": np.arange(4 * 6, dtype=np.float32).reshape(4, 6)}, 4)
    with prefetch_to_device(source, sharding=split(None, "data"), batch_axis=1, last_batch="pad") as batches:
        (out,) = batches
    np.testing.assert_array_equal(np.asarray(out["x"]), np.pad(source.arrays["x"], ((0, 0), (0, 2))))


def test_small_leaves_that_travel_packed(monkeypatch) -> None:
    """Where small leaves share a buffer, large ones are sent from where they were written, whole or short."""
    monkeypatch.setattr(packing, "PLATFORMS", ("cpu",))
    sent = Sent(monkeypatch)
    small = {name: np.arange(20, dtype=np.float32) + i for i, name in enumerate("abcd")}
    source = Rows({**small, "x": np.arange(20 * 100_000, dtype=np.float32).reshape(20, -1)}, 8)
    for last_batch in ("error", "pad"):
        sent.addresses.clear()
        with prefetch_to_device(source, last_batch=last_batch) as batches:
            for out, raw in zip(batches, parts(source.arrays, 8), strict=True):
                for name, leaf in raw.items():
                    np.testing.assert_array_equal(np.asarray(out[name])[: len(leaf)], leaf)
        assert [len(put) for put in sent.addresses] == [2, 2, 2]
        for put, written in zip(sent.addresses, source.passes[-1].written[:3], strict=True):
            assert put[0] == written[4]


@pytest.mark.parametrize("last_batch", ["error", "pad"])
@pytest.mark.parametrize("devices", [1, 8])
def test_small_leaves_on_a_mesh(monkeypatch, devices, last_batch) -> None:
    """On one device they are written into the buffer that is sent; on several beside it, one batch like the other."""
    monkeypatch.setattr(packing, "PLATFORMS", ("cpu",))
    sent, mesh = Sent(monkeypatch), Mesh(np.array(jax.devices()[:devices]), ("data",))
    values = np.arange(40 * 3).reshape(40, 3)
    source = Rows({"a": values.astype(np.float32), "b": values.astype(np.int16), "c": values % 2 == 0}, 16)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    with prefetch_to_device(source, sharding=sharding, last_batch=last_batch) as batches:
        for _ in range(2):
            assert_padded(batches, parts(source.arrays, 16), 16 if last_batch == "pad" else None)
    written = written_of(source)
    if devices > 1:
        assert len(set(map(tuple, written))) == 1
    for number, ((buffer,), (nbytes,), places) in enumerate(zip(sent.addresses, sent.nbytes, written, strict=True)):
        if devices > 1 or last_batch == "pad" or number % 3 < 2:  # else a short one is laid out anew
            assert {buffer <= place < buffer + nbytes for place in places} == {devices == 1}


def written_of(source: Rows) -> list[list[int]]:
    """Where the arrays of all batches lay that the source has written."""
    return [places for reads in source.passes for places in reads.written[: -(-40 // 16)]]


def assert_padded(batches: Any, expected: Any, rows: int | None) -> None:
    """The same, and zeros and a mask up to so many rows; None: nothing was padded."""
    for out, raw in zip(batches, expected, strict=True):
        real = len(jax.tree.leaves(raw)[0])
        mask = out.pop("mask", None)
        assert (mask is None) == (rows is None)
        assert mask is None or np.asarray(mask).tolist() == [i < real for i in range(rows or 0)]
        for name, leaf in raw.items():
            got = np.asarray(out[name])
            np.testing.assert_array_equal(got[:real], leaf)
            assert len(got) == (rows or real)
            assert not got[real:].any()


def test_leaves_split_along_another_axis_are_written_beside(monkeypatch) -> None:
    """Their shards lie apart where they are sent from: values of whole and short batches arrive."""
    Sent(monkeypatch)
    source = Rows({"x": np.arange(40 * 16, dtype=np.float32).reshape(40, 16)}, 16)
    with prefetch_to_device(source, sharding=split(None, "data")) as batches:
        for _ in range(3):
            assert_same(batches, parts(source.arrays, 16))
    assert len(set(map(tuple, written_of(source)))) == 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("keep", [None, "kept", lambda path, leaf: path == "kept"])
@pytest.mark.parametrize("last_batch", ["error", "pad"])
def test_wide_types_are_written_beside(monkeypatch, last_batch, keep, devices, packed) -> None:
    """What JAX narrows is converted on its way to where it is sent from, out of the same memory in each batch."""
    monkeypatch.setattr(packing, "PLATFORMS", ("cpu",) if packed else ())
    Sent(monkeypatch)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    wide = {"a": np.arange(40), "z": np.arange(80, dtype=np.float64).reshape(40, 2)}
    source = Rows(wide | {"kept": np.arange(40), "same": np.arange(40, dtype=np.int32)}, 16)
    options = {"sharding": NamedSharding(mesh, PartitionSpec("data")), "last_batch": last_batch, "keep_on_host": keep}
    with prefetch_to_device(source, **options) as batches:
        for _ in range(3):
            expected = parts(source.arrays, 16)
            if keep is None:
                assert_padded(batches, expected, 16 if last_batch == "pad" else None)
                continue
            delivered = list(batches)
            for out, raw in zip(delivered, expected, strict=True):
                np.testing.assert_array_equal(out.pop("kept"), raw.pop("kept"))  # each has its own
            assert_padded(delivered, expected, 16 if last_batch == "pad" else None)
    assert len({(places[0], places[-1]) for places in written_of(source)}) == 1


@by_host_size
@pytest.mark.parametrize("read", [True, False])
def test_a_value_that_does_not_fit_names_its_leaf(monkeypatch, host_size, read) -> None:
    """Each batch is looked at, as far as it has rows; the mask stands between the leaves."""
    Sent(monkeypatch)
    arrays = {"a": np.arange(20), "z": np.arange(20)}
    arrays["z"][4] = arrays["a"][17] = 1 << 40
    source = Rows(arrays, 8) if read else parts(arrays, 8)
    with (
        prefetch_to_device(source, host_size=host_size, last_batch="pad") as batches,
        pytest.raises(OverflowError, match="Batch 0, leaf z: 1099511627776 does not fit int32"),
    ):
        next(batches)
    arrays["z"][4] = 4
    source = Rows(arrays, 8) if read else parts(arrays, 8)
    with prefetch_to_device(source, host_size=host_size, last_batch="pad") as batches:
        first = next(batches), next(batches)
        with pytest.raises(OverflowError, match="Batch 2, leaf a: 1099511627776 does not fit int32"):
            next(batches)
    assert_padded(first, parts(arrays, 8)[:2], 8)


def test_what_lies_beside_a_short_batch_is_not_looked_at(monkeypatch) -> None:
    """Rows that the source has not written may hold anything."""
    Sent(monkeypatch)

    class Littering(Reads):
        def read_into(self, out: Any) -> int:
            rows = super().read_into(out)
            out["a"][rows:] = 1 << 40
            return rows

    with prefetch_to_device(Littering({"a": np.arange(20)}, 8), last_batch="pad") as batches:
        assert_padded(batches, parts({"a": np.arange(20)}, 8), 8)


def test_the_mask_of_a_leaf_that_tells_the_rows_by_chance(monkeypatch) -> None:
    """A leaf without rows in batch 0 that has some later is the first with that axis; what it tells is the mask."""
    Sent(monkeypatch)
    batches = [{"a": np.ones((), np.float32), "b": np.arange(8)}, {"a": np.ones(6, np.float32), "b": np.arange(8)}]

    class Taken:
        def __init__(self) -> None:
            self.ahead = list(batches)

        @property
        def element_spec(self) -> Any:
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (self.ahead or batches)[0])

        def read_into(self, out: Any) -> int:
            if not self.ahead:
                return 0
            raw = self.ahead.pop(0)
            jax.tree.map(lambda to, array: np.copyto(to, array), out, raw)
            return raw["a"].size if raw["a"].ndim else 8

    for source in (batches, Taken()):
        with prefetch_to_device(source, last_batch="pad") as taken:
            assert [np.asarray(out["mask"]).tolist() for out in taken] == [[True] * 8, [True] * 6 + [False] * 2]


@pytest.mark.parametrize("keep", [None, lambda path, leaf: False])
def test_what_lies_beside_is_there_once(monkeypatch, keep) -> None:
    """However often a source describes itself anew, with the same shapes or smaller ones; `close` gives it up."""
    Sent(monkeypatch)
    raw = [{"tokens": np.full((64, n), n), "z": np.full(64, n)} for n in (1000, 1000, 700, 1000, 800, 700) * 3]
    source = Changing(raw)
    tracemalloc.start()
    try:
        with prefetch_to_device(source, keep_on_host=keep) as batches:
            assert_same(batches, raw)
            batches.close()
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < raw[0]["tokens"].nbytes
    finally:
        tracemalloc.stop()
    assert len({places[0] for places in source.written}) == 1


def test_descriptions_that_take_turns(monkeypatch) -> None:
    """The same shapes under other keys are another batch."""
    Sent(monkeypatch)

    class Turns:
        def __init__(self) -> None:
            self.calls = 0

        @property
        def element_spec(self) -> Any:
            return {"ab"[self.calls % 2]: jax.ShapeDtypeStruct((4,), np.int64)}

        def read_into(self, out: Any) -> int:
            ((name, array),) = out.items()
            array[:] = self.calls + 10 * (name == "b")
            self.calls += 1
            return 4 * (self.calls < 7)

    with prefetch_to_device(Turns()) as batches:
        assert [[(name, int(x[3])) for name, x in out.items()] for out in batches] == [
            [("ab"[i % 2], i + 10 * (i % 2))] for i in range(6)
        ]


def test_a_kept_scalar_beside_wide_leaves(monkeypatch) -> None:
    """A leaf that stays on the host has an array of its own in each batch."""
    Sent(monkeypatch)

    class Numbered:
        def __init__(self) -> None:
            self.element_spec = {"n": jax.ShapeDtypeStruct((), np.int64), "x": jax.ShapeDtypeStruct((4,), np.int64)}
            self.calls = 0

        def read_into(self, out: Any) -> int:
            out["n"][...] = out["x"][:] = self.calls
            self.calls += 1
            return 4 * (self.calls < 5)

    with prefetch_to_device(Numbered(), keep_on_host="n") as batches:
        assert [(int(out["n"]), out["x"].tolist()) for out in list(batches)] == [(i, [i] * 4) for i in range(4)]


# ---- what is a source, and when it ends


def test_a_source_without_iteration(caplog) -> None:
    """An object with read_into alone is gone through once."""

    class Bare:
        def __init__(self) -> None:
            reads = Reads(arrays(16), 8)
            self.element_spec, self.read_into = reads.element_spec, reads.read_into

    with prefetch_to_device(Bare()) as batches:
        assert_same(batches, parts(arrays(16), 8))
        assert list(batches) == []
    assert "the source serves one pass and is spent, so this pass is empty" in caplog.text


@by_host_size
@pytest.mark.parametrize("resume", [None, "replay"])
def test_readers_that_iter_makes_serve_any_number_of_passes(host_size, resume) -> None:
    """Each pass has a new one, which needs neither `__iter__` nor `__next__`, also where a restart skips batches."""

    class Bare:
        def __init__(self) -> None:
            self.element_spec, self.read_into = (reads := Reads(arrays(16), 8)).element_spec, reads.read_into

    class Passes:
        def __iter__(self) -> Bare:
            return Bare()

    with prefetch_to_device(Passes(), host_size=host_size, resume=resume) as batches:
        for _ in range(3):
            assert_same(batches, parts(arrays(16), 8))
        next(iter(batches))
        state = batches.get_state() if resume else None
    if resume:
        with prefetch_to_device(Passes(), host_size=host_size, resume=resume) as batches:
            batches.set_state(state)
            assert_same(batches, parts(arrays(16), 8)[1:])


@by_host_size
def test_a_restart_reads_what_it_skips(host_size) -> None:
    """`__next__` of a reader is called no more where batches are skipped than where they are taken."""

    def prefetch() -> Any:
        return prefetch_to_device(Reads(arrays(16), 8), host_size=host_size, resume="replay")

    with prefetch() as batches:
        next(batches)
        state = batches.get_state()
    with prefetch() as batches:
        batches.set_state(state)
        assert_same(batches, parts(arrays(16), 8)[1:])


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (None, "source: __iter__ of a Passes returns the object itself, which would be spent after a pass"),
        ([1, 2], "source: __iter__ of a Passes returned a list, expected an iterator of batches"),
    ],
)
def test_an_iter_that_makes_no_pass_is_an_error(made, match) -> None:
    """Its first batch says what it returned, and what it should."""

    class Passes(Described):
        element_spec = jax.ShapeDtypeStruct((3,), np.int8)

        def __iter__(self) -> Any:
            return self if made is None else made

    with prefetch_to_device(Passes()) as batches, pytest.raises(TypeError, match=match):
        next(batches)


def test_read_into_beside_a_generator_is_said(caplog) -> None:
    """What `__iter__` returns is iterated, pass by pass, and that read_into is not called is said once."""

    class Both(Rows):
        element_spec = jax.ShapeDtypeStruct((8,), np.float32)

        def read_into(self, out: Any) -> int:
            raise AssertionError("__iter__ makes the passes")

        def __iter__(self) -> Any:
            yield from parts(self.arrays, 8)

    with prefetch_to_device(Both(arrays(16), 8)) as batches:
        for _ in range(2):
            assert_same(batches, parts(arrays(16), 8))
    assert caplog.text.count("a Both has read_into, but its __iter__ returns a generator that has none") == 1


def test_element_spec_alone_makes_no_such_source() -> None:
    """Loaders that describe their elements without read_into are iterated."""

    class Loader(list):
        element_spec = "something else"

    with prefetch_to_device(Loader(parts(arrays(16), 8))) as batches:
        assert_same(batches, parts(arrays(16), 8))


@by_host_size
def test_stop_iteration_is_the_end(host_size) -> None:
    """StopIteration from read_into ends the pass as 0 does."""

    class Ending(Reads):
        def read_into(self, out: Any) -> int:
            if self.calls == 2:
                raise StopIteration
            return super().read_into(out)

    with prefetch_to_device(Ending(arrays(40), 8), host_size=host_size) as batches:
        assert_same(batches, parts(arrays(16), 8))


@by_host_size
def test_the_slot_for_what_follows_the_end_is_not_lost(monkeypatch, host_size) -> None:
    """Passes map no more host memory than the first has."""
    sent = Sent(monkeypatch)
    with prefetch_to_device(Rows(arrays(40), 8), host_size=host_size, size=1) as batches:
        list(batches)
        mapped = sent.slots.mapped_bytes
        for _ in range(20):
            list(batches)
        assert sent.slots.mapped_bytes <= mapped + (1 << 14)


# ---- bad input


def returns(rows: Any) -> Any:
    """A read_into that says so."""

    def read_into(self: Any, out: Any) -> Any:
        return rows

    return read_into


def half_way(self: Any, out: Any) -> int:
    out["x"][:3] = 1
    raise OSError("disk gone")


def wrong_shape(self: Any, out: Any) -> int:
    out["x"][...] = np.zeros((4, 7))
    return 8


BAD = {
    "too many": (returns(9), ValueError, "Batch 2: read_into returned 9 rows, but element_spec has 8"),
    "negative": (returns(-1), ValueError, "Batch 2: read_into returned -1 rows, but element_spec has 8"),
    "None": (returns(None), TypeError, "Batch 2: read_into returned None, no number of rows. Return how many"),
    "a batch": (returns({"x": 1}), TypeError, "Batch 2: read_into returned {'x': 1}, no number of rows"),
    "a fraction": (returns(8.0), TypeError, r"Batch 2: read_into returned 8\.0, no number of rows"),
    "half way": (half_way, OSError, "disk gone"),
    "wrong shape": (wrong_shape, ValueError, "could not broadcast"),
}


@by_host_size
@pytest.mark.parametrize("case", BAD)
def test_a_wrong_read_into_is_an_error_and_its_slot_is_not_lost(monkeypatch, case, host_size) -> None:
    """Errors arrive after the batches before them, as what they are, and stay; the slot is free again."""
    read_into, kind, match = BAD[case]

    class Broken(Reads):
        def read_into(self, out: Any) -> Any:
            return super().read_into(out) if self.calls < 2 else read_into(self, out)

    sent, source = Sent(monkeypatch), Broken(arrays(40), 8)
    with prefetch_to_device(source, host_size=host_size) as batches:
        assert_same([next(batches), next(batches)], parts(arrays(16), 8))
        for _ in range(2):
            with pytest.raises(kind, match=match) as caught:
                next(batches)
        if case in ("half way", "wrong shape"):
            assert caught.value.__notes__ == ["jaxprefetch: raised by the source while it made batch 2"]
        taken = sent.slots.mapped_bytes
        assert sent.free()
        slot = sent.slots.take(arrays(8)["x"].nbytes + 64)
        assert sent.slots.mapped_bytes == taken, slot
    assert source.calls == 2


@pytest.mark.parametrize(
    ("spec", "kind", "match"),
    [
        (
            {"x": 3},
            TypeError,
            "Batch 0, leaf x: element_spec has 3 there. It has to be a tree with a shape and a dtype",
        ),
        (
            {"x": jax.ShapeDtypeStruct((), np.int32)},
            ValueError,
            "Batch 0: element_spec has no leaf with an axis of rows",
        ),
        (None, ValueError, "Batch 0: element_spec has no leaf with an axis of rows"),
        ({"x": np.zeros((4, 2), "U3")}, TypeError, "Batch 0, leaf x: arrays of dtype <U3 cannot go to a device"),
    ],
)
def test_a_wrong_description_is_an_error(spec, kind, match) -> None:
    """What is no description of a batch, or of one that no device takes, is refused before the source is called."""
    source = types.SimpleNamespace(element_spec=spec, read_into=None)
    source.read_into = lambda out: pytest.fail("called")
    with prefetch_to_device(source) as batches, pytest.raises(kind, match=match) as caught:
        next(batches)
    assert not hasattr(caught.value, "__notes__")


class Described:
    """Writes nothing; its descriptions are of all kinds."""

    def read_into(self, out: Any) -> int:
        return 0


def described(**members: Any) -> Any:
    return type("Described", (Described,), members)()


def given_by_another(self: Any, name: str) -> Any:
    if name == "element_spec":
        return jax.ShapeDtypeStruct((3,), np.int8)
    raise AttributeError(name)


@pytest.mark.parametrize(
    ("reader", "match"),
    [
        (described(), "a Described has read_into, but no element_spec to say what its batches are"),
        (described(element_spec=lambda self: 0), "its element_spec is a method where a value is expected"),
        (described(element_spec=staticmethod(lambda: 0)), "its element_spec is a method"),
        (described(element_spec=classmethod(lambda cls: 0)), "its element_spec is a method"),
        (types.SimpleNamespace(read_into=print, element_spec=described().read_into), "its element_spec is a method"),
    ],
    ids=["none", "method", "staticmethod", "classmethod", "bound method"],
)
def test_a_reader_that_does_not_describe_its_batches_is_an_error(reader, match) -> None:
    """It is refused by the call, or where it is one of a source's passes, by its first batch."""
    with pytest.raises(TypeError, match=match):
        prefetch_to_device(reader)
    with prefetch_to_device(described_passes(reader)) as batches, pytest.raises(TypeError, match=match):
        next(batches)


def described_passes(reader: Any) -> Any:
    return type("Passes", (), {"__iter__": lambda self: reader})()


@pytest.mark.parametrize(
    "members",
    [
        {"element_spec": property(lambda self: jax.ShapeDtypeStruct((3,), np.int8))},
        {"element_spec": functools.cached_property(lambda self: jax.ShapeDtypeStruct((3,), np.int8))},
        {"element_spec": jax.ShapeDtypeStruct((3,), np.int8)},
        {"__getattr__": given_by_another},
    ],
    ids=["property", "cached_property", "value", "__getattr__"],
)
def test_a_description_may_be_anything_but_a_method(members) -> None:
    """It is read when the batch is due, and not by the call."""
    if isinstance(members.get("element_spec"), functools.cached_property):
        members["element_spec"].__set_name__(Described, "element_spec")
    with prefetch_to_device(described(**members)) as batches:
        assert list(batches) == []


def test_a_description_that_fails_is_the_source_s_error() -> None:
    """What the property raises arrives in the place of its batch, as it is."""

    def fails(self: Any) -> Any:
        raise AttributeError("no file is open")

    with (
        prefetch_to_device(described(element_spec=property(fails))) as batches,
        pytest.raises(AttributeError, match="no file is open") as caught,
    ):
        next(batches)
    assert "made batch 0" in caught.value.__notes__[0]


# ---- interrupts, limits, times


def test_an_interrupted_read_is_repeated() -> None:
    """After a Ctrl-C within read_into the same batch is asked for again, with the same memory."""

    class Interrupted(Reads):
        interrupts = 2

        def read_into(self, out: Any) -> int:
            if self.at == 8 and self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return super().read_into(out)

    with prefetch_to_device(Interrupted(arrays(24), 8), host_size=0, size=1) as batches:
        taken = taken_through_two_interrupts(batches)
    assert_same(taken, parts(arrays(24), 8))


def test_a_batch_whose_last_copy_was_interrupted_is_not_read_again(monkeypatch) -> None:
    """A Ctrl-C may strike before what lies beside the slot is copied, or after some of it."""
    Sent(monkeypatch)
    copy, interrupts = Copier.copy, [0, 1]
    copied = []

    def struck(copier: Copier, pairs: Any) -> None:
        copied.append(len(pairs))
        if len(copied) > 1 and interrupts:
            copy(copier, pairs[: interrupts.pop()])
            raise KeyboardInterrupt
        copy(copier, pairs)

    monkeypatch.setattr(Copier, "copy", struck)
    source = Reads({"x": np.arange(24), "y": np.arange(24)}, 8)
    with prefetch_to_device(source, host_size=0, size=1) as batches:
        taken = taken_through_two_interrupts(batches)
    assert_same(taken, parts(source.arrays, 8))
    assert (source.calls, copied) == (4, [2] * 5)


def test_a_batch_whose_staging_was_interrupted_is_not_read_again() -> None:
    """What read_into has returned is staged after a Ctrl-C, and the source goes on from there."""
    interrupts = [KeyboardInterrupt] * 2
    calls = []

    def keep(path: str, leaf: Any) -> bool:
        return False

    class Rude(Reads):
        def read_into(self, out: Any) -> Any:
            rows = super().read_into(out)
            calls.append(rows)
            return Number(rows)

    class Number:
        def __init__(self, rows: int):
            self.rows = rows

        def __index__(self) -> int:
            if len(calls) == 2 and interrupts:
                raise interrupts.pop()
            return self.rows

    source = Rude(arrays(24), 8)
    with prefetch_to_device(source, host_size=0, size=1, keep_on_host=keep) as batches:
        taken = taken_through_two_interrupts(batches)
    assert_same(taken, parts(arrays(24), 8))
    assert source.calls == 4


@pytest.mark.parametrize("last_batch", ["error", "drop"])
def test_host_memory_of_short_batches_is_given_back(last_batch) -> None:
    """With room for one batch on the host, a pass with short ones does not get stuck."""
    raw = {"x": np.arange(64 * 5 + 30, dtype=np.float32)}

    class Short(Reads):
        """Half of each second batch."""

        def read_into(self, out: Any) -> int:
            rows = super().read_into(out)
            if self.calls % 2 == 0 and rows and last_batch == "error":
                self.at -= rows - rows // 2
                return rows // 2
            return rows

    with prefetch_to_device(Short(raw, 64), max_host_bytes=300, last_batch=last_batch) as batches:
        taken = np.concatenate([np.asarray(batch["x"]) for batch in batches])
    np.testing.assert_array_equal(taken, raw["x"][: None if last_batch == "error" else 320])


def test_reading_counts_as_the_source_s_time(monkeypatch) -> None:
    """What read_into takes is reader_pull_s, not reader_stage_s."""
    clock = types.SimpleNamespace(now=0)
    monkeypatch.setattr(pipeline, "time", types.SimpleNamespace(perf_counter_ns=lambda: clock.now))

    class Slow(Reads):
        def read_into(self, out: Any) -> int:
            clock.now += 1_000_000_000
            return super().read_into(out)

    with prefetch_to_device(Slow(arrays(24), 8), host_size=0) as batches:
        list(batches)
        statistics = batches.statistics()
    assert statistics.reader_pull_s == 3
    assert statistics.reader_stage_s == 0


def test_a_short_batch_that_takes_more_memory_than_was_offered_gets_it(monkeypatch) -> None:
    """Where leaves are packed only in the short batch, a row for each device, the reader does not wait for itself."""
    monkeypatch.setattr(packing, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(packing, "LARGEST_BYTES", 1000)
    source = Rows({name: np.arange(700, dtype=np.float32) for name in "abc"}, 300)
    replicated = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    with prefetch_to_device(source, sharding=replicated, max_host_bytes=4000) as batches:
        assert [len(out["a"]) for out in batches] == [300, 300, 100]


class Writes:
    """Writes `count` batches of four rows, all values the number of the batch, by `write`."""

    def __init__(self, count: int, write: Any, **dtypes: Any):
        self.element_spec = {name: jax.ShapeDtypeStruct((4,), dtype) for name, dtype in dtypes.items()}
        self._numbers, self._write = iter(range(1, count + 1)), write

    def read_into(self, out: Any) -> Any:
        number = next(self._numbers, 0)
        return self._write(out, number) if number else 0


def fill(out: Any, number: int) -> int:
    for leaf in out.values():
        leaf[:] = number
    return 4


@pytest.mark.parametrize("last", [np.float32, np.int64])
def test_small_leaves_travel_packed_from_memory_that_is_not_used_again(last, monkeypatch) -> None:
    """Also beside a leaf that is converted on its way: what was written in place is what arrives."""
    monkeypatch.setattr(packing, "PLATFORMS", ("cpu",))
    dtypes = {"a": np.float32, "b": np.float32, "c": np.float32, "d": last}
    for number, out in enumerate(prefetch_to_device(Writes(3, fill, **dtypes)), 1):
        jax.tree.map(lambda leaf, number=number: np.testing.assert_array_equal(leaf, np.full(4, number)), out)


def test_a_leaf_that_is_replaced_is_not_sent() -> None:
    """What was put into `out` instead of being written there is an error, not whatever was in that memory before."""

    def replace(out: Any, number: int) -> int:
        out["y"] = np.full(4, number, np.float32)
        return 4

    text = r"Batch 0, leaf y: read_into has put something else into out.*\[:rows\]"
    source = Writes(2, replace, x=np.float32, y=np.float32)
    with prefetch_to_device(source) as batches, pytest.raises(ValueError, match=text):
        next(batches)


@pytest.mark.parametrize("packs", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize(
    ("name", "value"), [("shape", (16, 3)), ("dtype", np.int32), ("dtype", np.float16), ("strides", (0, 0, 4))], ids=str
)
@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
def test_what_is_set_on_the_arrays_changes_nothing_that_is_sent(monkeypatch, name, value, packs) -> None:
    """Their memory is sent as the source has described it, whatever it makes of the objects that it was given."""

    class Setting(Reads):
        def read_into(self, out: Any) -> int:
            rows = super().read_into(out)
            setattr(out["x"], name, value)
            out["y"].flags.writeable = False
            return rows

    Sent(monkeypatch)
    monkeypatch.setattr(packing, "FEWEST_LEAVES", 1)
    monkeypatch.setattr(packing, "PLATFORMS", ("cpu",) if packs else ())
    with prefetch_to_device(Setting(arrays(36), 8), last_batch="pad") as batches:
        for out, raw in zip(batches, parts(arrays(36), 8), strict=True):
            rows = len(raw["y"])
            assert int(out["mask"].sum()) == rows
            assert_same([{"x": out["x"][:rows], "y": out["y"][:rows]}], [raw])


@pytest.mark.parametrize("rows", [True, np.True_])
def test_a_truth_is_no_number_of_rows(rows) -> None:
    """True would be one row of those that were written."""
    source = Writes(2, lambda out, number: rows, x=np.float32)
    text = r"Batch 0: read_into returned .*True.*, no number of rows"
    with prefetch_to_device(source) as batches, pytest.raises(TypeError, match=text):
        next(batches)
