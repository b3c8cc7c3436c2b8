"""Hypothesis's choices: which schedules, faults and programs there are.

@given(case=prefetchers())
@settings(max_examples=examples(1_400))       # of the 2,000 in CI; in the same proportion of 100,000 at night
"""

from __future__ import annotations

import os
from typing import Any

from driven_prefetcher import Case
from driven_queue import QueueCase
from hypothesis import strategies as st
from scheduler import Choices

IN_CI, AT_NIGHT = 2_000, 100_000
"""Schedules altogether."""

NIGHT = os.environ.get("HYPOTHESIS_PROFILE") == "full"


def examples(in_ci: int) -> int:
    """How many schedules of a kind are run now."""
    return in_ci * AT_NIGHT // IN_CI if NIGHT else in_ci


def choices(most: int) -> st.SearchStrategy[Choices]:
    """Who goes on when: threads preempted after so many points at most, turns when one is blocked, then dice."""
    pairs = st.tuples(st.integers(0, most), st.integers(0, 4))
    return st.builds(
        Choices,
        st.lists(pairs, max_size=8).map(tuple),
        st.lists(st.integers(0, 3), max_size=24).map(tuple),
        st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.3]),
        st.integers(0, 9_999),
    )


def _legal(drawn: dict[str, Any]) -> Case:
    """The case, without what cannot be together."""
    case = dict(drawn)
    if case["nested"]:
        case |= {"on": "cpu", "delete_used": False, "capped": False, "source": "generator", "device_fault": ""}
    if case["on"] == "cpu":
        case |= {"copiers": False}
        if case["device_fault"] in ("landing", "fence"):
            case["device_fault"] = ""
    if case["source"] == "writer" and case["fault"] in ("structure", "shape", "dtype"):
        case["fault"] = ""
    if case["device_fault"]:
        case["passes"] = 1
    if case["leaves"] == "drops":
        case |= {"closers": (), "struck_at": 0, "rival": False}
    if case["rival"]:
        steps = tuple(step for step in case["steps"] if step in ("next", "keep", "look"))
        case |= {"passes": 1, "delete_used": False, "steps": steps}
    return Case(**case)


def prefetchers() -> st.SearchStrategy[Case]:
    """Prefetchers, and all that happens to them."""
    steps = st.sampled_from(["next", "sync", "keep", "forget", "delete", "donate", "elsewhere", "look", "iter"])
    rarely = st.sampled_from([False, False, False, True])
    return st.fixed_dictionaries(
        {
            "on": st.sampled_from(["landing", "fence", "cpu"]),
            "size": st.integers(1, 3),
            "host_size": st.integers(0, 3),
            "delete_used": st.booleans(),
            "capped": rarely,
            "host_capped": rarely,
            "copiers": rarely,
            "slow_copies": st.booleans(),
            "source": st.sampled_from(["generator", "iterator", "closable", "loader", "writer"]),
            "batches": st.integers(0, 6),
            "fault": st.sampled_from(["", "", "raise", "garbage", "structure", "shape", "dtype", "block"]),
            "at": st.integers(0, 5),
            "device_fault": st.sampled_from(["", "", "", "put", "memory once", "memory", "landing", "fence"]),
            "device_at": st.integers(0, 4),
            "steps": st.lists(steps, max_size=5).map(tuple),
            "leaves": st.sampled_from(["never", "never", "stops", "closes", "drops"]),
            "passes": st.integers(1, 2),
            "closers": st.one_of(st.just(()), st.just(()), st.lists(st.integers(0, 5), max_size=2).map(tuple)),
            "struck_at": st.one_of(st.just(0), st.just(0), st.just(0), st.integers(0, 900)),
            "rival": rarely,
            "nested": rarely,
            "choices": choices(200),
        }
    ).map(_legal)


def queues() -> st.SearchStrategy[QueueCase]:
    """Queues, and all that happens to them."""
    puts = st.lists(st.sampled_from(["wait", "wait", "wait", "try", "patient", "no array", "other shape"]), max_size=4)
    gets = st.lists(st.sampled_from(["wait", "try", "patient", "keep", "delete"]), max_size=4)
    closers = st.tuples(st.sampled_from(["close", "close", "clear", "exit"]), st.integers(0, 4))
    rarely = st.sampled_from([False, False, False, True])

    def legal(drawn: dict[str, Any]) -> QueueCase:
        case = dict(drawn)
        if case["on"] == "cpu":
            case["copiers"] = False
            if case["device_fault"] in ("landing", "fence"):
                case["device_fault"] = ""
        else:
            case["capped"] = False  # the queue knows JAX's arrays only
        return QueueCase(**case)

    return st.fixed_dictionaries(
        {
            "on": st.sampled_from(["landing", "fence", "cpu"]),
            "size": st.integers(1, 3),
            "capped": rarely,
            "copiers": st.booleans(),
            "slow_copies": st.booleans(),
            "device_fault": st.sampled_from(["", "", "", "", "put", "memory once", "memory", "landing", "fence"]),
            "device_at": st.integers(0, 4),
            "producers": st.lists(puts.map(tuple), min_size=1, max_size=3).map(tuple),
            "consumers": st.lists(gets.map(tuple), min_size=1, max_size=2).map(tuple),
            "to_the_end": st.booleans(),
            "closers": st.one_of(st.just(()), st.lists(closers, max_size=2).map(tuple)),
            "struck_at": st.one_of(st.just(0), st.just(0), st.integers(0, 700)),
            "choices": choices(80),
        }
    ).map(legal)
