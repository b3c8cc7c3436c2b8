"""Prefetchers and queues under chosen schedules and faults: nothing is lost, doubled, out of order, left or stuck.

HYPOTHESIS_PROFILE=full pytest tests/test_schedules.py        100,000 schedules instead of 2,000
"""

from __future__ import annotations

import dataclasses
import itertools

import driven_prefetcher
import driven_queue
import pytest
import schedules
from driven_prefetcher import Case
from driven_queue import QueueCase
from hypothesis import given, settings
from scheduler import Choices

STRIDE = 1 if schedules.NIGHT else 3


@given(case=schedules.prefetchers())
@settings(max_examples=schedules.examples(1_400))
def test_a_prefetcher_under_any_schedule(case: Case) -> None:
    """Batches come whole and in order, faults at their place as what they are, and closing leaves nothing."""
    driven_prefetcher.run(case)


def test_an_iterator_that_is_closed_while_it_is_opened_is_closed_once() -> None:
    """`close()` strikes a reader that has just opened its source, whose iterator the reader then leaves alone."""
    case = Case(size=1, host_size=1, source="closable", batches=0, closers=(1, 1), rival=True)
    for shift, gap in itertools.product(range(-6, 7), (-1, 0, 1)):
        choices = Choices(preempt=((12, 0), (78 + shift, 0), (76 + shift + gap, 1)), turns=(0, 0, 1, 1, 0, 1))
        driven_prefetcher.run(dataclasses.replace(case, choices=choices))


@given(case=schedules.queues())
@settings(max_examples=schedules.examples(600))
def test_a_queue_under_any_schedule(case: QueueCase) -> None:
    """What was accepted is taken once and in order, whoever waits has a reason to, and closing leaves nothing."""
    driven_queue.run(case)


@given(case=schedules.prefetchers())
@settings(max_examples=20)
def test_the_same_choices_give_the_same_run(case: Case) -> None:
    """A schedule can be run again, step for step."""
    first, second = driven_prefetcher.run(case), driven_prefetcher.run(case)
    assert first.log == second.log
    assert first.points == second.points


@pytest.mark.parametrize("host_size", [0, 2])
def test_a_finaliser_may_close_a_prefetcher_anywhere(host_size: int) -> None:
    """A `close()` in the middle of anything, on whatever thread is there, leaves a prefetcher that has ended."""
    case = Case(batches=3, host_size=host_size)
    for at in range(1, driven_prefetcher.run(case).points, STRIDE):
        driven_prefetcher.run(dataclasses.replace(case, struck_at=at))


def test_a_finaliser_may_close_a_queue_anywhere() -> None:
    """A `close()` in the middle of anything, on whatever thread is there, loses no batch and wakes who waits."""
    case = QueueCase()
    for at in range(1, driven_queue.run(case).points, STRIDE):
        struck = driven_queue.run(dataclasses.replace(case, struck_at=at))
        happened = [what for _, what, _ in struck.log]
        after = happened[happened.index("is struck") :]
        assert "has waited long enough" not in after, f"struck at {at}, and nobody woke\n{struck.trace()}"


def test_a_consumer_that_waits_for_the_source_sleeps() -> None:
    """While the source is late and the step before runs, `next()` waits, and leaves the GIL to the reader."""
    choices = Choices(turns=(0, 0, 0, 0, 0, 1))  # batch 1 has landed, the fence of step 0 is not done, a wait runs out
    driven_prefetcher.run(Case(batches=3, fault="block", at=2, choices=choices), spins=False)


def test_leaving_a_queue_with_a_copy_that_fails() -> None:
    """What `clear()` drops is waited for and not told of: that its copy has failed is an error of `get()` only."""
    for taken in range(3):
        driven_queue.run(
            QueueCase(
                size=3,
                device_fault="landing",
                device_at=1,
                producers=(("wait", "wait", "wait"),),
                consumers=(("wait",) * taken,),
                to_the_end=False,
                closers=(("exit", taken),),
            )
        )
