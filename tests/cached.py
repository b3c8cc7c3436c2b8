"""Caches whose examples can be told by their values, and the places where a cache may be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprefetch import DeviceCache

DEVICES = np.array(jax.devices()[:8])
FOUR = Mesh(DEVICES[:4], ("data",))
MESH = Mesh(DEVICES.reshape(4, 2), ("data", "model"))
PLACES = {
    "default": None,
    "device": jax.devices()[3],
    "split": NamedSharding(FOUR, P("data")),
    "replicated along model": NamedSharding(MESH, P("data")),
    "split by both": NamedSharding(MESH, P(("model", "data"))),
    "replicated": NamedSharding(FOUR, P()),
    "inner axis, too": {"x": NamedSharding(MESH, P("data", "model")), "n": NamedSharding(MESH, P("data"))},
    "explicit": NamedSharding(Mesh(DEVICES[:4], ("data",), axis_types=(AxisType.Explicit,)), P("data")),
}
SPLIT = PLACES["split"]


def examples(*numbers: int) -> dict[str, np.ndarray]:
    """Examples that can be told by their values."""
    n = np.array(numbers, np.int32)
    return {"x": np.repeat(n.astype(np.float32)[:, None], 4, axis=1), "n": n}


def numbers(batch: Any) -> list[int]:
    """Which examples these are; their leaves have to agree."""
    n = np.asarray(batch["n"])
    np.testing.assert_array_equal(np.asarray(batch["x"]), np.repeat(n.astype(np.float32)[:, None], 4, axis=1))
    return n.tolist()


SPEC = {"x": jax.ShapeDtypeStruct((4,), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}


def content(cache: DeviceCache) -> list[int]:
    """All slots, by number; those without an example are zero."""
    return np.asarray(cache._store.resident.arrays[0]).tolist()
