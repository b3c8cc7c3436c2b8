"""Ray Data: batches that Ray's own processes make, as NumPy arrays and as Arrow tables.

pip install ".[test,interop]" && pytest -m interop
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from interop_rows import LENGTH, in_order, rows

from jaxprefetch import prefetch_to_device

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning"),  # JAX's own, of `ray.init`
    pytest.mark.filterwarnings("ignore:`:DeprecationWarning:ray.data"),  # Ray 2.60 sets options that it deprecates
    pytest.mark.filterwarnings("ignore:`ray_remote_args` is deprecated"),  # and has no other name for max_retries yet
]


@pytest.fixture(scope="module")
def ray():
    """A local Ray with two workers, which yields blocks in order."""
    import ray

    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    yield ray
    ray.shutdown()


def table(ray: Any, **columns: Any) -> Any:
    """All rows in four blocks, with further columns."""
    made = [{"x": np.full(3, i, np.float32), "y": i, **{name: columns[name][i] for name in columns}} for i in range(24)]
    return ray.data.from_items(made, override_num_blocks=4)


def test_batches_are_made_pass_by_pass(ray):
    """`iter_batches` is gone through anew in each pass, with a short last batch."""
    source = table(ray).iter_batches(batch_size=5)
    with prefetch_to_device(source) as batches:
        assert [rows(batches) for _ in range(3)] == [in_order(5)] * 3


def test_work_is_done_by_rays_processes(ray):
    """`map_batches` runs elsewhere, and its batches arrive in order."""

    def tagged(batch):
        return {**batch, "pid": np.full(len(batch["y"]), os.getpid(), np.int32)}

    with prefetch_to_device(table(ray).map_batches(tagged).iter_batches(batch_size=6)) as batches:
        delivered = list(batches)
    assert rows(delivered) == in_order(6)
    assert os.getpid() not in np.concatenate([np.asarray(batch["pid"]) for batch in delivered])


def test_arrow_batches_become_dicts(ray):
    """With batch_format="pyarrow" a batch is a table, whose columns arrive as a dict."""
    with prefetch_to_device(table(ray).iter_batches(batch_size=6, batch_format="pyarrow")) as batches:
        assert rows(batches) == in_order(6)


def test_columns_without_an_array_form_are_refused_or_kept(ray):
    """Strings are an error naming the column, or stay on the host."""
    source = table(ray, s=[f"s{i}" for i in range(LENGTH)]).iter_batches(batch_size=6)
    with (
        prefetch_to_device(source) as batches,
        pytest.raises(TypeError, match=r"^Batch 0, leaf s: arrays of dtype .* cannot go to a device"),
    ):
        next(batches)
    with prefetch_to_device(source, keep_on_host="s") as batches:
        assert next(batches)["s"].tolist() == [f"s{i}" for i in range(6)]


def test_a_worker_that_dies_is_rays_own_error(ray):
    """The error of a task whose process is gone arrives as Ray's; nothing hangs."""

    def die(batch):
        os._exit(7)

    source = table(ray).map_batches(die, max_retries=0).iter_batches(batch_size=6)
    with prefetch_to_device(source) as batches, pytest.raises(ray.exceptions.WorkerCrashedError, match="died"):
        next(batches)


def test_an_error_of_a_task_arrives(ray):
    """An exception in a task arrives in Ray's form, with its text."""

    def fail(batch):
        raise ValueError("the row is broken")

    source = table(ray).map_batches(fail, max_retries=0).iter_batches(batch_size=6)
    with prefetch_to_device(source) as batches, pytest.raises(Exception, match="the row is broken"):
        next(batches)


def test_a_data_set_itself_is_refused_by_ray(ray):
    """A data set cannot be iterated, which Ray says with the cure."""
    with (
        prefetch_to_device(table(ray)) as batches,
        pytest.raises(TypeError, match=r"aren't iterable.*iter_batches\(\)"),
    ):
        next(batches)


def test_threads_end_when_a_pass_is_left_early(ray):
    """Closing in the middle of a pass ends our thread; the next prefetcher begins anew."""
    source = table(ray).iter_batches(batch_size=2)
    with prefetch_to_device(source) as batches:
        next(batches)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxprefetch")]
    assert rows(prefetch_to_device(source)) == in_order(2)


def test_resume_by_replay_needs_an_order(ray):
    """Ray's batches are resumed by replay, where it keeps their order; else that is refused with the cure."""

    def make():
        return table(ray).iter_batches(batch_size=5)

    with prefetch_to_device(make()) as batches, pytest.raises(TypeError, match=r"cannot be resumed"):
        batches.get_state()
    with prefetch_to_device(make(), resume="replay") as batches:
        next(batches)
        state = batches.get_state()
    with prefetch_to_device(make(), resume="replay") as batches:
        batches.set_state(state)
        assert [rows(batches), rows(batches)] == [in_order(5)[1:], in_order(5)]
    options = ray.data.DataContext.get_current().execution_options
    options.preserve_order = False
    try:
        with pytest.raises(ValueError, match=r"Ray Data yields blocks as they get ready.*preserve_order = True"):
            prefetch_to_device(make(), resume="replay")
    finally:
        options.preserve_order = True
