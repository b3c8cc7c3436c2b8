"""What the consumer's thread waits for, counted where it waits.

Synopsis:

    times = LoopTimes()
    with times.for_landing:
        ...
    times.hand_out(nbytes, starved=False)
    times.room_ns                        # what was waited for the devices so far
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jax.profiler import TraceAnnotation

HURRIED_NS = 1_000_000
"""A loop that takes batches faster feels a thread that wakes up for a moment and takes the GIL."""


class Waits:
    """Counts and annotates waits, one after another: `with waits: ...`. A generator in its place takes thrice as long.

    Attributes:
        ns: how long they have taken together.
    """

    def __init__(self, name: str):
        self.ns = 0
        self._name = "jaxprefetch." + name
        self._annotation: TraceAnnotation  # of the wait that has begun
        self._began: int

    def __enter__(self) -> None:
        self._began = time.perf_counter_ns()
        self._annotation = TraceAnnotation(self._name)
        self._annotation.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._annotation.__exit__(*raised)
        self.ns += time.perf_counter_ns() - self._began


@dataclass
class LoopTimes:
    """What the consumer's thread has counted, in nanoseconds; written by that thread only."""

    for_source: Waits = field(default_factory=lambda: Waits("wait_source"))
    for_landing: Waits = field(default_factory=lambda: Waits("wait_landing"))
    for_fence: Waits = field(default_factory=lambda: Waits("wait_fence"))
    last_ns: int = 0  # when the last batch was handed out; 0 before the first of a pass
    elapsed_ns: int = 0  # between hand-outs
    intervals: int = 0
    bytes_out: int = 0  # handed out in these, on the fullest device
    starved: int = 0
    step_ns: int = 0  # of steps whose end was seen
    steps_seen: int = 0
    first: bool = True  # the interval in which the first step is compiled tells nothing
    hurried: bool = False  # the last two batches of the pass were handed out within `HURRIED_NS`

    @property
    def source_ns(self) -> int:
        """What was waited for the source."""
        return self.for_source.ns

    @property
    def room_ns(self) -> int:
        """What was waited for the devices."""
        return self.for_landing.ns + self.for_fence.ns

    def begin_pass(self) -> None:
        """What lies between two passes is nobody's step."""
        self.last_ns, self.hurried = 0, False

    def hand_out(self, nbytes: int, *, starved: bool) -> None:
        """A batch is handed out now."""
        now = time.perf_counter_ns()
        self.hurried = now - self.last_ns < HURRIED_NS
        if self.last_ns and self.first:
            self.first = False
        elif self.last_ns:
            self.elapsed_ns += now - self.last_ns
            self.intervals += 1
            self.bytes_out += nbytes
            self.starved += starved
        self.last_ns = now

    def saw_step(self, ns: int) -> None:
        """A step was seen to end so long after its batch was handed out."""
        self.step_ns += ns
        self.steps_seen += 1
