"""Two processes that do not have the same: they find out in the same place, and none waits for ever.

This file is also the program of the processes.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from several import Reports, Scenarios

DEVICES, ROWS = 2, 4
SCENARIOS = Scenarios()
scenario = SCENARIOS.add

WAYS: dict[str, Callable[[Iterator], Any]] = {"counted": lambda batches: batches, "known": list}


def rows(rank: int, number: int, n: int = ROWS) -> dict[str, Any]:
    """What one process has of batch `number`."""
    return {"table": np.arange(3) + number, "x": np.full((n, 2), 1 + 10 * number + rank, np.float32)}


def some(rank: int, count: int, **options: Any) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield rows(rank, number, **options)


def shardings() -> dict[str, Any]:
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    spread = jax.sharding.PartitionSpec("data")
    return {
        "table": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
        "x": jax.sharding.NamedSharding(mesh, spread),
    }


def prefetch(source: Any, **options: Any) -> Any:
    from jaxprefetch import prefetch_to_device

    return prefetch_to_device(source, sharding=shardings(), **options)


def firsts(batches: Any) -> list[float]:
    """The first value of this process's rows in each batch, as a step over all devices sees the batches."""
    import jax

    total = jax.jit(lambda x: x.sum())
    out = []
    for batch in batches:
        total(batch["x"]).block_until_ready()
        out.append(float(np.asarray(batch["x"].addressable_shards[0].data)[0, 0]))
    return out


def expected(rank: int, count: int) -> list[float]:
    return [1.0 + 10 * number + rank for number in range(count)]


def keys_left() -> int:
    """How many keys of ours the service has."""
    from jax._src.distributed import global_state

    return len(global_state.client.key_value_dir_get("jaxprefetch"))


@scenario
def even(rank: int, folder: pathlib.Path) -> None:
    """Any number of passes, also where one batch at a time may be in host memory."""
    for way in WAYS.values():
        for options in ({"host_size": 4}, {"host_size": 0}, {"host_size": 2, "max_host_bytes": 1}):
            with prefetch(way(some(rank, 5)), **options) as batches:
                assert firsts(batches) == expected(rank, 5)
                assert firsts(batches) == (expected(rank, 5) if way is list else [])


@scenario
def error(rank: int, folder: pathlib.Path) -> None:
    """The default: an error that says who ended after how many; where lengths are known, at once."""
    for host_size in (4, 0):
        got: list[float] = []
        with (
            prefetch(some(rank, 5 + 2 * rank), host_size=host_size) as batches,
            pytest.raises(ValueError, match="Batch 5: process 0 ended after 5 batches, process 1 has more"),
        ):
            got.extend(map(lambda batch: float(np.asarray(batch["x"].addressable_data(0))[0, 0]), batches))
        assert got == expected(rank, 5)
    text = "Batch 0: the sources have different numbers of batches: process 0 has 5, process 1 has 7"
    with prefetch(list(some(rank, 5 + 2 * rank))) as batches, pytest.raises(ValueError, match=text):
        next(batches)


@scenario
def drop(rank: int, folder: pathlib.Path) -> None:
    """All stop where the first ends, in every pass."""
    for way in WAYS.values():
        for host_size in (4, 0):
            with prefetch(way(some(rank, 7 - 2 * rank)), uneven="drop", host_size=host_size) as batches:
                assert firsts(batches) == expected(rank, 5)
                assert way is not list or firsts(batches) == expected(rank, 5)


