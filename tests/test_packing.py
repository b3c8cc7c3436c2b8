"""Small leaves that travel in one buffer arrive as they would alone: bits, types, places, whatever is done to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_leaves import LAYOUTS, ML_DTYPES, NUMPY_DTYPES
from test_ownership import CONSUMERS
from test_placement import CONTEXTS, SHARDINGS, assert_same, by_sharding, expected

from jaxprefetch import prefetch_to_device
from jaxprefetch.device import packing
from jaxprefetch.device.transfer import Transfer

LEAVES = {
    "x": np.arange(64, dtype=np.float32).reshape(8, 8),
    "y": np.arange(8, dtype=np.int32),
    "z": np.arange(128, dtype=np.int16).reshape(8, 8, 2),
    "w": np.arange(32).reshape(8, 4) % 3 == 0,
    "v": (np.arange(32) + 2.5j).astype(np.complex64).reshape(8, 4),
}
BATCHES = [
    {name: leaf if leaf.dtype == bool else leaf + number for name, leaf in LEAVES.items()} for number in range(5)
]


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Packing pays here, too; gives the number of buffers and arrays that each put has made."""
    monkeypatch.setattr(packing, "PLATFORMS", ("cpu",))
    made: list[int] = []
    put = Transfer.put

    def counting(transfer: Transfer, leaves: Any) -> list[Any]:
        out = put(transfer, leaves)
        made.append(sum(isinstance(leaf, jax.Array) for leaf in out))
        return out

    monkeypatch.setattr(Transfer, "put", counting)
    return made


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices())[[3, 1, 7, 0, 2, 6, 5, 4]].reshape(4, 2), ("data", "model"))


# ---- values


