"""The scheduler: every thread, lock and clock of the library is its own, and it finds what it is there to find."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import scheduler
from hypothesis import find, settings
from hypothesis import strategies as st
from scheduler import Choices, Clock, Condition, Hang, Lock, Scheduler, SimpleQueue

import jaxprefetch
from jaxprefetch.host import reader

HOUSE = Path(jaxprefetch.__file__).parent
NOT_DRIVEN = {
    "cadence.py": "a clock, on the loop's thread",
    "cache.py": "a turn that refuses",
    "demo.py": "a clock",
    "device/context.py": "a thread that is joined at once",
    "device/link.py": "a clock",
    "host/native.py": "a thread that nobody waits for but a fork",
    "loop.py": "a clock, on the loop's thread",
    "processes/gate.py": "a thread that asks other processes: tested with some",
    "processes/others.py": "a clock",
    "progress.py": "a clock, on the loop's thread",
    "termination.py": "asks which thread it is on",
}


def test_what_takes_threads_or_clocks_is_driven() -> None:
    """A module of the library that takes them is driven by the scheduler, or is known not to need it."""
    takes = set()
    for path in HOUSE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {"threading", "queue", "time", "concurrent.futures", "asyncio", "multiprocessing"} & {*names}:
                takes.add(str(path.relative_to(HOUSE)))
    driven = {str(Path(module.__file__).relative_to(HOUSE)) for module in scheduler.DRIVEN}
    assert takes == (driven | {*NOT_DRIVEN}) - {"__main__.py"}


def test_a_deadlock_is_told_with_everybodys_place() -> None:
    """Two threads that wait for each other's lock are a hang, with the stack of each."""

    def both(first: Lock, second: Lock) -> None:
        with first, second:
            pass

    def meet(choices: Choices) -> None:
        with Scheduler(choices).installed() as own:
            one, two = Lock(), Lock()
            threads = [own.spawn("left", lambda: both(one, two)), own.spawn("right", lambda: both(two, one))]
            own.wait(lambda: all(thread.done for thread in threads))

    meet(Choices())
    pairs = st.tuples(st.integers(0, 10), st.integers(0, 2))
    schedules = st.builds(Choices, st.lists(pairs, max_size=2).map(tuple))

    def hangs(choices: Choices) -> bool:
        try:
            meet(choices)
        except Hang as hang:
            return "left acquire" in str(hang) and "right acquire" in str(hang) and "with first, second" in str(hang)
        return False

    assert len(find(schedules, hangs, settings=settings(max_examples=2_000, database=None)).preempt) == 1


def test_time_passes_only_where_it_is_chosen() -> None:
    """A wait for an hour runs out at once when nobody else can go on, and the clock says that it was an hour."""
    with Scheduler().installed():
        condition, queue = Condition(), SimpleQueue()
        with condition:
            before = Clock.perf_counter()
            assert not condition.wait_for(lambda: False, 3600.0)
            assert Clock.perf_counter() - before == pytest.approx(3600.0, abs=1e-3)
        with pytest.raises(scheduler.Empty, match=r"^$"):
            queue.get(timeout=1.0)


def test_an_error_of_a_thread_is_one_of_the_run() -> None:
    """What a thread raises ends the run, with the schedule; the threads that are left are ended."""
    with pytest.raises(Hang, match="broken has failed with KeyError"), Scheduler().installed() as own:
        own.spawn("broken", lambda: {}["no such key"])
        waits = own.spawn("waits", lambda: own.wait(lambda: False))
        own.wait(lambda: False)
    assert waits.done


def test_a_thread_that_never_waits_can_be_told_of() -> None:
    """Without leave to spin, a thread that passes thousands of points and never waits is a hang."""

    def circle(own: Scheduler) -> None:
        while True:
            own.point("around")

    with pytest.raises(Hang, match="circle runs in circles"), Scheduler(spins=False).installed() as own:
        own.spawn("circle", lambda: circle(own))
        own.wait(lambda: False)


def test_the_library_has_its_own_again_afterwards() -> None:
    """Outside of a run the modules have Python's threads."""
    with Scheduler().installed():
        assert reader.SimpleQueue is SimpleQueue
    assert reader.SimpleQueue is not SimpleQueue