@scenario
def pad(rank: int, folder: pathlib.Path) -> None:
    """Whoever has ended goes on with rows that are all padding; other leaves keep their last values."""
    import jax

    masked = jax.jit(lambda x, mask: x.sum(where=mask[:, None]))
    for way in WAYS.values():
        for options in ({}, {"host_size": 0}, {"size": 4}, {"delete_used": True}):
            source = way(some(rank, 5 + 3 * rank))
            with prefetch(source, uneven="pad", last_batch="pad", **options) as batches:
                batches = ({name: leaf for name, leaf in batch.items()} for batch in batches)
                seen = [(float(masked(b["x"], b["mask"])), np.asarray(b["table"].addressable_data(0))) for b in batches]
            both = [ROWS * 2 * (1 + 10 * n) for n in range(5)]
            one = [ROWS * 2 * (2 + 10 * n) for n in (5, 6, 7)]
            assert [total for total, _ in seen] == [2 * b + ROWS * 2 for b in both] + one
            last = 4 if rank == 0 else 7
            np.testing.assert_array_equal(seen[-1][1], np.arange(3) + last)


PAD_NEEDS_MASK = "uneven='pad' needs the mask that last_batch='pad' makes"


@scenario
def nothing(rank: int, folder: pathlib.Path) -> None:
    """Nothing to pad like is an error; if no process has a batch, the pass is empty."""
    with prefetch(some(rank, 0), uneven="pad", last_batch="pad") as batches:
        assert firsts(batches) == []
    text = "Batch 0: process 0 has no batch at all, so that there is nothing to pad like"
    with (
        prefetch(some(rank, 3 * rank), uneven="pad", last_batch="pad") as batches,
        pytest.raises(ValueError, match=text),
    ):
        next(batches)


@scenario
def structures(rank: int, folder: pathlib.Path) -> None:
    """What does not make one global array is told at batch 0, with the leaf and what each sends."""
    both = r"Batch 0: leaf {} is not the same in all processes: process 0 sends {}.*, and process 1 sends {}"
    sends = r"x: float32\[{0}, 2\] \(for a global float32\[{1}, 2\] split by P.*\('data',\) over"
    cases = {
        both.format("x", sends.format(4, 8), sends.format(6, 12)): lambda b: rows(rank, 0, ROWS + 2 * rank),
        both.format("x", r"x: float32\[4, 2\]", r"x: int32\[4, 2\]"): lambda b: (
            b | {"x": b["x"].astype("i4" if rank else "f4")}
        ),
        both.format("table", r"table: .*\[3\]", r"table: .*\[4\]"): lambda b: b | {"table": np.arange(3 + rank)},
    }
    for text, change in cases.items():
        with prefetch([change(rows(rank, 0))] * 3) as batches, pytest.raises(ValueError, match=text):
            next(batches)
    from jaxprefetch import prefetch_to_device

    batch = {"a": np.zeros(ROWS)} | ({"b": np.zeros(ROWS)} if rank else {})
    text = "Batch 0: leaf b is not the same in all processes: process 0 has no such leaf, and process 1 sends b"
    with (
        prefetch_to_device([batch] * 3, sharding=shardings()["x"]) as batches,
        pytest.raises(ValueError, match=text),
    ):
        next(batches)


@scenario
def modes(rank: int, folder: pathlib.Path) -> None:
    """Prefetchers that were made differently do not go on."""
    text = "Batch 0: the prefetchers were made differently: process 0 uneven='error', process 1 uneven='drop'"
    with prefetch(some(rank, 3), uneven="drop" if rank else "error") as batches, pytest.raises(ValueError, match=text):
        next(batches)


@scenario
def later_shapes(rank: int, folder: pathlib.Path) -> None:
    """A batch that is shorter in all processes is fine; in one only it is an error in both."""
    for way in WAYS.values():
        short = [*some(rank, 3), rows(rank, 3, 2)]
        with prefetch(way(iter(short))) as batches:
            assert [batch["x"].shape[0] for batch in batches] == [8, 8, 8, 4]
        text = "Batch 3: process 1 has another shape than before .*x: float32.2, 2.*, and process 0 has not"
        uneven = [*some(rank, 3), rows(rank, 3, 2 if rank else ROWS)]
        with prefetch(way(iter(uneven))) as batches, pytest.raises(ValueError, match=text):
            firsts(batches)


