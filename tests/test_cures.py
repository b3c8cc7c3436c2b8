"""A message that names an option says whose it is, and how whoever gave the source to another call sets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxprefetch
from jaxprefetch import prefetch_to_device
from jaxprefetch.errors import OPTION

SHORT, TEXT = {"x": np.zeros(7, np.float32)}, {"x": "text"}


def split() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


def step(state: Any, batch: Any) -> Any:
    return state, {"loss": 0.0}


def train(batch: Any) -> None:
    jaxprefetch.train_loop(step, 0, [batch], num_steps=2, sharding=split(), progress=False)


def train_on_a_prefetcher(batch: Any) -> None:
    with prefetch_to_device([batch], sharding=split()) as batches:
        jaxprefetch.train_loop(step, 0, batches, num_steps=2, progress=False)


def evaluate(batch: Any) -> None:
    jaxprefetch.evaluate(lambda state, batch: batch["x"], 0, [batch], sharding=split())


def put(batch: Any) -> None:
    with jaxprefetch.DeviceQueue(2, sharding=split()) as queue:
        queue.put(batch)


def cache(batch: Any) -> None:
    with jaxprefetch.DeviceCache(8, batch, sharding=split()):
        pass


def refresh(batch: Any) -> None:
    with jaxprefetch.DeviceCache(8, {"x": np.zeros(8, np.float32)}, sharding=split()) as resident:
        resident.refresh([batch])
        for _ in range(2):
            resident.take(np.arange(8))


def told(call: Callable[[Any], None], batch: Any, kind: type[Exception]) -> tuple[str, str]:
    """The message, and the notes that say how to set an option."""
    with pytest.raises(kind, match=r"leaf x|multiple") as caught:
        call(batch)
    return str(caught.value), "".join(note for note in getattr(caught.value, "__notes__", []) if "as source" in note)


@pytest.mark.parametrize("call", [train, train_on_a_prefetcher, evaluate, put, cache, refresh])
def test_a_leaf_that_no_device_takes(call) -> None:
    """Whose option keeps it is told to all, and what those can do who have no such option."""
    if call is cache:
        batch = {"x": np.full(8, "text")}
    else:
        batch = TEXT
    message, _ = told(call, batch, TypeError)
    assert message.endswith(f"{OPTION}keep_on_host=...) hands it on as it is; else leave it out of the batch.")


@pytest.mark.parametrize("call", [train, train_on_a_prefetcher, put, refresh])
def test_rows_that_do_not_divide(call) -> None:
    """The same with rows; only `evaluate` pads by itself, and a cache has no short batches."""
    message, _ = told(call, SHORT, ValueError)
    assert f"{OPTION}last_batch='pad') fills a short last batch up" in message
    assert message.endswith("else batch to a multiple of 8.")


def test_who_gave_a_bare_source_is_told_where_options_are_set() -> None:
    """A note of the call through which the user came, and of that only."""
    pass_it = "jaxprefetch: pass {} a prefetch_to_device(...), with that and all other options{}, as source"
    assert told(train, SHORT, ValueError)[1] == pass_it.format("train_loop", "")
    assert told(train, TEXT, TypeError)[1] == pass_it.format("train_loop", "")
    assert told(evaluate, TEXT, TypeError)[1] == pass_it.format("evaluate", " and last_batch='pad'")
    for call in (train_on_a_prefetcher, put, refresh):
        assert not told(call, TEXT, TypeError)[1]


def test_other_errors_have_no_such_note() -> None:
    """What names no option is left as it is."""

    def fails(state: Any, batch: Any) -> Any:
        raise ValueError("leaf x of my own")

    def call(batch: Any) -> None:
        jaxprefetch.train_loop(fails, 0, [batch], num_steps=1, progress=False)

    assert told(call, SHORT, ValueError) == ("leaf x of my own", "")
