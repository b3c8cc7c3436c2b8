"""Where batches go: every kind of sharding, resolved at the call, whatever is in force around the loop."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxprefetch import prefetch_to_device

P = PartitionSpec
BATCH = {"x": np.arange(64, dtype=np.float32).reshape(8, 8), "y": np.arange(8, dtype=np.int32)}
BATCHES = [{name: leaf + number for name, leaf in BATCH.items()} for number in range(5)]


def mesh_1d(devices: int = 8) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def mesh_2d() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def explicit_mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


SHARDINGS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Device": lambda: jax.devices()[3],
    "SingleDeviceSharding": lambda: SingleDeviceSharding(jax.devices()[2]),
    "1D": lambda: NamedSharding(mesh_1d(), P("data")),
    "1D, some devices": lambda: NamedSharding(Mesh(np.array(jax.devices()[2:6]), ("data",)), P("data")),
    "1D, one device": lambda: NamedSharding(mesh_1d(1), P("data")),
    "2D": lambda: NamedSharding(mesh_2d(), P("data", "model")),
    "2D, explicit": lambda: NamedSharding(explicit_mesh(), P("data", "model")),
    "2D, model replicated": lambda: NamedSharding(mesh_2d(), P("data")),
    "2D, both on the rows": lambda: NamedSharding(mesh_2d(), P(("data", "model"))),
    "2D, other order": lambda: NamedSharding(mesh_2d(), P(("model", "data"))),
    "inner axis": lambda: NamedSharding(mesh_2d(), P(None, "model")),
    "axes swapped": lambda: NamedSharding(mesh_2d(), P("model", "data")),
    "replicated": lambda: NamedSharding(mesh_2d(), P()),
    "host memory": lambda: NamedSharding(mesh_1d(), P("data"), memory_kind="unpinned_host"),
    "prefix": lambda: {"x": NamedSharding(mesh_2d(), P("data", "model")), "y": jax.devices()[1]},
    "prefix with None": lambda: {"x": NamedSharding(mesh_2d(), P("data", "model")), "y": None},
}

by_sharding = pytest.mark.parametrize("kind", SHARDINGS)


def expected(sharding: Any, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """What jax.device_put makes of each leaf, with the axes that it does not have left out of the spec."""

    def put(name: str) -> jax.Array:
        target = sharding[name] if isinstance(sharding, dict) else sharding
        if isinstance(target, NamedSharding):
            spec = P(*tuple(target.spec)[: batch[name].ndim])
            target = NamedSharding(target.mesh, spec, memory_kind=target.memory_kind)
        return jax.device_put(batch[name], target)

    return {name: put(name) for name in batch}


def assert_same(got: Any, wanted: Any) -> None:
    for name, array in wanted.items():
        assert got[name].sharding == array.sharding
        assert got[name].committed == array.committed
        assert got[name].dtype == array.dtype
        for mine, other in zip(got[name].addressable_shards, array.addressable_shards, strict=True):
            assert (mine.device, mine.index) == (other.device, other.index)
            np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(other.data))


@by_sharding
def test_batches_go_where_device_put_would_put_them(kind: str) -> None:
    """Each batch has the sharding, commitment and shards that jax.device_put gives, and element_spec says so before."""
    sharding = SHARDINGS[kind]()
    with prefetch_to_device(BATCHES, sharding=sharding) as batches:
        spec = batches.element_spec
        for batch, raw in zip(batches, BATCHES, strict=True):
            assert_same(batch, expected(sharding, raw))
            for name, array in batch.items():
                assert (spec[name].shape, spec[name].dtype) == (array.shape, array.dtype)
                assert spec[name].sharding == array.sharding


@by_sharding
def test_one_compiled_step_serves_all_batches(kind: str) -> None:
    """The first batch and all others are served by one compiled step."""
    step = jax.jit(lambda number, batch: (number, batch["x"] * 2.0))
    with prefetch_to_device([(1, batch) for batch in BATCHES], sharding=(None, SHARDINGS[kind]())) as batches:
        for number, batch in batches:
            if {*batch["x"].devices()} == {*batch["y"].devices()}:
                step(number, batch)
            else:
                step(number, {"x": batch["x"]})
            assert step._cache_size() == 1


@by_sharding
@pytest.mark.parametrize("delete_used", [False, True])
def test_bytes_charged_are_the_bytes_of_the_shards(kind: str, delete_used: bool) -> None:
    """bytes_in_flight counts what the shards take on the fullest device, replicated leaves in full on each."""
    options = {"sharding": SHARDINGS[kind](), "delete_used": delete_used, "host_size": 0}
    with prefetch_to_device(BATCHES, **options) as batches:
        first = next(batches)
        bytes_by_device: dict[Any, int] = {}
        for array in first.values():
            for shard in array.addressable_shards:
                bytes_by_device[shard.device] = bytes_by_device.get(shard.device, 0) + shard.data.nbytes
        assert batches.statistics().in_flight == 2
        assert batches.statistics().bytes_in_flight == 2 * max(bytes_by_device.values())


# ---- resolved at the call


@pytest.mark.parametrize("consumer", ["same", "another default", "thread"])
def test_the_default_device_is_that_of_the_call(consumer: str) -> None:
    """Without a sharding, batches go uncommitted to the default device of the call, wherever they are consumed."""
    with jax.default_device(jax.devices()[5]):
        prefetcher = prefetch_to_device(BATCHES)
        if consumer == "same":
            taken = list(prefetcher)
    if consumer == "another default":
        with jax.default_device(jax.devices()[1]):
            taken = list(prefetcher)
    elif consumer == "thread":
        taken = []
        thread = threading.Thread(target=lambda: taken.extend(prefetcher))
        thread.start()
        thread.join()
    assert len(taken) == len(BATCHES)
    for batch, raw in zip(taken, BATCHES, strict=True):
        for name, array in batch.items():
            assert array.devices() == {jax.devices()[5]}
            assert not array.committed
            np.testing.assert_array_equal(np.asarray(array), raw[name])


@pytest.mark.parametrize("mesh", [mesh_1d, mesh_2d, explicit_mesh])
def test_a_partition_spec_means_the_mesh_of_the_call(mesh: Callable[[], Mesh]) -> None:
    """A PartitionSpec, also inside a prefix, is read under the mesh in force at the call."""
    with jax.set_mesh(mesh()):
        made = [prefetch_to_device(BATCHES, sharding=sharding) for sharding in (P("data"), {"x": P("data"), "y": P()})]
    for prefetcher in made:
        for batch, raw in zip(prefetcher, BATCHES, strict=True):
            assert batch["x"].sharding == NamedSharding(mesh(), P("data"))
            np.testing.assert_array_equal(np.asarray(batch["x"]), raw["x"])
    assert batch["y"].sharding == NamedSharding(mesh(), P())


def test_construction_does_nothing_yet() -> None:
    """Importing starts no backend; construction with an explicit sharding puts, compiles, pulls and starts nothing."""
    program = """