@scenario
def failing(rank: int, folder: pathlib.Path) -> None:
    """What the source of one raises is told to the other, whose batches up to there come first."""

    def source() -> Iterator[Any]:
        yield from some(rank, 3)
        if rank == 1:
            raise OSError("the disk is gone")
        yield from (rows(rank, number) for number in range(3, 9))

    told = (OSError, "^the disk is gone") if rank else (RuntimeError, "Batch 3: process 1 has failed: OSError: ")
    for host_size in (4, 0):
        with prefetch(source(), host_size=host_size) as batches, pytest.raises(told[0], match=told[1]):
            firsts(batches)
        with prefetch(source(), host_size=host_size) as batches:
            assert [float(np.asarray(next(batches)["x"].addressable_data(0))[0, 0]) for _ in range(3)] == expected(
                rank, 3
            )
            for _ in range(2):  # the same again
                with pytest.raises(told[0], match=told[1]):
                    next(batches)


@scenario
def failing_while_one_waits(rank: int, folder: pathlib.Path) -> None:
    """A process that waits for its own source learns that the other has failed, though it cannot have the batch."""
    import threading

    never = threading.Event()

    def source() -> Iterator[Any]:
        yield rows(rank, 0)
        if rank == 1:
            raise OSError("the disk is gone")
        never.wait()

    told = (OSError, "the disk is gone") if rank else (RuntimeError, "Batch 1: process 1 has failed")
    batches = prefetch(source())
    next(batches)
    with pytest.raises(told[0], match=told[1]):
        next(batches)
    never.set()
    batches.close()


@scenario
def failing_ahead(rank: int, folder: pathlib.Path) -> None:
    """It does so, too, when the other has failed some batches later than it is itself, and so does that one."""
    import threading

    never = threading.Event()

    def source() -> Iterator[Any]:
        yield rows(rank, 0)
        if rank == 0:
            never.wait()
        yield from (rows(rank, number) for number in (1, 2))
        raise OSError("the disk is gone")

    batches = prefetch(source())
    next(batches)
    with pytest.raises(RuntimeError, match="Batch 3: process 1 has failed: OSError: the disk is gone"):
        next(batches)
    never.set()
    batches.close()


@scenario
def wrong_lengths(rank: int, folder: pathlib.Path) -> None:
    """A source that does not have as many batches as it says is an error in both."""

    class Says(list):
        def __len__(self) -> int:
            return 5

    for count, text in ((4, "has ended after 4"), (7, "has more")):
        source = Says(some(rank, count if rank else 5))
        told = f"len\\(source\\) is 5, and it {text}"
        told = told if rank else f"process 1 has failed: ValueError: .*{told}"
        if count == 4:
            told = "Batch 4: process 1 ended after 4 batches, process 0 has more"
        elif rank == 0:
            with prefetch(source) as batches:
                assert firsts(batches) == expected(0, 5)
            continue
        with prefetch(source) as batches, pytest.raises(ValueError, match=told):
            firsts(batches)


@scenario
def leaving(rank: int, folder: pathlib.Path) -> None:
    """When one leaves the loop early, the other learns it instead of waiting."""
    with prefetch(some(rank, 100)) as batches:
        for _ in range(3):
            next(batches)
        if rank == 0:
            with pytest.raises(RuntimeError, match="process 1 has left the loop"):
                for _ in batches:
                    pass


@scenario
def never_begun(rank: int, folder: pathlib.Path) -> None:
    """When one closes its prefetcher before its first batch, the other learns it, and the next one is not concerned."""
    with prefetch(some(rank, 10)) as batches:
        if rank == 0:
            with pytest.raises(RuntimeError, match="Batch 0: process 1 has left the loop"):
                next(batches)
    with prefetch(some(rank, 4)) as batches:
        assert firsts(batches) == expected(rank, 4)


