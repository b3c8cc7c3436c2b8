"""The verdict says what the loop was bound by, and a profiler's trace shows the work by name."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from jaxprefetch import prefetch_to_device
from jaxprefetch.device.times import LoopTimes
from jaxprefetch.device.window import Window
from jaxprefetch.host.pipeline import SourceTimes
from jaxprefetch.statistics import snapshot, verdict

MS = 1_000_000
LINK = 50 * 2.0**30


def loop(
    *,
    period_ms: float,
    starved: int = 0,
    batch_bytes: int = 1000,
    step_ms: float | None = None,
    wait_ms: float = 0,
    room_ms: float = 0,
) -> LoopTimes:
    """A hundred intervals of a loop, and what it waited in each, for the source and for the devices."""
    times = LoopTimes(elapsed_ns=int(100 * period_ms * MS), intervals=100, bytes_out=100 * batch_bytes, starved=starved)
    times.for_source.ns, times.for_landing.ns = int(100 * wait_ms * MS), int(100 * room_ms * MS)
    if step_ms is not None:
        times.saw_step(int(step_ms * MS))
    return times


def said(times: LoopTimes, source_ms: float, *, inline: bool = False, cut: int = 0) -> str:
    return verdict(times, source_ms * MS, waited_ns=times.source_ns, inline=inline, link=LINK, cut=cut)


def test_input_bound() -> None:
    """Nothing was staged at most refills, and the source is slower than the step, as far as that was seen."""
    seen = loop(period_ms=31, starved=90, step_ms=12)
    assert said(seen, 31) == "input-bound: the source takes 31 ms a batch, the step 12 ms"
    unseen = loop(period_ms=31, starved=90, wait_ms=19)
    assert said(unseen, 31) == "input-bound: the source takes 31 ms a batch, the step less"


def test_input_bound_without_a_thread() -> None:
    """Where the loop pulls itself, what it does not spend in the source is the step."""
    times = loop(period_ms=20, wait_ms=15)
    assert said(times, 15, inline=True) == "input-bound: the source takes 15 ms a batch, the step 5 ms"


def test_copy_bound() -> None:
    """The link is busy nearly all the time."""
    times = loop(period_ms=10, batch_bytes=500 << 20)
    assert said(times, 2) == "copy-bound: 48.8 GiB/s of the link's 50.0, 10 ms a batch"


def test_step_bound() -> None:
    """All else; with what max_bytes has to do with it."""
    line = "step-bound: 27 ms a step, the source needs 5 ms a batch"
    assert said(loop(period_ms=27, batch_bytes=100 << 20), 5) == line
    cut = "max_bytes kept the next batch back at 80 hand-outs, about 9.8 ms of copying a batch not hidden"
    assert said(loop(period_ms=27, batch_bytes=500 << 20), 5, cut=80) == f"{line}; {cut}"


def test_too_early_to_tell() -> None:
    """What was ahead at the start hides the source from the first intervals: of these nothing is said."""
    few = LoopTimes(elapsed_ns=2, intervals=2)
    assert said(LoopTimes(), 5) == said(few, 5) == "nothing to tell before the fifth batch"


@pytest.mark.parametrize(("starved", "bound"), [(0, "step"), (50, "step"), (51, "input"), (100, "input")])
def test_at_most_refills_is_more_than_half(starved: int, bound: str) -> None:
    """With as many refills that had something staged, the source is not what the loop waits for."""
    assert said(loop(period_ms=27, starved=starved, step_ms=5), 27).startswith(f"{bound}-bound: ")


by_source = pytest.mark.parametrize(
    ("source_ms", "bound"), [(1, "step"), (9, "step"), (10, "step"), (11, "step"), (11.1, "input"), (40, "input")]
)  # beside a step of 10 ms
NOTHING_STAGED = "; nothing was staged at 100 of 100 hand-outs"


@by_source
def test_a_source_that_is_as_fast_as_a_step_that_was_seen(source_ms: float, bound: str) -> None:
    """It is what bounds the loop if it takes more than 1.1 times as long; that nothing was staged is said, anyway."""
    line = said(loop(period_ms=max(source_ms, 10), starved=100, step_ms=10), source_ms)
    assert line.startswith(f"{bound}-bound: ")
    assert line.endswith(NOTHING_STAGED) == (bound == "step")


@by_source
def test_a_source_that_is_as_fast_as_a_step_that_was_not_seen(source_ms: float, bound: str) -> None:
    """The step is what waiting for the source leaves of the period, not what the source itself leaves."""
    times = loop(period_ms=max(source_ms, 10), starved=100, wait_ms=max(source_ms - 10, 0))
    line = said(times, source_ms)
    assert line.startswith(f"{bound}-bound: ")
    assert line.endswith(NOTHING_STAGED) == (bound == "step")


@by_source
def test_a_source_that_is_as_fast_as_the_step_without_a_thread(source_ms: float, bound: str) -> None:
    """The same, where one comes after the other."""
    line = said(loop(period_ms=source_ms + 10, wait_ms=source_ms), source_ms, inline=True)
    assert line.startswith(f"{bound}-bound: ")


def test_another_process_that_is_late_does_not_make_this_source_slow() -> None:
    """A loop that waits longer than its source takes is not told that this is slow, but that nothing was staged."""
    line = said(loop(period_ms=31, starved=100, wait_ms=29), 2)
    assert line == f"step-bound: 31 ms a step, the source needs 2 ms a batch{NOTHING_STAGED}"


def test_the_first_wait_of_a_pass_does_not_make_steps_short() -> None:
    """A source that opens its files for a second tells nothing of the steps after that."""
    feed = types.SimpleNamespace(window=Window(2), largest=0, foreign=False, link=None, kept=())
    feed.times = loop(period_ms=20.1, starved=100, wait_ms=10)
    source = SourceTimes(pulled=101, pull_ns=3000 * MS, first_ns=1000 * MS, passes=1)
    assert snapshot(feed, source, inline=False).verdict.startswith("step-bound: 20 ms a step, the source needs 20 ms")


@pytest.mark.parametrize(("room_ms", "bound"), [(0, "input"), (2, "input"), (2.1, "step"), (4, "step")])
def test_devices_that_a_loop_without_a_thread_waits_for_are_slower_than_its_source(room_ms: float, bound: str) -> None:
    """They work beside the source: where they take most of what it leaves, it is hidden."""
    times = loop(period_ms=10, wait_ms=6, room_ms=room_ms)
    assert said(times, 6, inline=True).startswith(f"{bound}-bound: ")


def test_times_between_passes_and_of_the_first_step_do_not_count() -> None:
    """The first interval, in which the step is compiled, and what lies between two passes are nobody's step."""
    times = LoopTimes()
    for _ in range(2):
        times.begin_pass()
        for _ in range(4):
            times.hand_out(10, starved=True)
    assert (times.intervals, times.bytes_out, times.starved) == (5, 50, 5)


def test_the_cap_shows_in_the_verdict() -> None:
    """With room for two batches and a window of three the statistics say how often max_bytes kept one back."""
    source = [np.zeros(1024, np.uint8)] * 10
    with prefetch_to_device(source, 3, max_bytes="2KiB", host_size=0) as batches:
        for _ in batches:
            pass
        statistics = batches.statistics()
    assert statistics.peak_bytes_in_flight == statistics.bytes_bound == 2048
    assert statistics.cut_by_max_bytes > 0
    assert f"max_bytes kept the next batch back at {statistics.cut_by_max_bytes} hand-outs" in statistics.verdict


def test_a_trace_names_pull_stage_issue_and_wait(tmp_path) -> None:
    """`jax.profiler` shows where the time of a batch goes."""
    with jax.profiler.trace(tmp_path), prefetch_to_device([np.zeros(8, np.float32)] * 8) as batches:
        for _ in batches:
            pass
    trace = b"".join(path.read_bytes() for path in tmp_path.rglob("*.xplane.pb"))
    for name in ("pull", "stage", "issue", "wait_landing"):
        assert f"jaxprefetch.{name}".encode() in trace
