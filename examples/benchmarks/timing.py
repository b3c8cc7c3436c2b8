"""Times methods against each other in interleaved rounds.

    loop = timing.Loop(make_state, step)
    contest = timing.Contest(timing.in_loop(loop, host_batches, place, budget))
    contest.run("uint8", [peers.resident(), peers.plain(), peers.ours("pinned")], Turns(3, 60), results, log=print)
    results["uint8"]["methods"]["jaxprefetch, pinned, size 2"]["share"]["median"]

A measurement takes the iterator through a warm-up that includes compilation, waits for the final state, and times the
loop from there until its final state is ready, by the host's clock. So each is as far ahead at the end as at the start.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
from budget import Budget, measured
from peers import Method, Unavailable

GIB = 1 << 30
WARM_TIMES = 3
"""Ours makes a slot when none is free, which happens now and then in the first twenty steps."""
Measure = Callable[[Method, float | None], dict]
"""`(method, milliseconds of a step in the round before)` to a sample with its own "ms" and "steps"."""


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


def in_loop(loop: Loop, host: dict, place, budget: Budget, sync: bool = False) -> Measure:
    """Returns the measurement of a method that feeds `loop`.

    Args:
        loop: what is fed.
        host: the batches in "pinned" and "pageable" memory.
        place: the devices.
        budget: steps of a measurement.
        sync: whether the loop waits for its loss in every step.
    """

    def measure(method: Method, pace_ms: float | None) -> dict:
        if method.measure:
            return method.measure(budget, pace_ms)
        try:
            with method.open(host, place) as opened:
                batches = iter(opened)
                warmed = dataclasses.replace(budget, warm=WARM_TIMES * budget.warm) if method.is_ours else budget
                sample = measured(lambda count: loop.run(batches, count, sync), warmed, pace_ms)
                if hasattr(opened, "statistics"):
                    sample["statistics"] = repr(opened.statistics())[:2000]
                return sample
        except BaseException:
            loop.reset()
            raise

    return measure


def without_step(batches: Iterator, budget: Budget, pace_ms: float | None) -> dict:
    """Returns a sample of how fast batches come when nothing is done with them, until the last has landed."""

    def run(count: int) -> float:
        last, start = None, time.perf_counter()
        for batch in itertools.islice(batches, count):
            last = batch
        jax.block_until_ready(last)
        return time.perf_counter() - start

    return measured(run, budget, pace_ms)


@dataclass
class Contest:
    """Methods that are measured in turn.

    Attributes:
        measure: measures one of them.
        about: what else belongs to the results.
        floor_ms: milliseconds of a step below which no method can come whatever it does; the share is taken of the
            larger of this and the step of the method's base.
        nbytes: bytes of a batch, all devices together; rates are told where it is given.
        rounds: what was measured, by round and method.
        bases: the method of which the share is taken, by method.
        missing: what is not to be had here, by method.
        errors: what failed, by method.
        failed: which of them are ours.
    """

    measure: Measure
    about: dict = field(default_factory=dict)
    floor_ms: float = 0.0
    nbytes: int | None = None
    rounds: list[dict[str, list[dict]]] = field(default_factory=list)
    bases: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def run(self, name: str, methods: list[Method], turns: Turns, results: dict, log: Callable[[str], None]) -> None:
        """Measures rounds while there are turns; `results[name]` is what is known, however it ends.

        Raises:
            RuntimeError: our own method failed; a peer that fails is a result.
        """
        try:
            for _ in turns:
                self.round(methods, lambda line: log(f"{name}: {line}"))
        finally:  # also when the time is up within a round
            results[name] = self._results()
        if self.failed:
            raise RuntimeError("; ".join(f"{name}: {method}: {self.errors[method]}" for method in self.failed))

    def round(self, methods: list[Method], log: Callable[[str], None]) -> None:
        """Measures every method once; every other round goes in the opposite order.

        A base may be listed more than once: the shares of a round are of the median of its measurements.
        """
        number, samples = len(self.rounds), {}
        self.rounds.append(samples)
        for method in methods if number % 2 == 0 else reversed(methods):
            if method.name in self.errors or method.name in self.missing:
                continue
            sample = self._try(method)
            self.bases[method.name] = method.base
            if sample:
                samples.setdefault(method.name, []).append(sample)
                log(f"round {number + 1}: {method.name}: {sample['ms']:.3f} ms in {sample['steps']} steps")
            else:
                log(f"{method.name}: {self.missing.get(method.name) or self.errors[method.name]}")

    def _try(self, method: Method) -> dict | None:
        known = [sample["ms"] for samples in self.rounds for sample in samples.get(method.name, [])]
        try:
            return self.measure(method, known[-1] if known else None)
        except Unavailable as error:
            self.missing[method.name] = str(error)
        except ImportError as error:
            self.missing[method.name] = f"not installed: {error}"
        except Exception as error:
            self.errors[method.name] = "".join(traceback.format_exception_only(error)).strip()
            if method.is_ours:
                self.failed.append(method.name)
                traceback.print_exc()
        return None

    def _results(self) -> dict:
        return self.about | {"methods": self._summary(), "rounds": self.rounds}

    def _summary(self) -> dict[str, dict]:
        def about(name: str) -> dict:
            if name in self.missing:
                return {"unavailable": self.missing[name]}
            return {"error": self.errors[name]} if name in self.errors else self._summarise(name)

        return {name: about(name) for name in self.bases}

    def _summarise(self, name: str) -> dict:
        times, shares, added = [], [], []
        for samples in self.rounds:
            times += (own := [sample["ms"] for sample in samples.get(name, [])])
            if base := [sample["ms"] for sample in samples.get(self.bases[name], [])]:
                best = max(median(base), self.floor_ms)
                shares += [best / ms for ms in own]
                added += [ms - best for ms in own]
        found = {"ms": spread(times), "share": spread(shares), "added_ms": spread(added)}
        return found | ({"gib_s": spread([1e3 * self.nbytes / GIB / ms for ms in times])} if self.nbytes else {})


@dataclass(frozen=True)
class Turns:
    """At most `rounds`, and fewer where another one as long as the last would not end within `seconds`."""

    rounds: int
    seconds: float

    def __iter__(self) -> Iterator[int]:
        start, last = time.perf_counter(), 0.0
        for number in range(self.rounds):
            began = time.perf_counter()
            if number and began - start + last > self.seconds:
                print(f"no time for more than {number} of {self.rounds} rounds", flush=True)
                return
            yield number
            last = time.perf_counter() - began
            if number == 0:
                last /= 2  # it compiled


def share_out(cases: Sequence, rounds: int, seconds: float, run: Callable[[object, Turns], None]) -> None:
    """Runs every case; what one leaves of the time goes to those after it.

    Args:
        cases: what `run` takes.
        rounds: for each.
        seconds: for all of them; at least one round is measured of each.
        run: measures a case while there are turns.

    Raises:
        RuntimeError: some cases raised it; all were run.
    """
    failures, deadline = [], time.perf_counter() + seconds
    for done, case in enumerate(cases):
        left = deadline - time.perf_counter()
        try:
            run(case, Turns(rounds, left / (len(cases) - done)))
        except RuntimeError as error:
            failures.append(str(error))
    if failures:
        raise RuntimeError("; ".join(failures))


def median(values: Iterable[float]) -> float:
    """Returns the median."""
    return statistics.median(values)


def spread(values: list[float]) -> dict[str, float] | None:
    """Returns median, minimum and maximum; None of nothing."""
    return {"median": median(values), "min": min(values), "max": max(values)} if values else None
