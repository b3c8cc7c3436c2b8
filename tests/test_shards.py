"""Leaves that are split along inner axes leave the host shard by shard, each contiguous, and arrive as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_placement import assert_same

from jaxprefetch import prefetch_to_device
from jaxprefetch.device import transfer
from jaxprefetch.device.shards import Split

SHAPE = (8, 8, 16)
BATCHES = [np.arange(1024, dtype=np.float32).reshape(SHAPE) + number for number in range(4)]
SPECS = [
    P(None, "model"),
    P("data", "model"),
    P("model", "data"),
    P(None, None, "data"),
    P("data", None, "model"),
    P(None, ("model", "data")),
    P(None, "data", "model"),
    P("model", ("data",), None),
]


def mesh(explicit: bool = False) -> Mesh:
    if explicit:
        return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    return Mesh(np.array(jax.devices())[[3, 1, 7, 0, 2, 6, 5, 4]].reshape(4, 2), ("data", "model"))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What the batched put gets from the host."""
    shards: list[np.ndarray] = []
    assert transfer._batched_put is not None
    put, scope = transfer._batched_put

    def seeing(aval: Any, sharding: Any, xs: Any, devices: Any, committed: bool) -> jax.Array:
        shards.extend(xs)
        return put(aval, sharding, xs, devices, committed)

    monkeypatch.setattr(transfer, "_batched_put", (seeing, scope))
    return shards


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_they_are_where_device_put_would_put_them(spec: P, explicit: bool, batched: bool, monkeypatch: Any) -> None:
    """Values, sharding, commitment and type are those of jax.device_put, and one compiled step serves both."""
    if not batched:
        monkeypatch.setattr(transfer, "_batched_put", None)
    sharding = NamedSharding(mesh(explicit), spec)
    step = jax.jit(lambda x: x * 2.0)
    with prefetch_to_device(BATCHES, sharding=sharding) as batches:
        for batch, raw in zip(batches, BATCHES, strict=True):
            wanted = jax.device_put(raw, sharding)
            assert_same([batch], dict(enumerate([wanted])))
            assert batch.aval == wanted.aval
            step(batch)
            step(wanted)
    assert step._cache_size() == 1


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_each_shard_is_contiguous_and_aligned(spec: P, fresh: bool, sent: list[np.ndarray]) -> None:
    """JAX need not copy a shard before it sends it."""
    with prefetch_to_device(BATCHES, sharding=NamedSharding(mesh(), spec), fresh_buffers=fresh) as batches:
        list(batches)
    assert len(sent) == 8 * (len(BATCHES) - 1)
    for shard in sent:
        assert shard.flags.c_contiguous
        assert shard.ctypes.data % 64 == 0


MAKES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Fortran": np.asfortranarray,
    "reversed": lambda leaf: leaf[::-1, ::-1, ::-1],
    "strided": lambda leaf: np.repeat(leaf, 2, axis=1)[:, ::2],
    "broadcast": lambda leaf: np.broadcast_to(leaf[0], leaf.shape),
    "big-endian": lambda leaf: leaf.astype(">f4"),
    "64 bits": lambda leaf: leaf.astype(np.int64),
    "bytes": lambda leaf: leaf.astype(np.uint8),
}


@pytest.mark.parametrize("kind", MAKES)
def test_every_memory_layout_arrives(kind: str) -> None:
    """Strides, byte order and size of the source's type make no difference."""
    source = [MAKES[kind](leaf) for leaf in BATCHES]
    with prefetch_to_device(source, sharding=NamedSharding(mesh(), P("data", "model"))) as batches:
        for batch, raw in zip(batches, source, strict=True):
            np.testing.assert_array_equal(np.asarray(batch), raw.astype(batch.dtype))


def test_short_batches_are_padded() -> None:
    """Rows that a batch lacks are zero in every shard."""
    source = [BATCHES[0], BATCHES[1][:3]]
    sharding = (NamedSharding(mesh(), P("data", "model")),)
    with prefetch_to_device([(leaf,) for leaf in source], sharding=sharding, last_batch="pad") as batches:
        ((whole,), _), ((short,), mask) = batches
    np.testing.assert_array_equal(np.asarray(whole), source[0])
    np.testing.assert_array_equal(np.asarray(short)[:3], source[1])
    assert not np.any(np.asarray(short)[3:])
    assert np.asarray(mask).sum() == 3


def test_a_source_may_reuse_its_buffer() -> None:
    """What was delivered is the batch's own."""
    buffer = np.empty(SHAPE, np.float32)

    def reusing():
        for number in range(8):
            buffer[:] = number
            yield buffer

    with prefetch_to_device(reusing(), sharding=NamedSharding(mesh(), P(None, "model"))) as batches:
        kept = list(batches)
    assert [np.unique(np.asarray(batch)).tolist() for batch in kept] == [[number] for number in range(8)]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("spec", [*SPECS, P(), P("data"), P(("model", "data"))])
def test_the_shards_are_a_view(spec: P, order: str) -> None:
    """Dividing an array over a mesh copies nothing."""
    leaf = np.array(BATCHES[0], order=order)
    view = Split.of(SHAPE, NamedSharding(mesh(), spec), mesh().axis_names).view(leaf)
    assert np.shares_memory(view, leaf)
    whole = np.broadcast_to(view, (4, 2, *view.shape[2:]))
    indices = NamedSharding(mesh(), spec).devices_indices_map(SHAPE)
    for place in np.ndindex(4, 2):
        np.testing.assert_array_equal(whole[place], leaf[indices[mesh().devices[place]]])
