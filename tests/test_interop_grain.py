"""Grain: data loaders and data sets, their worker processes, and going on after a restart.

pip install ".[test,interop]" && pytest -m interop
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from typing import Any

import grain
import numpy as np
import pytest
from interop_rows import Rows, in_order, rows, tell

from jaxprefetch import batched, prefetch_to_device
from jaxprefetch.host.states import from_json, to_json

pytestmark = pytest.mark.interop


def data_loader(source: Any = None, workers: int = 0) -> Any:
    sampler = grain.samplers.IndexSampler(24, shard_options=grain.sharding.NoSharding(), shuffle=False, num_epochs=1)
    operations = [grain.transforms.Batch(4)]
    return grain.DataLoader(data_source=source or Rows(), sampler=sampler, operations=operations, worker_count=workers)


def map_data(source: Any = None, workers: int = 0) -> Any:
    assert not workers
    return grain.MapDataset.source(source or Rows()).batch(4)


def iter_data(source: Any = None, workers: int = 0) -> Any:
    made = grain.MapDataset.source(source or Rows()).to_iter_dataset().batch(4)
    return made.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=workers)) if workers else made


MAKERS = {"DataLoader": data_loader, "MapDataset": map_data, "IterDataset": iter_data}
with_workers = pytest.mark.parametrize("kind", ["DataLoader", "IterDataset"])


@pytest.mark.parametrize("host_size", [0, 4])
@pytest.mark.parametrize("kind", MAKERS)
def test_each_is_gone_through_pass_by_pass(kind, host_size):
    """Loaders and data sets yield their batches in each pass."""
    with prefetch_to_device(MAKERS[kind](), host_size=host_size) as batches:
        assert [rows(batches) for _ in range(3)] == [in_order(4)] * 3


@with_workers
def test_workers_are_gone_after_the_pass(kind):
    """One worker process makes right batches in shared memory, which ends with the pass."""
    with prefetch_to_device(MAKERS[kind](workers=1)) as batches:
        delivered = list(batches)
        batches.close()
        assert not multiprocessing.active_children()
    assert rows(delivered) == in_order(4)


def test_batches_in_shared_memory_stay_on_the_host_as_copies():
    """A leaf of a worker's that is kept outlives the shared memory that it came in."""
    with prefetch_to_device(data_loader(workers=1), keep_on_host="y") as batches:
        delivered = list(batches)
    assert all(isinstance(batch["y"], np.ndarray) for batch in delivered)
    assert rows(delivered) == in_order(4)


@with_workers
def test_a_worker_that_dies_is_an_error_in_its_place(kind, tmp_path):
    """Batches before it arrive in order, then Grain's own error, each time again; nothing hangs."""
    os.mkfifo(told := str(tmp_path / "told"))
    with prefetch_to_device(MAKERS[kind](Rows(dies_at=13, told=told), workers=1)) as batches:
        assert rows(itertools.islice(batches, 3)) == in_order(4)[:3]
        tell(told)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="terminated unexpectedly with exit code 7"):
                next(batches)


def test_an_error_of_the_source_keeps_its_place():
    """An exception in the data source comes after the batches before it."""
    delivered = []
    with (
        prefetch_to_device(map_data(Rows(fails_at=13))) as batches,
        pytest.raises(ValueError, match="row 13 is broken"),
    ):
        for batch in batches:
            delivered += rows([batch])
    assert delivered == in_order(4)[:3]


def test_samples_become_batches():
    """`batched` stacks the elements of a data set."""
    assert rows(prefetch_to_device(batched(grain.MapDataset.source(Rows()), 4))) == in_order(4)


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in MAKERS), ("IterDataset", 1)])
def test_each_goes_on_where_it_was(kind, workers):
    """The state of a new prefetcher brings the batch after the one taken last, and whole passes after that."""
    with prefetch_to_device(MAKERS[kind](workers=workers)) as batches:
        assert rows([next(batches), next(batches)]) == in_order(4)[:2]
        state = json.dumps(to_json(batches.get_state()))
    with prefetch_to_device(MAKERS[kind](workers=workers)) as batches:
        batches.set_state(from_json(json.loads(state)))
        assert rows(batches) == in_order(4)[2:]
        if not workers:  # starting them takes seconds
            assert rows(batches) == in_order(4)
