"""The verdict says what the loop was bound by, and a profiler's trace shows the work by name."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxprefetch import prefetch_to_device
from jaxprefetch.device.times import LoopTimes
from jaxprefetch.statistics import verdict

MS = 1_000_000
LINK = 50 * 2.0**30


def loop(*, period_ms: float, starved: int = 0, batch_bytes: int = 1000, step_ms: float | None = None) -> LoopTimes:
    """A hundred intervals of a loop."""
    times = LoopTimes(elapsed_ns=int(100 * period_ms * MS), intervals=100, bytes_out=100 * batch_bytes, starved=starved)
    if step_ms is not None:
        times.saw_step(int(step_ms * MS))
    return times


HALF = 500 << 20
STARVED = loop(period_ms=31, starved=90, step_ms=12)
HALF_STARVED = loop(period_ms=27, starved=50, batch_bytes=100 << 20)


@pytest.mark.parametrize(
    ("times", "source_ms", "inline", "cut", "said"),
    [
        (
            loop(period_ms=31, starved=90, step_ms=12),
            31,
            False,
            0,
            "input-bound: the source takes 31 ms a batch, the step 12 ms",
        ),
        (loop(period_ms=20), 15, True, 0, "input-bound: the source takes 15 ms a batch, the step 5 ms"),
        (
            loop(period_ms=10, batch_bytes=500 << 20),
            2,
            False,
            0,
            "copy-bound: 48.8 GiB/s of the link's 50.0, 10 ms a batch",
        ),
        (
            loop(period_ms=27, starved=50, batch_bytes=100 << 20),
            5,
            False,
            0,
            "step-bound: 27 ms a step, the source needs 5 ms a batch",
        ),
        (
            loop(period_ms=27, batch_bytes=HALF),
            5,
            False,
            80,
            "step-bound: 27 ms a step, the source needs 5 ms a batch; "
            "max_bytes kept the next batch back at 80 hand-outs, about 9.8 ms of copying a batch not hidden",
        ),
        (LoopTimes(), 5, False, 0, "nothing to tell before the third batch"),
    ],
)
def test_verdict(times: LoopTimes, source_ms: float, inline: bool, cut: int, said: str) -> None:
    """Each bound has its line, with the figures that show it."""
    assert verdict(times, source_ms * MS, inline=inline, link=LINK, cut=cut) == said


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
