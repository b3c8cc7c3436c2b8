"""Times methods against each other in interleaved rounds.

    loop = timing.Loop(make_state, step)
    contest = timing.Contest(loop, place, host_batches, budget)
    contest.round([peers.resident(), peers.plain("pageable"), peers.ours("pinned")], log=print)
    contest.results()["methods"]["jaxprefetch, pinned, size 2"]["share"]["median"]

A measurement takes the iterator through a warm-up that includes compilation, waits for the final state, and times the
loop from there until its final state is ready, by the host's clock. So each is as far ahead at the end as at the start.
"""

from __future__ import annotations

import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import jax
from environment import Budget
from peers import Method


class Loop:
    """A training loop: a state and the step that replaces it."""

    def __init__(self, make_state: Callable[[], object], step: Callable):
        self._make_state = make_state
        self._step = step
        self.state = make_state()

    def reset(self) -> None:
        """Makes a new state; the old one may have been donated to a step that failed."""
        self.state = self._make_state()

    def run(self, batches: Iterator, count: int, sync: bool = False) -> float:
        """Takes `count` batches through the step; returns the seconds until the last state is ready.

        Args:
            batches: device batches; as many as `count` are taken.
            count: number of steps.
            sync: wait for the loss in every step.

        Raises:
            RuntimeError: the batches ended early.
        """
        step, state, done = self._step, self.state, 0
        start = time.perf_counter()
        for batch in itertools.islice(batches, count):
            state, loss = step(state, batch)
            done += 1
            if sync:
                loss.block_until_ready()
        jax.block_until_ready(state)
        seconds = time.perf_counter() - start
        self.state = state
        if done != count:
            raise RuntimeError(f"The source ended after {done} of {count} batches.")
        return seconds


@dataclass
class Contest:
    """Methods that feed the same loop, timed in turn.

    Attributes:
        loop: what they feed.
        place: the devices.
        host: the batches in "pinned" and "pageable" memory.
        budget: steps of a measurement.
        sync: whether the loop waits for its loss in every step.
        floor: seconds per step below which no method can come whatever it does; the share is taken of the larger of
            this and the resident step.
        rounds: what was measured, by round and method.
        missing: what is not installed, by method.
        errors: what failed, by method.
        failed: which of them are ours.
    """

    loop: Loop
    place: object
    host: dict
    budget: Budget
    sync: bool = False
    floor: float = 0.0
    rounds: list[dict[str, list[dict]]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def round(self, methods: list[Method], log: Callable[[str], None]) -> None:
        """Measures every method once; every other round goes in the opposite order.

        The resident loop may be listed more than once: the shares of a round are of the median of its measurements.
        """
        number, measured = len(self.rounds), {}
        self.rounds.append(measured)
        for method in methods if number % 2 == 0 else reversed(methods):
            if method.name in self.errors or method.name in self.missing:
                continue
            sample = self._measure(method)
            if sample:
                measured.setdefault(method.name, []).append(sample)
                log(f"round {number + 1}: {method.name}: {sample['ms']:.3f} ms in {sample['steps']} steps")

    def _measure(self, method: Method) -> dict | None:
        try:
            with method.open(self.host, self.place) as opened:
                return self._time(iter(opened), opened)
        except ImportError as error:
            self.missing[method.name] = f"not installed: {error}"
        except Exception as error:
            self.errors[method.name] = "".join(traceback.format_exception_only(error)).strip()
            self.loop.reset()
            if method.is_ours:
                self.failed.append(method.name)
                traceback.print_exc()
        return None

    def _time(self, batches: Iterator, opened: Iterable) -> dict:
        self.loop.run(batches, 3, self.sync)  # compiles for the batch's sharding
        pace = self.loop.run(batches, self.budget.least // 2 + 1, self.sync) / (self.budget.least // 2 + 1)
        steps = self.budget.count(pace)
        self.loop.run(batches, steps // 8, self.sync)
        seconds = self.loop.run(batches, steps, self.sync)
        sample = {"ms": 1e3 * seconds / steps, "steps": steps}
        if hasattr(opened, "statistics"):
            sample["statistics"] = repr(opened.statistics())[:2000]
        return sample

    def results(self) -> dict[str, object]:
        """Returns milliseconds per step and share of what is possible for each method, and all that was measured."""
        return {"methods": self._summary(), "rounds": self.rounds}

    def check(self) -> None:
        """Raises RuntimeError where our own method failed; a peer that fails is a result."""
        if self.failed:
            raise RuntimeError("; ".join(f"{name}: {self.errors[name]}" for name in self.failed))

    def _summary(self) -> dict[str, dict]:
        names = dict.fromkeys(name for measured in self.rounds for name in measured)
        table: dict[str, dict] = {name: self._summarise(name) for name in names}
        table |= {name: {"error": text} for name, text in self.errors.items()}
        return table | {name: {"unavailable": text} for name, text in self.missing.items()}

    def _summarise(self, name: str) -> dict:
        times = [sample["ms"] for measured in self.rounds for sample in measured.get(name, [])]
        shares = []
        for measured in self.rounds:
            best = [sample["ms"] for sample in measured.get("resident", [])]
            shares += [max(median(best), 1e3 * self.floor) / s["ms"] for s in measured.get(name, []) if best]
        return {"ms": spread(times), "share": spread(shares)}


def median(values: Iterable[float]) -> float:
    """Returns the median."""
    return statistics.median(values)


def spread(values: list[float]) -> dict[str, float] | None:
    """Returns median, minimum and maximum; None of nothing."""
    return {"median": median(values), "min": min(values), "max": max(values)} if values else None
