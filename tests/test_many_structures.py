"""Sources whose batches are each of another kind: nothing grows with them, and each arrives as what it is."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import jax
import numpy as np
import pytest

from jaxprefetch import prefetch_to_device
from jaxprefetch.device.placement import Placement
from jaxprefetch.layout import StagingOptions
from jaxprefetch.recent import KEPT, Recent
from jaxprefetch.staging import Stager

MANY = 5 * KEPT


class Tag:
    """A static field: equal to itself only."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tagged:
    x: Any
    tag: Any = dataclasses.field(metadata={"static": True})


def staged(*batches: Any, **options: Any) -> Stager:
    """A stager that has staged these."""
    stager = Stager(Placement(None), StagingOptions(**options))
    stager.begin_pass()
    for number, batch in enumerate(batches):
        stager.stage(batch, number, lambda nbytes: None)
    return stager


SOURCES = {
    "static fields": ([Tagged(np.zeros(2), number) for number in range(MANY)], {}),
    "keys": ([{f"x{number}": np.zeros(2)} for number in range(MANY)], {}),
    "shapes": ([np.zeros(number) for number in range(MANY)], {}),
    "kept leaves": (
        [[np.array([number])] * 10 for number in range(MANY)],
        {"keep_on_host": lambda path, leaf: leaf[0] >> int(path) & 1},
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_remembered_of_kinds_of_batches_is_bounded(source: str) -> None:
    """However many structures, shapes or sets of kept leaves come, plans are remembered for a fixed number of them."""
    batches, options = SOURCES[source]
    stager = staged(*batches, **options)
    assert len(stager._structures) <= KEPT
    assert len(stager._layouts) == KEPT


def test_one_shape_in_passes_of_other_rows_has_one_plan() -> None:
    """With pad, the rows to fill up to change from pass to pass; plans for those of past passes are let go."""
    stager = staged(last_batch="pad")
    plans = []
    for rows in range(4, 12):
        stager.begin_pass()
        for number, n in enumerate((rows, 4)):
            batch = stager.stage(np.zeros(n), number, lambda nbytes: None)
            assert batch is not None
        plans.append(weakref.ref(batch.plan))
    del batch
    gc.collect()
    assert sum(plan() is not None for plan in plans) == 2  # of the last pass, and of batch 0 of the first


@pytest.mark.parametrize("host_size", [0, 4])
def test_static_fields_are_let_go(host_size: int) -> None:
    """Objects in static fields that differ in each batch do not pile up."""
    tags: list[weakref.ref[Tag]] = []

    def source():
        for number in range(MANY):
            tag = Tag()
            tags.append(weakref.ref(tag))
            yield Tagged(np.full(2, number), tag)

    with prefetch_to_device(source(), host_size=host_size) as batches:
        for number, batch in enumerate(batches):
            assert batch.tag is tags[number]()
            np.testing.assert_array_equal(np.asarray(batch.x), [number] * 2)
        gc.collect()
        assert sum(tag() is not None for tag in tags) <= KEPT + 3  # of the first batch, too, and of those in flight
    assert len(tags) == MANY


def test_structures_that_come_again_are_delivered_right() -> None:
    """Kinds of batches that were forgotten meanwhile arrive with their own structure and values."""
    source = [Tagged(np.full(number % 7, number), number % (KEPT + 9)) for number in range(MANY)]
    with prefetch_to_device(source) as batches:
        for batch, raw in zip(batches, source, strict=True):
            assert batch.tag == raw.tag
            np.testing.assert_array_equal(np.asarray(batch.x), raw.x)


def test_changed_shapes_are_said_once_however_many_there_are(caplog: Any) -> None:
    """One warning tells of changed shapes, also when plans are forgotten and made again."""
    for _ in range(2):
        staged(*[Tagged(np.zeros(2 + number // 10), number) for number in range(MANY)])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert all(text.startswith("jaxprefetch: batch 10 has other shapes") for text in said)


def test_a_value_is_made_once_while_it_is_in_use() -> None:
    """Values in use are kept, the one whose use is longest ago is forgotten first, and equal keys are one key."""
    made: list[Any] = []
    recent: Recent[list[int], int] = Recent()

    def get(number: int) -> int:
        return recent.get([number], lambda: made.append(number) or number)

    for number in range(MANY):
        assert [get(number), get(0)] == [number, 0]
    assert made == list(range(MANY))
    assert len(recent) == KEPT
    get(MANY - KEPT + 1)
    get(MANY - KEPT)
    assert made[MANY:] == [MANY - KEPT]


def test_a_value_that_cannot_be_made_changes_nothing() -> None:
    """Where making a value raises, what is remembered stays as it was."""
    recent: Recent[str, int] = Recent()
    recent.get("a", lambda: 1)
    with pytest.raises(ZeroDivisionError, match="division"):
        recent.get("b", lambda: 1 // 0)
    assert len(recent) == 1
    assert recent.get("a", lambda: 2) == 1
