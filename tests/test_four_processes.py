"""Four processes with two CPU devices each: meshes of several axes, groups of processes, and who is named.

This file is also the program of the processes.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from several import Reports, Scenarios

PROCESSES, DEVICES, ROWS = 4, 2, 16
SCENARIOS = Scenarios()
scenario = SCENARIOS.add


def whole(number: int) -> np.ndarray:
    """Batch `number` of all processes together: every value is another one."""
    return np.arange(ROWS * 8, dtype=np.float32).reshape(ROWS, 8) + 1000 * number


def mesh(shape: tuple[int, ...], names: tuple[str, ...], order: Any = None) -> Any:
    """A mesh of all devices, or of those of some processes, in this order."""
    import jax

    order = range(PROCESSES) if order is None else order
    devices = [device for process in order for device in jax.devices() if device.process_index == process]
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names)


def own_part(sharding: Any, array: np.ndarray) -> np.ndarray:
    """What of the whole array a process with this sharding has to yield: the pieces of its devices, each once."""
    indices = sharding.addressable_devices_indices_map(array.shape).values()
    rows = sorted({index[0].indices(array.shape[0])[:2] for index in indices})
    columns = sorted({index[1].indices(array.shape[1])[:2] for index in indices})
    array = np.concatenate([array[start:stop] for start, stop in rows])
    return np.concatenate([array[:, start:stop] for start, stop in columns], axis=1)


def check(sharding: Any, *, of: int = 3) -> None:
    """Batches that are split in this way have the right pieces on every device, and the right sums."""
    import jax

    from jaxprefetch import prefetch_to_device

    total = jax.jit(lambda x: x.sum(), out_shardings=sharded(sharding.mesh))
    source = (own_part(sharding, whole(number)) for number in range(of))
    with prefetch_to_device(source, sharding=sharding) as batches:
        number = -1
        for number, batch in enumerate(batches):
            assert batch.shape == (ROWS, 8)
            for shard in batch.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), whole(number)[shard.index])
            assert float(total(batch)) == whole(number).sum()
        assert number == of - 1


def sharded(mesh: Any, *axes: Any) -> Any:
    import jax

    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


@scenario
def axes(rank: int, folder: pathlib.Path) -> None:
    """Data, fsdp and model axes, within processes and across them; rows that several processes have, too."""
    check(sharded(mesh((8,), ("data",)), "data"))
    check(sharded(mesh((4, 2), ("data", "fsdp")), ("data", "fsdp")))
    check(sharded(mesh((4, 2), ("data", "model")), "data"))
    check(sharded(mesh((2, 2, 2), ("data", "fsdp", "model")), ("data", "fsdp"), "model"))
    check(sharded(mesh((2, 4), ("data", "model")), "data"))  # two processes have the same rows
    check(sharded(mesh((2, 4), ("data", "model")), "data", "model"))
    check(sharded(mesh((2, 4), ("model", "data")), "data", "model"))


@scenario
def orders(rank: int, folder: pathlib.Path) -> None:
    """Processes may come in another order in the mesh, and their devices apart from each other."""
    import jax

    check(sharded(mesh((8,), ("data",), [2, 0, 3, 1]), "data"))
    check(sharded(mesh((2, 4), ("data", "model"), [3, 1, 0, 2]), "data", "model"))
    scattered = np.array(jax.devices()).reshape(4, 2).T.reshape(8)
    check(sharded(jax.sharding.Mesh(scattered, ("data",)), "data"))


@scenario
def groups(rank: int, folder: pathlib.Path) -> None:
    """Prefetchers over some of the processes agree among those; the others have nothing to do with it."""
    group = [0, 2] if rank in (0, 2) else [1, 3]
    check(sharded(mesh((4,), ("data",), group), "data"), of=2 + rank % 2)


@scenario
def ends(rank: int, folder: pathlib.Path) -> None:
    """All are told the same: who has ended, and who has more."""
    from jaxprefetch import prefetch_to_device

    sharding = sharded(mesh((8,), ("data",)), "data")
    rows = np.ones((4, 2), np.float32)
    text = "Batch 6: process 3 ended after 6 batches, processes 0-2 have more"
    with (
        prefetch_to_device((rows for _ in range(6 if rank == 3 else 9)), sharding=sharding) as batches,
        pytest.raises(ValueError, match=text),
    ):
        list(batches)
    for count, options in ((3, {"uneven": "drop"}), (6, {"uneven": "pad", "last_batch": "pad"})):
        for source in ((rows for _ in range(3 + rank)), [rows] * (3 + rank)):
            with prefetch_to_device(source, sharding=sharding, **options) as batches:
                assert sum(1 for _ in batches) == count


@scenario
def failing(rank: int, folder: pathlib.Path) -> None:
    """All others are told what one has raised."""
    from jaxprefetch import prefetch_to_device

    def source() -> Any:
        for number in range(20):
            if (rank, number) == (2, 5):
                raise OSError("the disk is gone")
            yield np.full((4, 2), number, np.float32)

    sharding = sharded(mesh((8,), ("data",)), "data")
    error, text = (OSError, "^the disk") if rank == 2 else (RuntimeError, "Batch 5: process 2 has failed: OSError: the")
    with prefetch_to_device(source(), sharding=sharding) as batches, pytest.raises(error, match=text):
        for number, _ in enumerate(batches):
            assert number < 5


reports = SCENARIOS.fixture(__file__, processes=PROCESSES, devices=DEVICES)


@pytest.mark.parametrize("name", SCENARIOS)
def test_four_processes(name: str, reports: Reports) -> None:
    """All four get through the scenario, see its docstring."""
    reports.check(name)


if __name__ == "__main__":
    SCENARIOS.main()
