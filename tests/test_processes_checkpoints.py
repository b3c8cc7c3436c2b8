"""Two processes save the train state and their places in the input together, and go on from there.

This file is also the program of the processes.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from several import Reports, Scenarios
from test_uneven import shardings

ROWS = 4
SCENARIOS = Scenarios()
scenario = SCENARIOS.add


class Shard:
    """A source of one process: repeats itself, each process has other numbers and `count` of them."""

    def __init__(self, rank: int, count: int):
        self._rank, self._count = rank, count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self._count):
            value = 1 + 10 * number + self._rank
            yield {"table": np.arange(3) + number, "x": np.full((ROWS, 2), value, np.float32)}


def prefetch(source: Any, **options: Any) -> Any:
    from jaxprefetch import prefetch_to_device

    return prefetch_to_device(source, sharding=shardings(), **options)


def steps() -> Any:
    """A step whose loss tells the batches of both processes apart, and whose state is on all devices."""
    import jax

    replicated = shardings()["table"]

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        mask = batch.get("mask", np.ones(1, bool))
        loss = batch["x"].sum(where=mask[:, None])
        return state * 0.5 + loss, {"loss": loss}

    return step, jax.device_put(np.float32(0), replicated)


@scenario
def goes_on(rank: int, folder: pathlib.Path) -> None:
    """`train_loop` in two processes ends with the same losses when it was interrupted, at any step, in any pass."""
    from jaxprefetch import train_loop

    step, state = steps()

    def run(where: pathlib.Path, num_steps: int, **options: Any) -> tuple[list[float], float, int]:
        losses: list[float] = []
        with prefetch(Shard(rank, 5), resume="replay", **options) as batches:
            end, summary = train_loop(
                step,
                state,
                batches,
                num_steps=num_steps,
                checkpoints=where,
                save_every_steps=100,
                hooks=lambda _, metrics: losses.append(metrics["loss"]),
                progress=False,
            )
        return losses, float(end), summary.resumed_from

    whole, end, _ = run(folder / "whole", 12)
    for stop in (3, 5, 7):
        first, _, _ = run(folder / f"stopped {stop}", stop)
        rest, again, resumed = run(folder / f"stopped {stop}", 12)
        assert resumed == stop
        assert first + rest == whole
        assert again == end


@scenario
def goes_on_in_padding(rank: int, folder: pathlib.Path) -> None:
    """At any place of a pass that one process pads the other goes on in it, as the first run did."""
    import jax

    def values(batches: Any) -> list[Any]:
        return [[np.asarray(leaf.addressable_data(0)).tolist() for leaf in jax.tree.leaves(batch)] for batch in batches]

    def make(source: Any) -> Any:
        return prefetch(source, uneven="pad", last_batch="pad", resume="replay")

    for kind in (list, lambda source: source):
        with make(kind(Shard(rank, 3 + 3 * rank))) as batches:
            whole = values(batches)
        for at in range(7):
            with make(kind(Shard(rank, 3 + 3 * rank))) as batches:
                iterator = iter(batches)
                some = values(next(iterator) for _ in range(at))
                state = batches.get_state()
            for _ in range(2):  # a second resume in the same pass is right, too
                with make(kind(Shard(rank, 3 + 3 * rank))) as batches:
                    batches.set_state(state)
                    iterator = iter(batches)
                    some += values(next(iterator) for _ in range(min(1, len(whole) - len(some))))
                    state = batches.get_state()
            with make(kind(Shard(rank, 3 + 3 * rank))) as batches:
                batches.set_state(state)
                assert some + values(batches) == whole


def elastic(rank: int, processes: int) -> Any:
    import grain

    rows = [{"table": np.int32(0), "x": np.full(2, number, np.float32)} for number in range(80)]
    shards = grain.sharding.ShardOptions(rank, processes)
    return grain.experimental.ElasticIterator(grain.MapDataset.source(rows).seed(0).shuffle(), 8, shards)


def all_rows(batch: Any) -> list[float]:
    """The rows of all processes."""
    import jax

    from jaxprefetch.processes.gathered import _gather

    one = {device.process_index: device for device in reversed(jax.devices())}
    own = np.concatenate([np.asarray(s.data)[:, 0] for s in batch["x"].addressable_shards])
    return sorted(_gather(tuple(one[process] for process in sorted(one)), own).ravel().tolist())


def prefetch_elastic(rank: int, processes: int) -> Any:
    import jax

    from jaxprefetch import prefetch_to_device

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    return prefetch_to_device(elastic(rank, processes), sharding=rows)


@scenario
def saves_elastic(rank: int, folder: pathlib.Path) -> None:
    """Here the state is saved; another program with one process goes on from it."""
    from jaxprefetch import Checkpoints

    state = np.zeros(2, np.float32)
    with prefetch_elastic(rank, 2) as batches, Checkpoints(folder / "elastic") as checkpoints:
        seen = [all_rows(next(batches)) for _ in range(4)]
        checkpoints.save(4, state, batches)
        rest = [all_rows(batch) for batch in batches]
    assert len(seen + rest) == 10
    if rank == 0:
        np.save(folder / "rest.npy", np.array(rest))
    with prefetch(Shard(rank, 5), resume="replay") as batches, Checkpoints(folder / "replayed") as checkpoints:
        next(batches)
        checkpoints.save(1, state, batches)


reports = SCENARIOS.fixture(__file__, processes=2, devices=2)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes(name: str, reports: Reports) -> None:
    """Both processes get through the scenario, see its docstring."""
    reports.check(name)


def test_another_number_of_processes(reports: Reports, tmp_path: pathlib.Path) -> None:
    """One process goes on where two have stopped, if the source counts for all of them; otherwise it says why not."""
    from jaxprefetch import Checkpoints

    reports.check("saves_elastic")
    for name in ("elastic", "replayed"):
        shutil.copytree(reports.folder / name, tmp_path / name)
    state = np.zeros(2, np.float32)
    with prefetch_elastic(0, 1) as batches, Checkpoints(tmp_path / "elastic") as checkpoints:
        _, step = checkpoints.restore(state, batches)
        assert step == 4
        rest = [all_rows(batch) for batch in batches]
    np.testing.assert_array_equal(rest, np.load(reports.folder / "rest.npy"))
    text = "Checkpoint 1 has the input's state of 2 processes, and there are 1.*ElasticIterator"
    with (
        prefetch(Shard(0, 5), resume="replay") as batches,
        Checkpoints(tmp_path / "replayed") as checkpoints,
        pytest.raises(ValueError, match=text),
    ):
        checkpoints.restore(state, batches)


if __name__ == "__main__":
    SCENARIOS.main()
