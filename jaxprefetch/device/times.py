"""What the consumer's thread waits for, counted where it waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from jax.profiler import TraceAnnotation


@dataclass
class LoopTimes:
    """What the consumer's thread has counted, in nanoseconds; written by that thread only."""

    source_ns: int = 0
    room_ns: int = 0
    last_ns: int = 0  # when the last batch was handed out; 0 before the first of a pass
    elapsed_ns: int = 0  # between hand-outs
    intervals: int = 0
    bytes_out: int = 0  # handed out in these, on the fullest device
    starved: int = 0
    step_ns: int = 0  # of steps whose end was seen
    steps_seen: int = 0
    first: bool = True  # the interval in which the first step is compiled tells nothing

    def begin_pass(self) -> None:
        """What lies between two passes is nobody's step."""
        self.last_ns = 0

    def hand_out(self, nbytes: int, *, starved: bool) -> None:
        """A batch is handed out now."""
        now = time.perf_counter_ns()
        if self.last_ns and self.first:
            self.first = False
        elif self.last_ns:
            self.elapsed_ns += now - self.last_ns
            self.intervals += 1
            self.bytes_out += nbytes
            self.starved += starved
        self.last_ns = now

    @contextlib.contextmanager
    def waiting_for_room(self, what: str) -> Iterator[None]:
        """Counts and annotates a wait for the devices."""
        start = time.perf_counter_ns()
        try:
            with TraceAnnotation(f"jaxprefetch.wait_{what}"):
                yield
        finally:
            self.room_ns += time.perf_counter_ns() - start

    @contextlib.contextmanager
    def waiting_for_source(self) -> Iterator[None]:
        """Counts and annotates a wait for the source."""
        start = time.perf_counter_ns()
        try:
            with TraceAnnotation("jaxprefetch.wait_source"):
                yield
        finally:
            self.source_ns += time.perf_counter_ns() - start

    def saw_step(self, ns: int) -> None:
        """A step was seen to end so long after its batch was handed out."""
        self.step_ns += ns
        self.steps_seen += 1
