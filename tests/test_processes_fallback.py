"""Two processes without the coordination service's client: the same agreement by public API, on the loop's thread.

This file is also the program of the processes; it takes the scenarios of `test_uneven` that need no service.
"""

from __future__ import annotations

import pathlib

import pytest
import test_uneven
from several import Reports, Scenarios

SCENARIOS = Scenarios()
NAMES = ("even", "drop", "pad", "nothing", "structures", "modes", "failing", "on_demand", "two_at_once")
for name in NAMES:
    SCENARIOS.add(test_uneven.SCENARIOS[name])


@SCENARIOS.add
def error(rank: int, folder: pathlib.Path) -> None:
    """An error that says who ended after how many; lengths that are known are not asked for."""
    for way in test_uneven.WAYS.values():
        text = "Batch 5: process 0 ended after 5 batches, process 1 has more"
        with test_uneven.prefetch(way(test_uneven.some(rank, 5 + 2 * rank))) as batches:
            assert batches.element_spec["x"].shape == (8, 2)
            with pytest.raises(ValueError, match=text):
                test_uneven.firsts(batches)


reports = SCENARIOS.fixture(__file__, processes=2, devices=test_uneven.DEVICES)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes(name: str, reports: Reports) -> None:
    """Both processes get through the scenario without the service."""
    reports.check(name)


if __name__ == "__main__":
    from jaxprefetch.processes.service import Service

    Service.find = staticmethod(lambda: None)
    SCENARIOS.main()
