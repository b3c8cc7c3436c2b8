"""What the loop is waiting for: counters, and one line that says it.

Synopsis:

    print(batches.statistics())          # PrefetchStatistics(pulled=..., verdict="input-bound: the source takes ...")
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Protocol

from jaxprefetch.device.times import LoopTimes
from jaxprefetch.device.window import Window
from jaxprefetch.host.pipeline import SourceTimes

LINK_SHARE = 0.9
"""From this share of the link's speed a loop counts as copy-bound."""

FEWEST_INTERVALS = 3
"""Between hand-outs, without the first: what was ahead at the start hides the source from fewer."""

SLOWER = 1.1
"""A source counts as slower than the step beyond so many times the step's time: closer figures vary that much."""


@dataclass(frozen=True)
class PrefetchStatistics:
    """Counts of batches, bytes and seconds since the prefetcher was made.

    Attributes:
        pulled: batches taken from the source.
        issued: batches put: device memory allocated, copy queued.
        taken: batches handed out.
        released: batches whose device memory can serve another.
        in_flight: issued and not released, now.
        peak_in_flight: the most there ever were, to compare with `bound`.
        bound: the most there can be: `size` with `delete_used`, `size + 1` without (or with arrays of the source's).
        bytes_in_flight: charged on the fullest device now, what was put and what hand-outs have made of it;
            `peak_bytes_in_flight`: the most there ever were.
        bytes_bound: `max_bytes`, else `bound` times the largest batch so far, as handed out.
        kept_by_consumer: batches handed out, followed by another and still referred to: outside of the bound.
        source_wait_s: what `next()` waited for the source; `room_wait_s`: for room or a landing on the devices.
        reader_pull_s: what the source took; `reader_stage_s`: what staging took; `reader_room_wait_s`: what the
            reader waited for room on the host, that is for the loop.
        elapsed_s: between hand-outs, from the second on: in the first interval the step is compiled.
        starved: hand-outs with nothing staged to fill the window.
        cut_by_max_bytes: hand-outs with less ahead than `size`, because of `max_bytes`.
        verdict: one line: input-bound (nothing was staged at most refills, or `host_size=0`, and the source takes
            more than 1.1 times as long as the step), copy-bound (bytes over time are at least 90% of the link as
            measured at the start) or step-bound. The last two say, too, where nothing was staged at most refills: the
            source is just as fast as the step, or another process's is late.
    """

    pulled: int
    issued: int
    taken: int
    released: int
    in_flight: int
    peak_in_flight: int
    bound: int
    bytes_in_flight: int
    peak_bytes_in_flight: int
    bytes_bound: int
    kept_by_consumer: int
    source_wait_s: float
    room_wait_s: float
    reader_pull_s: float
    reader_stage_s: float
    reader_room_wait_s: float
    elapsed_s: float
    starved: int
    cut_by_max_bytes: int
    verdict: str


class Counts(Protocol):
    """What a feed counts."""

    window: Window
    times: LoopTimes
    largest: int
    foreign: bool
    link: float | None

    @property
    def kept(self) -> Sized: ...


def snapshot(feed: Counts, source: SourceTimes, *, inline: bool) -> PrefetchStatistics:
    """The figures as they are now."""
    window, loop = feed.window, feed.times
    bound = window.size + (not window.delete_used or feed.foreign)
    return PrefetchStatistics(
        pulled=source.pulled,
        issued=window.issued,
        taken=window.taken,
        released=window.released,
        in_flight=window.in_flight,
        peak_in_flight=window.flight.peak_batches,
        bound=bound,
        bytes_in_flight=window.flight.most_bytes,
        peak_bytes_in_flight=window.flight.peak_bytes,
        bytes_bound=bound * feed.largest if window.max_bytes is None else window.max_bytes,
        kept_by_consumer=len(feed.kept),
        source_wait_s=loop.source_ns / 1e9,
        room_wait_s=loop.room_ns / 1e9,
        reader_pull_s=source.pull_ns / 1e9,
        reader_stage_s=source.stage_ns / 1e9,
        reader_room_wait_s=source.room_ns / 1e9,
        elapsed_s=loop.elapsed_ns / 1e9,
        starved=loop.starved,
        cut_by_max_bytes=window.cut_by_bytes,
        verdict=verdict(
            loop,
            source.batch_ns,
            waited_ns=max(loop.source_ns - source.first_ns, 0),
            inline=inline,
            link=feed.link,
            cut=window.cut_by_bytes,
        ),
    )


def verdict(loop: LoopTimes, source_ns: float, *, waited_ns: float, inline: bool, link: float | None, cut: int) -> str:
    """One line: what the loop was bound by.

    Args:
        source_ns: what the source and staging take, a batch.
        waited_ns: what the loop has waited for them altogether, but for the first batch of each pass.
        inline: the loop's own thread pulls.
        link: bytes per second to one device; None where there is no link to speak of.
        cut: hand-outs with less ahead than `size` because of `max_bytes`.
    """
    n = loop.intervals
    if n < FEWEST_INTERVALS:
        return "nothing to tell before the fifth batch"
    period = loop.elapsed_ns / n
    rate = loop.bytes_out / loop.elapsed_ns * 1e9
    late = 2 * loop.starved > n and not inline
    step = _step(loop, period, min(source_ns, waited_ns / n), inline=inline)
    if (late or inline) and source_ns > SLOWER * step:
        shorter = _ms(step) if inline or loop.steps_seen else "less"
        line = f"input-bound: the source takes {_ms(source_ns)} a batch, the step {shorter}"
    elif link and rate >= LINK_SHARE * link:
        line = f"copy-bound: {rate / 2**30:.1f} GiB/s of the link's {link / 2**30:.1f}, {_ms(period)} a batch"
    else:
        line = f"step-bound: {_ms(period)} a step, the source needs {_ms(source_ns)} a batch"
    if late and not line.startswith("input-bound"):
        line += f"; nothing was staged at {loop.starved} of {n} hand-outs"
    if cut:
        exposed = f", about {_ms(loop.bytes_out / n / link * 1e9)} of copying a batch not hidden" if link else ""
        line += f"; max_bytes kept the next batch back at {cut} hand-outs{exposed}"
    return line


def _step(loop: LoopTimes, period: float, waited: float, *, inline: bool) -> float:
    """What a step takes: as seen, else what waiting for the source leaves of the period.

    Where the loop pulls itself, and then waits for the devices, they have worked all the time, beside the source.
    """
    if loop.steps_seen:
        return loop.step_ns / loop.steps_seen
    rest = max(period - waited, 0)
    return period if inline and 2 * loop.room_ns > loop.intervals * rest else rest


def _ms(ns: float) -> str:
    ms = ns / 1e6
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2g} ms"