@scenario
def together(rank: int, folder: pathlib.Path) -> None:
    """When both leave at the same batch nobody is told anything, and the next prefetcher knows nothing of it."""
    for way in WAYS.values():
        with prefetch(way(some(rank, 100))) as batches:
            assert [float(np.asarray(next(batches)["x"].addressable_data(0))[0, 0]) for _ in range(7)] == expected(
                rank, 7
            )
    with prefetch(some(rank, 4)) as batches:
        assert firsts(batches) == expected(rank, 4)


@scenario
def two_at_once(rank: int, folder: pathlib.Path) -> None:
    """Several prefetchers in turn: for training and for evaluation within it."""
    with prefetch(some(rank, 6)) as train, prefetch(list(some(rank, 2))) as evaluation:
        for _ in train:
            assert firsts(evaluation) == expected(rank, 2)


@scenario
def on_demand(rank: int, folder: pathlib.Path) -> None:
    """A source that makes batch k+1 of the result of step k gets it, in every process."""
    import queue

    import jax

    results: queue.SimpleQueue[float] = queue.SimpleQueue()

    def source() -> Iterator[Any]:
        value = 0.0
        for _ in range(6):
            yield {"table": np.arange(3), "x": np.full((ROWS, 2), value, np.float32)}
            value = results.get()

    step = jax.jit(lambda x: x.mean() + 1)
    means = []
    with prefetch(source()) as batches:
        for batch in batches:
            means.append(float(step(batch["x"])))
            results.put(means[-1])
    assert means == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@scenario
def memory_of_the_service(rank: int, folder: pathlib.Path) -> None:
    """However many batches there are, the service keeps few keys; of a closed prefetcher, none."""
    most = 0
    with prefetch(some(rank, 300)) as batches:
        for batch in batches:
            batch["x"].block_until_ready()
            most = max(most, keys_left())
    assert most < 20, most
    (folder / f"most {rank}").write_text(json.dumps(most))


@scenario
def evaluation(rank: int, folder: pathlib.Path) -> None:
    """`evaluate` gives the mean over the rows of all processes, whoever has more of them."""
    import jax

    from jaxprefetch import evaluate

    step = jax.jit(lambda state, batch: {"mean": batch["x"].mean(axis=1)})
    batches = [*some(rank, 2 + rank), rows(rank, 2 + rank, 1)]
    values = [[1 + 10 * n + r] * (ROWS if n < 2 + r else 1) for r in (0, 1) for n in range(3 + r)]
    found = evaluate(step, None, iter(batches), sharding=shardings())
    np.testing.assert_allclose(found["mean"], np.mean(np.concatenate(values)), rtol=1e-6)


@scenario
def queues(rank: int, folder: pathlib.Path) -> None:
    """Each process has a queue of its own; what all put and take alike becomes global arrays."""
    from jaxprefetch import DeviceQueue

    with DeviceQueue(4, sharding=shardings()) as queue:
        for batch in some(rank, 3):
            queue.put(batch)
        queue.close()
        assert firsts(queue) == expected(rank, 3)


@scenario
def caches(rank: int, folder: pathlib.Path) -> None:
    """A cache is one process's own; devices of others are refused."""
    from jaxprefetch import DeviceCache

    with pytest.raises(ValueError, match=r"has devices of other processes\. A cache is one process's own"):
        DeviceCache(8, {"x": np.zeros(2, np.float32)}, sharding=shardings()["x"])


@scenario
def settings_of_the_loop(rank: int, folder: pathlib.Path) -> None:
    """Nothing implicit is transferred, and nothing is compiled for the agreement."""
    import jax

    with jax.transfer_guard("disallow"), prefetch(some(rank, 3)) as batches:
        assert sum(1 for _ in batches) == 3


reports = SCENARIOS.fixture(__file__, processes=2, devices=DEVICES)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes(name: str, reports: Reports) -> None:
    """Both processes get through the scenario, see its docstring."""
    reports.check(name)


if __name__ == "__main__":
    SCENARIOS.main()