def random_bytes(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits: denormals, infinities and NaNs of every kind among them."""
    high = 2 if dtype.kind == "b" else 256
    raw = np.random.default_rng(seed).integers(0, high, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


def travels_whole(name: str) -> bool:
    return name in NUMPY_DTYPES or name == "bfloat16" or name.startswith("float8")


@pytest.mark.parametrize("sharding", [None, "device", "split", "replicated"])
@pytest.mark.parametrize("name", [*NUMPY_DTYPES, *ML_DTYPES])
def test_every_dtype_arrives_bit_by_bit(name: str, sharding: str | None, packed: list[int]) -> None:
    """Random bytes as any dtype that a device has come out the same; types of less than a byte go alone."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    try:
        jax.device_put(np.zeros(4, dtype))
    except (TypeError, RuntimeError):
        return  # refused, packed or not: test_leaves
    places = {None: None, "device": jax.devices()[3], "split": NamedSharding(mesh(), P("data", "model"))}
    target = places.get(str(sharding) if sharding else None, NamedSharding(mesh(), P()))
    if travels_whole(name):
        batch = [random_bytes(dtype, (8, 6, 3), seed) for seed in range(3)]
    else:
        batch = [np.arange(8 * 6 * 3).reshape(8, 6, 3).astype(dtype)] * 3
    with prefetch_to_device([batch] * 3, sharding=target) as batches:
        for outs in batches:
            for out, leaf in zip(outs, batch, strict=True):
                assert out.dtype == dtype
                assert np.asarray(out).tobytes() == leaf.tobytes()
    assert packed == [1 if travels_whole(name) else 3] * 3


@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
def test_64_bits_arrive_bit_by_bit(name: str, packed: list[int]) -> None:
    """With x64 in force at the call 64-bit leaves are packed as they are, whatever is in force at the loop."""
    batch = [random_bytes(np.dtype(name), (8, 3), seed) for seed in range(3)]
    with jax.enable_x64(True):
        prefetcher = prefetch_to_device([batch] * 2, sharding=NamedSharding(mesh(), P("data")))
    with prefetcher as batches:
        for outs in batches:
            assert [np.asarray(out).tobytes() for out in outs] == [leaf.tobytes() for leaf in batch]
            assert {out.dtype for out in outs} == {np.dtype(name)}
    assert packed == [1, 1]


@pytest.mark.parametrize("split", [False, True])
def test_every_memory_layout_arrives(split: bool, packed: list[int]) -> None:
    """Strides, byte order and alignment of the source's arrays make no difference, nor do 64-bit types."""
    batch = {name: make() for name, make in LAYOUTS.items() if np.size(make())}
    batch |= {"int64": np.arange(16).reshape(8, 2), "float64": np.linspace(0, 1, 8)}
    with prefetch_to_device([batch], sharding=NamedSharding(mesh(), P("data")) if split else None) as batches:
        out = next(batches)
    for name, leaf in batch.items():
        np.testing.assert_array_equal(np.asarray(out[name]), leaf.astype(out[name].dtype), err_msg=name)
    assert packed == [1]


def test_short_batches_are_padded_with_zeros(packed: list[int]) -> None:
    """A packed leaf with fewer rows is filled up, and the mask is packed with it."""
    source = [BATCHES[0], {name: leaf[:3] for name, leaf in BATCHES[1].items()}]
    sharding = NamedSharding(mesh(), P("data"))
    with prefetch_to_device(source, sharding=sharding, last_batch="pad") as batches:
        whole, short = batches
    for name, leaf in LEAVES.items():
        np.testing.assert_array_equal(np.asarray(whole[name]), leaf)
        np.testing.assert_array_equal(np.asarray(short[name])[:3], BATCHES[1][name][:3])
        assert not np.any(np.asarray(short[name])[3:])
    assert np.asarray(short["mask"]).tolist() == [True] * 3 + [False] * 5
    assert packed == [1, 1]


# ---- places


@by_sharding
def test_leaves_are_where_they_would_be_alone(kind: str, packed: list[int]) -> None:
    """Sharding, commitment, type and shards are those of jax.device_put, and one compiled step serves both."""
    sharding = SHARDINGS[kind]()
    sharding = sharding and {name: sharding for name in LEAVES} if not isinstance(sharding, dict) else None
    step = jax.jit(lambda batch: jax.tree.map(lambda x: x, batch))
    with prefetch_to_device(BATCHES, sharding=sharding) as batches:
        for batch, raw in zip(batches, BATCHES, strict=True):
            wanted = {name: expected(sharding and sharding[name], raw)[name] for name in raw}
            assert_same(batch, wanted)
            for name, array in wanted.items():
                assert batch[name].aval == array.aval
                assert batch[name].weak_type == array.weak_type
            if kind != "host memory":
                step(batch)
                step(wanted)
                assert step._cache_size() == 1
    assert packed == [5 if kind == "host memory" else 1] * 5


@pytest.mark.parametrize(
    "spec", [P("data"), P("model"), P(("model", "data")), P(None, "model"), P("model", "data"), P()]
)
def test_leaves_may_be_sharded_differently_on_one_mesh(spec: P, packed: list[int]) -> None:
    """Leaves with any shardings on the same mesh share a buffer."""
    sharding = {name: NamedSharding(mesh(), P("data")) for name in LEAVES} | {"x": NamedSharding(mesh(), spec)}
    with prefetch_to_device(BATCHES, sharding=sharding) as batches:
        for batch, raw in zip(batches, BATCHES, strict=True):
            assert_same(batch, {name: expected(sharding[name], raw)[name] for name in raw})
    assert packed == [1] * 5


def test_others_travel_beside_the_buffer(packed: list[int]) -> None:
    """Large, empty, foreign and kept leaves, Python numbers and leaves on other devices are not packed, and arrive."""
    large, foreign = np.arange(packing.LARGEST_BYTES, dtype=np.int16), jax.device_put(np.arange(5, dtype=np.int8))
    others = {"large": large, "empty": np.zeros((0, 2), np.int8), "foreign": foreign, "name": "a", "number": 3}
    batch = LEAVES | others | {"there": np.ones(3, np.float16)}
    sharding = {name: jax.devices()[4] if name == "there" else None for name in batch}
    with prefetch_to_device([batch] * 3, sharding=sharding, keep_on_host="name") as batches:
        for out in batches:
            assert out["name"] == "a"
            assert out["number"].weak_type
            assert out["there"].devices() == {jax.devices()[4]}
            for name in [*LEAVES, "large", "empty", "foreign", "there"]:
                assert out[name].dtype == batch[name].dtype
                np.testing.assert_array_equal(np.asarray(out[name]), batch[name])
    assert packed == [6] * 3


def test_two_small_leaves_go_alone(packed: list[int]) -> None:
    """Below three the call that takes them apart is not worth it."""
    with prefetch_to_device([{"x": LEAVES["x"], "y": LEAVES["y"]}]) as batches:
        next(batches)
    assert packed == [2]


def test_shapes_that_go_on_changing_are_not_compiled_for_ever(packed: list[int]) -> None:
    """After so many packings a new shape travels leaf by leaf; the known ones stay packed."""
    most = packing.MOST_PACKINGS
    lengths = [*range(1, most + 4), 1, most + 1]
    source = [[np.full((n, 3), n, np.float32)] * 4 for n in lengths]
    packing.compiled_unpack.cache_clear()
    with prefetch_to_device(source) as batches:
        for n, batch in zip(lengths, batches, strict=True):
            for leaf in batch:
                np.testing.assert_array_equal(np.asarray(leaf), np.full((n, 3), n))
    assert packed == [1] * most + [4] * 3 + [1, 4]
    assert packing.compiled_unpack.cache_info().misses == most


def test_another_prefetcher_compiles_nothing(packed: list[int]) -> None:
    """The call that takes a buffer apart is compiled once in a process, not once a prefetcher."""
    packing.compiled_unpack.cache_clear()
    for _ in range(3):
        with prefetch_to_device(BATCHES) as batches:
            list(batches)
    assert packing.compiled_unpack.cache_info().misses == 1


# ---- what may be in force, and what may be done with a batch


@pytest.mark.parametrize("kind", ["None", "Device", "2D", "2D, explicit"])
@pytest.mark.parametrize("options", [{}, {"delete_used": True}, {"host_size": 0}], ids=str)
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_around_the_loop_change_nothing(context: str, options: dict[str, Any], kind: str) -> None:
    """Whatever is in force where the loop runs; NaNs are data and no error."""
    batches_of = [raw | {"x": np.where(raw["x"] > 9, np.float32(np.nan), raw["x"])} for raw in BATCHES]
    sharding = SHARDINGS[kind]()
    wanted = {name: expected(sharding, batches_of[0])[name] for name in LEAVES}
    prefetcher = prefetch_to_device(batches_of, sharding=sharding, **options)
    packing.compiled_unpack.cache_clear()
    with CONTEXTS[context](), prefetcher as batches:
        for batch, raw in zip(batches, batches_of, strict=True):
            for name, array in batch.items():
                assert (array.sharding, array.dtype) == (wanted[name].sharding, wanted[name].dtype)
                assert array.committed == wanted[name].committed
                np.testing.assert_array_equal(np.array(jax.device_get(array)), raw[name])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("delete_used", [False, True])
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_consumer_may_do_what_it_likes(consumer: str, delete_used: bool, large: bool) -> None:
    """A loop that deletes, donates, skips or waits for leaves, packed or beside the buffer, sees the right values."""
    n = 1 << 15 if large else 8
    source = [{"x": np.full(n, i, np.float32), **{name: np.full(8, i, np.int32) for name in "yuv"}} for i in range(12)]
    seen = 0
    with prefetch_to_device(source, delete_used=delete_used) as batches:
        for i, batch in enumerate(batches):
            for leaf in batch.values():
                np.testing.assert_array_equal(np.unique(np.asarray(leaf)), [i])
            CONSUMERS[consumer](batch)
            seen += 1
        statistics = batches.statistics()
    assert seen == 12
    assert statistics.peak_in_flight <= statistics.bound


def test_a_source_may_reuse_its_buffers() -> None:
    """What was packed is the batch's own."""
    buffers = [np.empty(8, np.float32) for _ in range(4)]

    def reusing() -> Iterator[list[np.ndarray]]:
        for number in range(12):
            for buffer in buffers:
                buffer[:] = number
            yield buffers

    with prefetch_to_device(reusing()) as batches:
        kept = list(batches)
    assert [[float(leaf[0]) for leaf in batch] for batch in kept] == [[float(i)] * 4 for i in range(12)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_delete_used_deletes_packed_leaves(size: int) -> None:
    """Batch k-1 is deleted by the call that returns batch k."""
    with prefetch_to_device(BATCHES, size, delete_used=True) as batches:
        taken: list[Any] = []
        for _ in BATCHES:
            taken.append(next(batches))
            alive = [not leaf.is_deleted() for batch in taken for leaf in batch.values()]
            assert alive == [False] * 5 * (len(taken) - 1) + [True] * 5


@pytest.mark.parametrize("delete_used", [False, True])
def test_bytes_are_those_of_the_buffer_and_of_what_it_becomes(delete_used: bool) -> None:
    """A buffer is charged while it is ahead; what is handed out, also with its leaves."""
    batch = [np.zeros(100, np.float32)] * 4
    with prefetch_to_device([batch] * 9, 2, host_size=0, delete_used=delete_used) as batches:
        next(batches)
        buffer = 4 * 400
        assert batches.statistics().bytes_in_flight == 2 * buffer + 4 * 400
        list(batches)
        statistics = batches.statistics()
    assert statistics.peak_bytes_in_flight <= statistics.bytes_bound


def test_kept_batches_are_counted() -> None:
    """Batches that the loop keeps are known by a leaf that it got, not by the buffer."""
    with prefetch_to_device([*BATCHES] * 3) as batches:
        kept = [next(batches) for _ in range(10)]
        assert batches.statistics().kept_by_consumer == 9
        del kept
        assert batches.statistics().kept_by_consumer == 0


def test_the_smallest_leaves_share_a_buffer_up_to_its_limit(packed, monkeypatch) -> None:
    """Where small leaves are too many for one buffer, the largest of them travel alone, and all arrive."""
    monkeypatch.setattr(packing, "MOST_BYTES", 4000)
    batch = {f"x{n:04d}": np.arange(n, dtype=np.float32) for n in (100, 900, 200, 300, 800)}
    with prefetch_to_device([batch] * 3) as batches:
        for out in batches:
            for name, leaf in batch.items():
                np.testing.assert_array_equal(out[name], leaf)
    assert packed == [3] * 3  # the buffer with 100, 200 and 300, and the other two
