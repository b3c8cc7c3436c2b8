"""Prefetchers under chosen schedules and faults: nothing is lost, doubled, out of order, left behind or stuck.

    HYPOTHESIS_PROFILE=night pytest tests/test_schedules.py        100,000 schedules instead of 2,000
"""

from __future__ import annotations

import dataclasses

import schedules
from driven_prefetcher import Case, run
from hypothesis import given, settings


@given(case=schedules.prefetchers())
@settings(max_examples=schedules.examples(1_400))
def test_a_prefetcher_under_any_schedule(case: Case) -> None:
    """Batches come whole and in order, faults at their place as what they are, and closing leaves nothing."""
    run(case)


@given(case=schedules.prefetchers())
@settings(max_examples=20)
def test_the_same_choices_give_the_same_run(case: Case) -> None:
    """A schedule can be run again, step for step."""
    first, second = run(case), run(dataclasses.replace(case))
    assert first.log == second.log
    assert first.points == second.points
