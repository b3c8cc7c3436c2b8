"""What a leaf of a batch becomes: the same bits, type and tree, whatever the source yields."""

from __future__ import annotations

import collections
import dataclasses
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device

NUMPY_DTYPES = ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32))]
NUMPY_DTYPES += ["float16", "float32", "complex64"]
ML_DTYPES = sorted(name for name, value in vars(ml_dtypes).items() if isinstance(value, type) and name[-1:].isalnum())
ML_DTYPES = [name for name in ML_DTYPES if name not in ("finfo", "iinfo")]


def deliver(*batches: Any, **options: Any) -> list[Any]:
    """All batches of a source that is a list."""
    with prefetch_to_device(list(batches), **options) as prefetcher:
        return list(prefetcher)


def deliver_one(batch: Any, **options: Any) -> Any:
    (delivered,) = deliver(batch, **options)
    return delivered


def in_thread(call: Callable[[], Any]) -> Any:
    """What `call` returns on a thread of its own, where none of this thread's contexts are in force."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def named(*axes: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec(*axes))


# ---- dtypes


@pytest.mark.parametrize("sharding", [None, "device", "split"])
@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_numpy_dtypes_arrive_bit_by_bit(name: str, sharding: str | None) -> None:
    """NumPy's own types of up to 32 bits (64 for complex) arrive with every bit, NaN payloads too."""
    dtype = np.dtype(name)
    raw = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, 64 * dtype.itemsize, np.uint8)
    batch = raw.view(dtype).reshape(8, 8)
    target = {None: None, "device": jax.devices()[3], "split": named("data")}[sharding]
    out = deliver_one(batch, sharding=target)
    assert out.dtype == dtype
    assert np.asarray(out).tobytes() == batch.tobytes()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_arrive_bit_by_bit_or_are_refused(name: str, split: bool) -> None:
    """Every ml_dtypes type that this JAX takes arrives in all its bit patterns; others are an error with the leaf."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    kind = ml_dtypes.iinfo if name.lstrip("u").startswith("int") else ml_dtypes.finfo
    options = {"sharding": named("data") if split else None}
    try:
        jax.device_put(np.zeros(4, dtype))
    except (TypeError, RuntimeError):
        with pytest.raises(TypeError, match=f"Batch 0, leaf x: arrays of dtype {name} cannot go to a device"):
            deliver({"x": np.zeros(4, dtype)}, **options)
        return
    bits = kind(dtype).bits
    word = np.uint8 if dtype.itemsize == 1 else np.uint16
    patterns = np.resize(np.arange(2**bits, dtype=word), max(4, 2**bits))
    out = deliver_one({"x": patterns.view(dtype)}, **options)["x"]
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out).view(word) & word(2**bits - 1), patterns)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
def test_64_bit_types_follow_the_setting_of_the_call(name: str, x64: bool) -> None:
    """64-bit leaves follow JAX's x64 setting as it was at the call, whoever consumes them in whatever setting."""
    batch = np.arange(6).astype(name)
    with jax.enable_x64(x64):
        expected = jax.device_put(batch).dtype
        made = [prefetch_to_device([batch]) for _ in range(3)]
    with jax.enable_x64(not x64):
        delivered = list(made[0]) + in_thread(lambda: list(made[1]))
    with jax.enable_x64(x64):
        delivered += list(made[2])
    assert len(delivered) == 3
    for out in delivered:
        assert out.dtype == expected
        assert expected.itemsize == np.dtype(name).itemsize // (1 if x64 else 2)
        np.testing.assert_array_equal(np.asarray(out), batch)


@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        (np.array([0, 2**31]), 2**31),
        (np.array([-(2**31) - 1, 0]), -(2**31) - 1),
        (np.array([2**32], np.uint64), 2**32),
        (np.array([2**40]).astype(">i8"), 2**40),
        (np.int64(2**31), 2**31),
        (2**31, 2**31),
        (-(2**40), -(2**40)),
    ],
)
def test_integers_that_would_wrap_are_refused(leaf: Any, value: int) -> None:
    """With x64 off a 64-bit integer that would wrap is an error naming batch, leaf and value; with x64 on it passes."""
    with jax.enable_x64(False), prefetch_to_device([{"a": {"id": 1}}, {"a": {"id": leaf}}]) as batches:
        next(batches)
        with pytest.raises(OverflowError, match=rf"Batch 1, leaf a/id: {value} does not fit u?int32"):
            next(batches)
    with jax.enable_x64(True):
        assert np.ravel(np.asarray(deliver_one({"id": leaf})["id"]))[-1 if value > 0 else 0] == value


