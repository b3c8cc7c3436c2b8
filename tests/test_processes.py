"""Several processes: each yields its own rows of global arrays, and nothing of ours is collective on the devices.

This file is also the program of two processes with two CPU devices each. Where one has to wait for the other they meet
in a named pipe: opening it blocks until both have come.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from several import Reports, Scenarios

PROCESSES, DEVICES, ROWS = 2, 2, 4
THROUGH = "process 0 is half through"


# ---- what a process does

SCENARIOS = Scenarios()
scenario = SCENARIOS.add


def meet(rank: int, pipe: pathlib.Path) -> None:
    """Returns once both processes are here."""
    with open(pipe, "w" if rank == 0 else "r"):
        pass


def global_rows(number: int) -> np.ndarray:
    """Batch `number` of all processes together."""
    return np.arange(PROCESSES * ROWS * 2, dtype=np.float32).reshape(PROCESSES * ROWS, 2) + 100 * number


def own_rows(rank: int, count: int) -> list[dict[str, Any]]:
    """A source of one process: its rows, a leaf that all processes have whole, and a number."""
    return [
        {"x": global_rows(number)[rank * ROWS :][:ROWS], "table": np.arange(3) + number, "n": number}
        for number in range(count)
    ]


def named(mesh_shape: tuple[int, int], *axes: Any, across: str = "data") -> Any:
    """A sharding over all devices; `across` is the mesh axis that goes from process to process."""
    import jax

    devices = np.array(jax.devices()).reshape(mesh_shape)
    names = ("data", "model") if across == "data" else ("model", "data")
    return jax.sharding.NamedSharding(jax.sharding.Mesh(devices, names), jax.sharding.PartitionSpec(*axes))


def check(array: Any, whole: np.ndarray, sharding: Any) -> None:
    """This process's shards are the right pieces of the global array."""
    assert array.shape == whole.shape, (array.shape, whole.shape)
    assert array.sharding.is_equivalent_to(sharding, whole.ndim), array.sharding
    assert len(array.addressable_shards) == DEVICES
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


@scenario
def global_arrays(rank: int, folder: pathlib.Path) -> None:
    import jax

    from jaxprefetch import prefetch_to_device

    total = jax.jit(lambda x: x.sum())
    for sharding in (named((4, 1), "data"), named((2, 2), "data"), named((2, 2), "data", "model")):
        table = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        shardings = {"x": sharding, "table": table, "n": table}
        with prefetch_to_device(own_rows(rank, 5), sharding=shardings) as batches:
            spec = batches.element_spec
            for number, batch in enumerate(batches):
                check(batch["x"], global_rows(number), sharding)
                check(batch["table"], np.arange(3) + number, table)
                check(batch["n"], np.array(number), table)
                for name, array in batch.items():
                    assert (spec[name].shape, spec[name].dtype) == (array.shape, array.dtype)
                    assert spec[name].sharding.is_equivalent_to(array.sharding, array.ndim)
                assert float(total(batch["x"])) == global_rows(number).sum()
            assert number == 4
            shards = sum(shard.data.nbytes for shard in batch["x"].addressable_shards) // DEVICES
            per_device = shards + batch["table"].nbytes + batch["n"].nbytes
            assert batches.statistics().peak_bytes_in_flight <= 3 * per_device
        assert total._cache_size() == 1
        total.clear_cache()


@scenario
def numbers(rank: int, folder: pathlib.Path) -> None:
    """JAX makes no weakly typed array of several processes without a collective, and element_spec does not claim it."""
    import jax

    from jaxprefetch import prefetch_to_device

    with prefetch_to_device([{"n": 3, "f": 0.5, "b": True}], sharding=named((4, 1))) as batches:
        spec, batch = batches.element_spec, next(batches)
    for name, number in {"n": 3, "f": 0.5, "b": True}.items():
        assert batch[name].dtype == jax.device_put(number).dtype
        check(batch[name], np.array(number), named((4, 1)))
        assert spec[name].weak_type == batch[name].weak_type


@scenario
def replicas(rank: int, folder: pathlib.Path) -> None:
    """The processes differ along the model axis only, so both yield the same rows."""
    from jaxprefetch import prefetch_to_device

    rows = named((2, 2), "data", across="model")
    with prefetch_to_device([global_rows(n) for n in range(4)], sharding=rows) as batches:
        for number, batch in enumerate(batches):
            check(batch, global_rows(number), rows)
    columns = named((2, 2), "data", "model", across="model")
    with prefetch_to_device([global_rows(n)[:, rank : rank + 1] for n in range(4)], sharding=columns) as batches:
        for number, batch in enumerate(batches):
            check(batch, global_rows(number), columns)


@scenario
def own_pace(rank: int, folder: pathlib.Path) -> None:
    """Where lengths are known, process 0 takes half of its batches before process 1 takes one, whatever it does."""
    import jax

    from jaxprefetch import prefetch_to_device

    total = jax.jit(lambda batches: sum(batch["x"].sum() for batch in batches))
    sharding, kept = named((2, 2), "data"), []

    def delete(batch: dict[str, Any]) -> None:
        for array in batch.values():
            array.delete()

    ways = [(keep, {}) for keep in (kept.append,)]
    for use in (delete, lambda batch: batch["x"].delete(), lambda batch: None):
        for options in ({}, {"delete_used": True}, {"size": 4}, {"host_size": 0}, {"last_batch": "pad"}):
            ways.append((use, options))
    for use, options in ways:
        with prefetch_to_device(own_rows(rank, 8), sharding=sharding, **options) as batches:
            assert batches.element_spec  # both have batch 0 now
            if rank == 1:
                meet(rank, folder / THROUGH)
            for number, batch in enumerate(batches):
                check(batch["x"], global_rows(number), sharding)
                use(batch)
                if rank == 0 and number == 3:
                    meet(rank, folder / THROUGH)
        statistics = batches.statistics()
        assert statistics.taken == 8
        assert statistics.peak_in_flight <= statistics.bound
    assert float(total(kept)) == sum(global_rows(number).sum() for number in range(8))