import threading, jax, numpy as np
from jax._src import xla_bridge
import jaxprefetch
assert not xla_bridge.backends_are_initialized(), "importing starts a backend"
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
def asked(*args, **kwargs):
    raise AssertionError("too early")
jax.device_put = jax.jit = jax.devices = jax.local_devices = asked
class Source:
    __iter__ = asked
for sharding in (jax.NamedSharding(mesh, jax.P("data")), mesh.devices[3], {"x": mesh.devices[1]}):
    made = jaxprefetch.prefetch_to_device(Source(), sharding=sharding)
    assert threading.active_count() == 1, threading.enumerate()
    assert not jax.live_arrays()
    made.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# ---- what may be in force around the loop

CONTEXTS: dict[str, Callable[[], Any]] = {
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "disable_jit": lambda: jax.disable_jit(),
    "set_mesh, another": lambda: jax.set_mesh(Mesh(np.array(jax.devices()[4:6]), ("other",))),
    "set_mesh, explicit": lambda: jax.set_mesh(explicit_mesh()),
    "use_abstract_mesh": lambda: jax.sharding.use_abstract_mesh(mesh_1d(2).abstract_mesh),
    "enable_x64": lambda: jax.enable_x64(True),
    "default_device": lambda: jax.default_device(jax.devices()[7]),
    "default_device as text": lambda: jax.default_device("cpu"),
    "no promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "debug_nans": lambda: jax.debug_nans(True),
}


@by_sharding
@pytest.mark.parametrize("options", [{}, {"delete_used": True}, {"host_size": 0}], ids=str)
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_around_the_loop_change_nothing(context: str, options: dict[str, Any], kind: str) -> None:
    """Batches, placement and fences are the same whatever contexts are in force where the loop runs."""
    sharding = SHARDINGS[kind]()
    wanted = expected(sharding, BATCH)
    prefetcher = prefetch_to_device(BATCHES, sharding=sharding, **options)
    with CONTEXTS[context](), prefetcher as batches:
        taken = []
        for batch in batches:
            taken.append({name: np.array(jax.device_get(array)) for name, array in batch.items()})
            for name, array in batch.items():
                assert (array.sharding, array.dtype) == (wanted[name].sharding, wanted[name].dtype)
                assert array.committed == wanted[name].committed
    jax.tree.map(np.testing.assert_array_equal, taken, BATCHES)


def test_the_whole_program_may_forbid_implicit_transfers() -> None:
    """Nothing is transferred implicitly by any thread of ours, also where jax.Array leaves are padded."""
    rows = [jax.device_put(np.arange(n, dtype=np.float32)) for n in (8, 5)]
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        with prefetch_to_device(rows, sharding=NamedSharding(mesh_1d(), P("data")), last_batch="pad") as batches:
            shapes = [(array.shape, mask.shape) for array, mask in batches]
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    assert shapes == [((8,), (8,))] * 2


@pytest.mark.parametrize("context", [contextlib.nullcontext, lambda: jax.set_mesh(explicit_mesh())])
def test_steps_in_a_mesh_take_the_batches(context: Callable[[], Any]) -> None:
    """A step that runs under a mesh takes batches sharded over it, compiled once."""
    step = jax.jit(lambda batch: batch["x"].sum(axis=0))
    with context(), prefetch_to_device(BATCHES, sharding=NamedSharding(explicit_mesh(), P("data"))) as batches:
        for batch, raw in zip(batches, BATCHES, strict=True):
            np.testing.assert_allclose(np.asarray(step(batch)), raw["x"].sum(axis=0))
    assert step._cache_size() == 1