@pytest.mark.parametrize("number", [True, 3, -7, 2.5, 1 + 2j])
@pytest.mark.parametrize("x64", [False, True])
def test_python_numbers_stay_weakly_typed(number: complex, x64: bool) -> None:
    """A Python number has the dtype and weak type that `jax.device_put` gives it, and so says element_spec."""
    with jax.enable_x64(x64):
        expected = jax.device_put(number)
        with prefetch_to_device([(number, number)], sharding=(None, named())) as batches:
            spec = batches.element_spec[0]
            outs = next(batches)
    for out in outs:
        assert (out.dtype, out.weak_type, out.shape) == (expected.dtype, expected.weak_type, ())
        assert out == number
    assert (spec.dtype, spec.weak_type) == (expected.dtype, expected.weak_type)


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int8(-3), np.bool_(True), np.float64(2), ml_dtypes.bfloat16(3)])
def test_numpy_scalars_are_strongly_typed(scalar: Any) -> None:
    """A NumPy scalar becomes an array without axes, of its own type."""
    out, expected = deliver_one([scalar])[0], jax.device_put(scalar)
    assert (out.dtype, out.weak_type, out.shape) == (expected.dtype, False, ())
    assert np.asarray(out) == np.asarray(expected)


# ---- memory layouts


class Tagged(np.ndarray):
    """A subclass of the usual kind."""


def unaligned() -> np.ndarray:
    raw = np.zeros(4 * 24 + 1, np.uint8)
    out = raw[1:].view(np.float32).reshape(8, 3)
    out[...] = np.arange(24).reshape(8, 3)
    assert not out.flags.aligned
    return out


LAYOUTS: dict[str, Callable[[], np.ndarray]] = {
    "big-endian": lambda: np.arange(24, dtype=">f4").reshape(8, 3),
    "big-endian int16": lambda: np.arange(24, dtype=">i2").reshape(8, 3),
    "Fortran": lambda: np.asfortranarray(np.arange(24, dtype=np.float32).reshape(8, 3)),
    "strided": lambda: np.arange(96, dtype=np.float32).reshape(16, 6)[::2, 1::2],
    "reversed": lambda: np.arange(24, dtype=np.int32).reshape(8, 3)[::-1, ::-1],
    "broadcast": lambda: np.broadcast_to(np.float32([1, 2, 3]), (8, 3)),
    "length-1 axis with odd strides": lambda: np.arange(64, dtype=np.float32).reshape(8, 8)[:, 3:4],
    "subclass": lambda: np.arange(24, dtype=np.int16).reshape(8, 3).view(Tagged),
    "unaligned": unaligned,
    "no rows": lambda: np.zeros((0, 3), np.float32),
    "no columns": lambda: np.zeros((8, 0), np.uint8),
    "no axes": lambda: np.array(5, np.uint16),
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_memory_layout_arrives(layout: str, split: bool, fresh: bool) -> None:
    """The values arrive whatever strides, byte order, alignment or class the source's array has."""
    leaf = LAYOUTS[layout]()
    leaf.flags.writeable = False
    out = deliver_one({"x": leaf}, sharding=named("data") if split else None, fresh_buffers=fresh)["x"]
    assert out.shape == leaf.shape
    assert out.dtype == leaf.dtype.newbyteorder("=")
    np.testing.assert_array_equal(np.asarray(out), leaf)


def test_memory_mapped_files_arrive(tmp_path: Any) -> None:
    """A read-only memory map arrives, and so does an unaligned piece of it."""
    np.arange(64, dtype=np.int32).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.int32, "r")
    whole, piece = deliver_one((mapped, mapped[3:9]))
    np.testing.assert_array_equal(np.asarray(whole), np.arange(64))
    np.testing.assert_array_equal(np.asarray(piece), np.arange(3, 9))


# ---- trees


class Pair(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    image: Any
    label: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


@flax.struct.dataclass
class Struct:
    image: Any
    label: Any = None
    name: str = flax.struct.field(default="", pytree_node=False)


X, Y = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.int32)

TREES = {
    "bare array": X,
    "list": [X, [Y, (X,)]],
    "namedtuple": Pair(X, {"y": Y}),
    "ordered dict": collections.OrderedDict(y=Y, x=X),
    "dataclass": Record(X, Pair(Y, None), name="a"),
    "flax struct": Struct(X, Y, name="b"),
    "None leaves": {"a": None, "x": X, "z": (None, Y)},
    "only None": {"a": None},
    "empty dict": {},
    "empty tuple": (),
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_trees_keep_their_structure(tree: str, split: bool) -> None:
    """A batch keeps its containers, static fields and None leaves, three times over."""
    delivered = deliver(TREES[tree], TREES[tree], TREES[tree], sharding=named("data") if split else None)
    assert len(delivered) == 3
    for out in delivered:
        assert jax.tree.structure(out) == jax.tree.structure(TREES[tree])
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out))
        jax.tree.map(np.testing.assert_array_equal, out, TREES[tree])


def test_plain_mappings_become_dicts() -> None:
    """Mappings that JAX does not know arrive as dicts, at any depth, and can be named by path."""
    batch = types.MappingProxyType({"x": X, "deep": [collections.UserDict(y=Y, s="text")]})
    out = deliver_one(batch, keep_on_host="deep/0/s", sharding={"x": named("data"), "deep": None})
    assert type(out) is dict
    assert type(out["deep"][0]) is dict
    assert out["deep"][0]["s"] == "text"
    assert out["x"].sharding == named("data")
    np.testing.assert_array_equal(np.asarray(out["deep"][0]["y"]), Y)