@scenario
def own_ends(rank: int, folder: pathlib.Path) -> None:
    """Each pads its own rows; an error of one is told to the other."""
    import jax

    from jaxprefetch import prefetch_to_device

    sharding = named((4, 1), "data")
    short = [np.ones((n, 2), np.float32) for n in (ROWS, ROWS, 3 - rank)]
    with prefetch_to_device(short, sharding=sharding, last_batch="pad") as batches:
        totals = [float(jax.jit(lambda x, mask: x.sum(axis=1, where=mask[:, None]).sum())(*batch)) for batch in batches]
    assert totals == [16, 16, 10], totals
    with prefetch_to_device([short[0], short[2]], sharding=sharding) as batches:
        assert next(batches).shape == (PROCESSES * ROWS, 2)
        text = "Batch 1, leaf batch: axis 0 has 3 rows; the 2 devices along mesh axis 'data' need a multiple of 2"
        told = f"Batch 1: process 0 has failed: ValueError: {text}"
        refused = pytest.raises(RuntimeError, match=told) if rank else pytest.raises(ValueError, match=text)
        with refused:
            next(batches)


@scenario
def own_devices(rank: int, folder: pathlib.Path) -> None:
    """Without a sharding, or with a local one, batches are local, and a spec is read under the mesh of the call."""
    import jax

    from jaxprefetch import prefetch_to_device

    batch = {"x": np.full(4, rank, np.float32)}
    for sharding in (None, jax.local_devices()[1]):
        with prefetch_to_device([batch] * 4, sharding=sharding) as batches:
            for out in batches:
                assert out["x"].devices() == {sharding or jax.local_devices()[0]}
                np.testing.assert_array_equal(np.asarray(out["x"]), batch["x"])
    with jax.set_mesh(named((4, 1)).mesh):
        prefetcher = prefetch_to_device([batch], sharding=jax.sharding.PartitionSpec("data"))
    check(next(prefetcher)["x"], np.repeat(np.float32([0, 1]), 4), named((4, 1), "data"))
    prefetcher.close()


@scenario
def arrays_of_the_source(rank: int, folder: pathlib.Path) -> None:
    """Local arrays are this process's rows; global ones are passed; keys are arrays like others."""
    import jax

    from jaxprefetch import prefetch_to_device

    sharding, local = named((4, 1), "data"), jax.device_put(own_rows(rank, 1)[0]["x"])
    whole = jax.make_array_from_process_local_data(sharding, np.asarray(local))
    with prefetch_to_device([{"local": local, "whole": whole}] * 3, sharding=sharding, delete_used=True) as batches:
        for batch in batches:
            check(batch["local"], global_rows(0), sharding)
            check(batch["whole"], global_rows(0), sharding)
    assert not local.is_deleted()
    assert not whole.is_deleted()


@scenario
def keys(rank: int, folder: pathlib.Path) -> None:
    """Local typed keys cannot become rows of a global array; the error names the leaf and the way out."""
    import jax

    from jaxprefetch import prefetch_to_device

    sharding, made = named((4, 1), "data"), jax.random.split(jax.random.key(0), PROCESSES * ROWS)
    refused = pytest.raises(TypeError, match=r"Batch 0, leaf batch: typed PRNG keys .*global array.*key_data")
    with prefetch_to_device([made[rank * ROWS :][:ROWS]], sharding=sharding) as batches, refused:
        next(batches)


@scenario
def own_results(rank: int, folder: pathlib.Path) -> None:
    """Of a global array each process gets its own rows, once for all replicas; what cannot be one array is an error."""
    import jax

    from jaxprefetch import fetch_to_host, prefetch_to_device

    step = jax.jit(lambda batch: jax.tree.map(lambda leaf: leaf * 2, batch))
    for sharding in (named((4, 1), "data"), named((2, 2), "data"), named((2, 2), "data", "model")):
        with prefetch_to_device([global_rows(n)[rank * ROWS :][:ROWS] for n in range(4)], sharding=sharding) as batches:
            for number, rows in enumerate(fetch_to_host(map(step, batches))):
                np.testing.assert_array_equal(rows, 2 * global_rows(number)[rank * ROWS :][:ROWS])
        assert number == 3
    devices = np.array(jax.devices())[[0, 2, 1, 3]]  # the processes take turns
    scattered = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("data",)), jax.sharding.PartitionSpec("data"))
    array = jax.make_array_from_callback((8,), scattered, lambda index: np.arange(8)[index])
    with pytest.raises(ValueError, match=r"Result 0, leaf batch: the shards of this process .* are no block"):
        next(fetch_to_host([array]))


# ---- the tests

reports = SCENARIOS.fixture(__file__, processes=PROCESSES, devices=DEVICES, pipes=(THROUGH,))


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes(name: str, reports: Reports) -> None:
    """Both processes get through the scenario with the right values."""
    reports.check(name)


if __name__ == "__main__":
    SCENARIOS.main()
