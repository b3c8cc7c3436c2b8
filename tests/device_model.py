"""A discrete-event model of one accelerator that runs the real `Window`, in virtual seconds and without JAX.

    result = Model(source_s=[0.009] * 500, copy_s=[0.004] * 500, step_s=[0.010] * 500, window=Window(2)).run()
    result.makespan, result.peak_batches

Batch j takes S[j] to be pulled and staged, X[j] to be copied, and C[j] for its step:

    staged[j] = max(staged[j-1], issued[j-host_size]) + S[j]         on demand: not before the step of j-1 has ended
                (the reader of a loop that takes batches within a millisecond may begin later: see `Reader.give_room`)
    copied[j] = max(time of put, end of the compute enqueued before it, copied[j-1]) + X[j]
    ended[k]  = max(time of dispatch, end of the compute stream, copied[k]) + C[k]
    memory of j: from the put until its last reference is gone and it has been copied

With `compute_order=False` (a TPU) a copy does not wait for the compute enqueued before it, and a batch keeps its memory
until its step has ended too. Events at equal times happen in the order in which they were scheduled.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxprefetch.device.window import Do, Window

DEVICE = "gpu:0"
COMPUTATIONS_AHEAD = 32  # computations, fences included, that a client lets be unfinished before a dispatch blocks
MOST_ROUNDS = 1000  # of decisions in one call; looks grow longer, so no honest wait takes as many
SHORTEST_LOOK_S = 50e-6  # the least time between two looks at the device while a batch is awaited

KEEPS = "keeps"  # the loop variable holds batch k-1 until next(k) has returned
DROPS = "drops"  # the consumer's reference goes as soon as the step has been dispatched
DISPOSES = "disposes"  # the consumer deletes the batch, or its step takes it as a donation
SYNCHRONISES = "synchronises"  # keeps, and waits for every step


class Deadlock(RuntimeError):
    """The consumer waits for something that nothing scheduled can bring about."""


class NoRoom(RuntimeError):
    """The window says that the batch that is needed can never fit."""


@dataclass(frozen=True)
class Costs:
    """Seconds of host time of one put, one fence, one waking from a wait, and the dispatch of one step."""

    put: float = 0.0
    fence: float = 0.0
    wake: float = 0.0
    dispatch: float = 0.0


FREE = Costs()
MEASURED = Costs(put=70e-6, fence=43e-6, wake=30e-6, dispatch=300e-6)


class Event(NamedTuple):
    time: float
    sequence: int
    kind: str
    batch: int


class Timeline:
    """Virtual time, and the events that lie ahead: by time, at equal times by sequence."""

    def __init__(self):
        self.now = 0.0
        self.log: list[Event] = []
        self._ahead: list[tuple[Event, Callable[[], None]]] = []
        self._sequence = 0

    def schedule(self, time: float, kind: str, batch: int, happen: Callable[[], None] = lambda: None) -> None:
        self._sequence += 1
        heapq.heappush(self._ahead, (Event(time, self._sequence, kind, batch), happen))

    def record(self, kind: str, batch: int) -> None:
        """Something the consumer does now."""
        self._sequence += 1
        self.log.append(Event(self.now, self._sequence, kind, batch))

    def advance(self, to: float) -> None:
        """Let time go by, with everything that happens until then."""
        while self._ahead and self._ahead[0][0].time <= to:
            self._happen()
        self.now = to

    def wait(self, until: Callable[[], bool], at_most: float | None = None) -> None:
        """Let time go by until the condition holds, or for `at_most` seconds."""
        deadline = None if at_most is None else self.now + at_most
        while not until():
            if deadline is not None and not (self._ahead and self._ahead[0][0].time <= deadline):
                self.now = deadline
                return
            if not self._ahead:
                raise Deadlock(f"nothing is scheduled after {self.now} s")
            self._happen()

    def _happen(self) -> None:
        event, happen = heapq.heappop(self._ahead)
        self.now = event.time
        self.log.append(event)
        happen()


class Memory:
    """What the device really holds: a batch goes when everything that holds it has let go."""

    def __init__(self, holders: frozenset[str]):
        self.batches = self.bytes = self.peak_batches = self.peak_bytes = 0
        self._holders = holders
        self._held: dict[int, tuple[int, set[str]]] = {}

    def charge(self, batch: int, n: int) -> None:
        self._held[batch] = n, set(self._holders)
        self.batches, self.bytes = self.batches + 1, self.bytes + n
        self.peak_batches = max(self.peak_batches, self.batches)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def add(self, batch: int, n: int) -> None:
        """A batch becomes so much larger."""
        held, holders = self._held[batch]
        self._held[batch] = held + n, holders
        self.bytes += n
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def let_go(self, batch: int, holder: str) -> None:
        n, holders = self._held.get(batch, (0, {"nothing"}))
        holders.discard(holder)
        if not holders:
            del self._held[batch]
            self.batches, self.bytes = self.batches - 1, self.bytes - n


@dataclass
class Result:
    """What a run showed; times in seconds."""

    makespan: float = 0.0
    host_s: float = 0.0  # the sum of the host costs paid
    first_s: float = 0.0  # when batch 0 was handed out
    peak_batches: int = 0
    peak_bytes: int = 0
    held_after_issue: list[int] = field(default_factory=list)
    unfinished_at_issue: list[int] = field(default_factory=list)  # steps dispatched and not ended
    handed_out: list[int] = field(default_factory=list)
    log: list[Event] = field(default_factory=list)


class Model:
    """One consumer thread, one reader, one device with one copy queue and one compute stream.

    Args:
        source_s: S, one number for each batch.
        copy_s: X, likewise.
        step_s: C, likewise.
        window: the window under test; `delete_used` is read from it.
        host_size: the most batches pulled and not yet issued.
        costs: seconds of host time.
        consumer: `KEEPS`, `DROPS`, `DISPOSES` or `SYNCHRONISES`.
        on_demand: the source needs the result of step k to make batch k+1.
        compute_order: device memory is handed out in compute order (a GPU).
        sizes: bytes of each batch, 1 unless given.
        outs: bytes that the hand-out of each batch adds, 0 unless given.
    """

    def __init__(
        self,
        source_s: Sequence[float],
        copy_s: Sequence[float],
        step_s: Sequence[float],
        *,
        window: Window,
        host_size: int = 4,
        costs: Costs = FREE,
        consumer: str = KEEPS,
        on_demand: bool = False,
        compute_order: bool = True,
        sizes: Sequence[int] | None = None,
        outs: Sequence[int] | None = None,
    ):
        self.source_s, self.copy_s, self.step_s = source_s, copy_s, step_s
        self.window, self.host_size, self.costs = window, host_size, costs
        self.consumer, self.on_demand, self.compute_order = consumer, on_demand, compute_order
        self.sizes, self.outs = sizes or [1] * len(source_s), outs or [0] * len(source_s)
        self.timeline, self.result = Timeline(), Result()
        self.memory = Memory(frozenset({"reference", "copy"} if compute_order else {"reference", "copy", "step"}))
        self._facts: set[tuple[str, int]] = set()  # what has happened on the device
        self._happened: Counter[str] = Counter()  # and how often
        self._disposed: set[int] = set()
        self._told: set[tuple[str, int]] = set()  # what the window was told while it awaited a batch
        self._waited_s = 0.0  # in the call that goes on
        self._link_s = self._stream_s = 0.0  # when all copies, all compute enqueued so far will have ended
        self._computations: deque[float] = deque(maxlen=COMPUTATIONS_AHEAD)
        self._staged_s: list[float] = []
        self._issued_s: list[float] = []
        self._copied_s: list[float] = []
        self._ended_s: list[float] = []

    def run(self) -> Result:
        """Runs the loop to its end.

        Raises:
            Deadlock: if the consumer waits for what cannot come.
            NoRoom: if the window says so.
        """
        self._read()
        while (k := self._next()) is not None:
            self._consume(k)
        self.result.makespan = max([self.timeline.now, *self._ended_s])
        self.timeline.advance(self.result.makespan)
        self.result.peak_batches, self.result.peak_bytes = self.memory.peak_batches, self.memory.peak_bytes
        self.result.log = self.timeline.log
        return self.result

    # ---- the reader

    def _read(self) -> None:
        """Schedules every staging whose time is known by now."""
        while (j := len(self._staged_s)) < len(self.source_s):
            after = [self._staged_s[-1] if j else 0.0]
            for needed, times, i in (
                (j >= self.host_size, self._issued_s, j - self.host_size),
                (j > 0 and self.on_demand, self._ended_s, j - 1),
            ):
                if needed and i >= len(times):
                    return
                if needed:
                    after.append(times[i])
            self._staged_s.append(max(after) + self.source_s[j])
            stage = functools.partial(self.window.stage, {DEVICE: self.sizes[j]}, out={DEVICE: self.outs[j]})
            self.timeline.schedule(self._staged_s[j], "staged", j, stage)
            if j + 1 == len(self.source_s):
                self.timeline.schedule(self._staged_s[j], "end", j, self.window.end)

    # ---- the device

    def _copy(self, seconds: float) -> float:
        """Queues a copy now; returns when it will have landed."""
        behind = self._stream_s if self.compute_order else 0.0
        self._link_s = max(self.timeline.now, behind, self._link_s) + seconds
        return self._link_s

    def _compute(self, after: float, seconds: float) -> float:
        """Enqueues a computation, when the client takes it; returns when it will have ended."""
        if len(self._computations) == COMPUTATIONS_AHEAD:
            self.timeline.advance(max(self.timeline.now, self._computations[0]))
        self._stream_s = max(self.timeline.now, self._stream_s, after) + seconds
        self._computations.append(self._stream_s)
        return self._stream_s

    def _expect(self, time: float, kind: str, batch: int, holder: str | None = None) -> None:
        def happen():
            self._facts.add((kind, batch))
            self._happened[kind] += 1
            if holder:
                self.memory.let_go(batch, holder)

        self.timeline.schedule(time, kind, batch, happen)

    # ---- the consumer's thread

    def _pay(self, seconds: float) -> None:
        self.result.host_s += seconds
        self.timeline.advance(self.timeline.now + seconds)

    def _wait(self, until: Callable[[], bool], at_most: float | None = None) -> None:
        """Waits, and pays for waking up if there was anything to wait for."""
        if not until():
            self.timeline.wait(until, at_most)
            self._pay(self.costs.wake)

    def _wait_for(self, kind: str, batch: int) -> None:
        self._wait(lambda: (kind, batch) in self._facts)

    def _next(self) -> int | None:
        """One call of `next()`: the batch, or None at the end."""
        self.window.call()
        self._waited_s = 0.0
        for _ in range(MOST_ROUNDS):
            self.timeline.advance(self.timeline.now)
            action = self.window.decide()
            if action[0] is Do.END:
                return None
            if action[0] is Do.NO_ROOM:
                raise NoRoom(f"batch {action[1]}: (needed, charged, by the hand-out) = {self.window.shortage()}")
            if action[0] is Do.HAND_OUT:
                return self._hand_out()
            getattr(self, f"_{action[0].name.lower()}")(action[1])
        raise Deadlock(f"{MOST_ROUNDS} rounds without a batch, the last one {action}")

    def _hand_out(self) -> int:
        self.memory.add(self.window.taken, self.outs[self.window.taken])  # made while the loop still has the last one
        k = self.window.hand_out()
        self.timeline.record("handed out", k)
        if not self.result.handed_out:
            self.result.first_s = self.timeline.now
        self.result.handed_out.append(k)
        return k

    def _consume(self, k: int) -> None:
        """The loop's body: the variable is bound to batch k, and step k is dispatched."""
        self.memory.let_go(k - 1, "reference")
        self._pay(self.costs.dispatch)
        self._ended_s.append(self._compute(self._copied_s[k], self.step_s[k]))
        self.timeline.record("dispatched", k)
        self._expect(self._ended_s[k], "ended", k, "step")
        self._read()
        if self.consumer == DISPOSES:
            self._disposed.add(k)
            self.memory.let_go(k, "reference")
        if self.consumer == SYNCHRONISES:
            self._wait_for("ended", k)

    # ---- what the window asks for

    def _settle(self, j: int) -> None:
        if j in self._disposed:
            self.window.settled(j, disposed=True)
            return
        self._wait_for("copied", j)
        if self.window.delete_used or self.consumer == DROPS:
            self.memory.let_go(j, "reference")
        self.window.settled(j)

    def _issue(self, j: int) -> None:
        self.memory.charge(j, self.sizes[j])
        self.result.held_after_issue.append(self.memory.batches)
        self.result.unfinished_at_issue.append(len(self._ended_s) - self._happened["ended"])
        self._pay(self.costs.put)
        self._issued_s.append(self.timeline.now)
        self._copied_s.append(self._copy(self.copy_s[j]))
        self.timeline.record("issued", j)
        self._expect(self._copied_s[j], "copied", j, "copy")
        self.window.issue()
        self._read()

    def _fence(self, k: int) -> None:
        self._pay(self.costs.fence)
        self._expect(self._compute(0.0, 0.0), "fenced", k)
        self.window.fence(k)

    def _await_fence(self, k: int) -> None:
        self._wait_for("fenced", k)
        self.window.fence_done(k)

    def _prove_landing(self, j: int) -> None:
        later = next((i for i in range(j + 1, self.window.issued) if i not in self._disposed), None)
        if later is not None:
            self._wait_for("copied", later)
        else:
            self._pay(self.costs.put)
            self._expect(self._copy(0.0), "marker", j)
            self._wait_for("marker", j)
        self.window.proved(j)

    def _await_source(self, _: int) -> None:
        staged = self.window.staged
        self._wait(lambda: self.window.staged > staged or self.window.ended)

    def _await_staged(self, k: int) -> None:
        news = ({("fenced", k - 1), ("copied", k)} & self._facts) - self._told
        self._told |= news
        if ("fenced", k - 1) in news:
            self.window.fence_done(k - 1)
        if ("copied", k) in news:
            self.window.landed(k)
        if not news:
            began = self.timeline.now
            self._wait(lambda: self.window.staged > 0 or self.window.ended, max(SHORTEST_LOOK_S, self._waited_s / 10))
            self._waited_s += self.timeline.now - began


def perfect(source_s: Sequence[float], copy_s: Sequence[float], step_s: Sequence[float], buffers: int) -> float:
    """The least makespan that so many device buffers allow, without any host costs."""
    staged = copied = 0.0
    ended: list[float] = []
    for j, (source, copy, step) in enumerate(zip(source_s, copy_s, step_s, strict=True)):
        staged += source
        copied = max(staged, copied, ended[j - buffers] if j >= buffers else 0.0) + copy
        ended.append(max(copied, ended[-1] if j else 0.0) + step)
    return ended[-1]
