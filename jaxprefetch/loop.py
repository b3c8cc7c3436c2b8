"""`train_loop`: the loop around a step, in which nothing waits and nothing is lost at a restart.

Synopsis:

    state, summary = train_loop(
        train_step, state, loader,                            # any step(state, batch) -> (state, metrics)
        num_steps=10_000, sharding=sharding, resume="replay",
        hooks=[JSONLWriter("log.jsonl")], checkpoints="run/checkpoints", save_every_steps=1_000,
    )
    print(summary)
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from jaxprefetch.arguments import check_function, integer, refuse_options
from jaxprefetch.cadence import Every, cadence
from jaxprefetch.checkpoints import Checkpoints
from jaxprefetch.device.placement import warn_of_one_device
from jaxprefetch.errors import add_note, source_with_options
from jaxprefetch.host.source import MakesReaders, WritesBatches
from jaxprefetch.metrics import Hook, MetricsDelivery
from jaxprefetch.passes import END, Passes
from jaxprefetch.prefetch import prefetch_to_device
from jaxprefetch.prefetcher import DevicePrefetcher
from jaxprefetch.progress import Progress
from jaxprefetch.statistics import PrefetchStatistics
from jaxprefetch.termination import Termination

logger = logging.getLogger("jaxprefetch")
S = TypeVar("S")
StoppedBy = Literal["num_steps", "source ended", "signal", "non-finite loss"]


@dataclass(frozen=True)
class TrainSummary:
    """How a run of `train_loop` went.

    Attributes:
        steps: done, with those before the restart that it went on from.
        resumed_from: the step of the checkpoint that it went on from; 0 if there was none.
        seconds: of this run, with compilation, evaluation and saving.
        metrics: of the last step; empty if none was done.
        eval_metrics: of the last evaluation; empty if there was none.
        stopped_by: what ended it.
        statistics: of the input since the prefetcher was made.
    """

    steps: int
    resumed_from: int
    seconds: float
    metrics: Mapping[str, Any]
    eval_metrics: Mapping[str, Any]
    stopped_by: StoppedBy
    statistics: PrefetchStatistics

    def __str__(self) -> str:
        done = self.steps - self.resumed_from
        rate = f", {done / self.seconds:.1f} a second" if self.seconds else ""
        return f"{done} steps in {self.seconds:.1f} s{rate}, ended by {self.stopped_by}; {self.statistics.verdict}"


def train_loop(
    step: Callable[[S, Any], tuple[S, Any]],
    state: S,
    source: Iterable[Any] | WritesBatches | MakesReaders,
    *,
    num_steps: int,
    size: int | None = None,
    sharding: Any = None,
    max_bytes: int | str | None = None,
    resume: Literal["replay"] | None = None,
    hooks: Hook | Sequence[Hook] = (),
    log_every_steps: int = 1,
    eval_fn: Callable[[S], Mapping[str, Any]] | None = None,
    eval_every_steps: int | None = None,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    save_every_steps: int | None = None,
    save_every_seconds: float | None = None,
    stop_on_non_finite: bool | str = False,
    progress: bool | None = None,
) -> tuple[S, TrainSummary]:
    """Takes batches of `source` through `step` until `num_steps` are done; returns the last state and how it went.

    Steps are dispatched without waiting for their results. Metrics are read later, when their step is done (at most 8
    steps later), in order and with their step's number; before an evaluation, a checkpoint and the end, all of them.
    Steps count from 1.

    Args:
        step: `step(state, batch) -> (state, metrics)`, usually jitted, donating as you like. Metrics: any pytree of
            scalars; one bare value is the loss.
        state: any pytree; Flax's `TrainState`; NNX objects, which are updated themselves.
        source: any iterable of batches, begun anew until `num_steps` are done, or a `DevicePrefetcher`, made with any
            options, which is left open.
        num_steps: steps altogether, with those before a restart.
        size, sharding, max_bytes, resume: as for `prefetch_to_device`; a `DevicePrefetcher` has its own.
        hooks: called with `(step, metrics)` on the loop's thread, metrics being numbers by name; writers are in
            `jaxprefetch.writers`. Their `flush()`, if they have one, is called before a checkpoint and at the end.
        log_every_steps: hooks get the metrics of these steps.
        eval_fn: `eval_fn(state) -> metrics`, usually by `evaluate`; hooks get them with "eval/" before their names. At
            the end, too, unless the run was finished before.
        eval_every_steps: when it is called, besides after the last step.
        checkpoints: where the state and the place in the input are saved, while the loop goes on. If there is a
            checkpoint already, the run goes on from the latest.
        save_every_steps, save_every_seconds: when, besides after the last step. Several processes save together, and
            their clocks differ: give them steps, not seconds.
        stop_on_non_finite: ends the run when the metric "loss", or the one of this name, is infinite or not a number,
            at most 8 steps later; the state is not saved then.
        progress: shows a bar; None does if tqdm is installed and the output is a terminal.

    Returns:
        The state after the last step, and a summary. A source that ends early and cannot be begun anew ends the run
        with a warning, and `summary.steps` is less than `num_steps`. After SIGTERM, in the main thread, the step is
        finished, the state is saved and the run ends; a second SIGTERM stops the process at once. (With several
        processes each must get it during the same step.)

    Raises:
        TypeError: an argument is not what it should be; `step` returns no pair, `eval_fn` None; there are checkpoints
            and the source cannot be resumed, which is said before the first step.
        ValueError: an argument is out of range; a metric was donated, or there is none that `stop_on_non_finite` or the
            checkpoints' `best_metric` names.
        NotADirectoryError: `checkpoints` is a file.
        ModuleNotFoundError: a package is missing for what is asked; names the extra to install.
        Exception: what the source, the step or a hook raises, with the step's number in a note. Everything that was
            opened is closed, and what was saved before is complete.

    Blocking: until the run ends.
    """
    options = {"size": size, "sharding": sharding, "max_bytes": max_bytes, "resume": resume}
    check_function("step", step, "a function (state, batch) -> (state, metrics)")
    if eval_fn is not None:
        check_function("eval_fn", eval_fn, "a function from state to metrics")
    if not isinstance(stop_on_non_finite, (bool, str)):
        raise TypeError(
            f"stop_on_non_finite: expected True, False or the name of a metric, got {stop_on_non_finite!r}."
        )
    if not (checkpoints is None or isinstance(checkpoints, (str, os.PathLike)) or hasattr(checkpoints, "restore")):
        raise TypeError(
            f"checkpoints: expected Checkpoints or a path, got {type(checkpoints).__name__} {checkpoints!r}."
        )
    delivery = MetricsDelivery(
        hooks,
        every_steps=integer("log_every_steps", log_every_steps, 1),
        finite="loss" if stop_on_non_finite is True else stop_on_non_finite or None,
    )
    evaluation = Every(cadence("eval_every_steps", eval_every_steps, "eval_fn", eval_fn), run=eval_fn)
    saving = Every(
        cadence("save_every_steps", save_every_steps, "checkpoints", checkpoints),
        cadence("save_every_seconds", save_every_seconds, "checkpoints", checkpoints) or math.inf,
    )
    run = _Run(step, state, integer("num_steps", num_steps, 0), delivery, evaluation, saving)
    with contextlib.ExitStack() as stack:
        if isinstance(source, DevicePrefetcher):
            refuse_options(**options)
            batches = source
        else:
            given = {name: value for name, value in options.items() if value is not None}
            batches = stack.enter_context(prefetch_to_device(source, **given))
            run.told = source_with_options("train_loop")
        if isinstance(checkpoints, (str, os.PathLike)):
            checkpoints = stack.enter_context(Checkpoints(checkpoints))
        return run.run(batches, checkpoints, progress)


class _Run:
    """One call of `train_loop`."""

    def __init__(
        self, step: Any, state: Any, num_steps: int, delivery: MetricsDelivery, evaluation: Every, saving: Every
    ):
        self.step, self.state, self.num_steps = step, state, num_steps
        self.delivery, self.evaluation, self.saving = delivery, evaluation, saving
        self.done = self.resumed_from = 0
        self.metrics: Any = None  # of the last step, as it returned them
        self.eval_metrics: Mapping[str, Any] = {}
        self.source_ended = False
        self.told: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # for what the source raises

    def run(self, batches: DevicePrefetcher, checkpoints: Checkpoints | None, progress: bool | None) -> Any:
        """Restores, runs, and closes what it has opened."""
        self.batches, self.checkpoints = batches, checkpoints
        started = time.perf_counter()
        if checkpoints is not None:
            batches.get_state()  # it can be resumed, or this says what it lacks
            self.state, self.done = checkpoints.restore(self.state, batches)
            self.resumed_from = self.saving.last = self.done
        self.saving.last_at = started
        self.input = Passes(batches, may_be_at_end=self.done > 0)
        self.bar = Progress(self.num_steps, self.done, show=progress, waiting=lambda: self._waiting(started))
        try:
            with Termination(batches.close) as self.termination:
                self._steps()
                self._finish()
        finally:
            self.bar.close(self.done, self.delivery.last)
            self.delivery.flush()
            if checkpoints is not None:
                checkpoints.wait()
        metrics, seconds = self.delivery.read(self.done, self.metrics), time.perf_counter() - started
        statistics = batches.statistics()
        summary = TrainSummary(
            self.done, self.resumed_from, seconds, metrics, self.eval_metrics, self._stopped_by(), statistics
        )
        logger.info("jaxprefetch: %s", summary)
        return self.state, summary

    def _steps(self) -> None:
        delivery, termination = self.delivery, self.termination
        while self.done < self.num_steps and delivery.non_finite_step is None and not termination.requested:
            with self.told:
                batch = termination.interrupting(self.input.next)
            if batch is END:
                self.source_ended = not termination.requested
                return
            self._step(batch)
            del batch
            delivery.due()
            self.bar.update(self.done, delivery.last)
            if self.evaluation.due(self.done):
                self._evaluate()
            if self.saving.due(self.done):
                self._save()

    def _step(self, batch: Any) -> None:
        number = self.done + 1
        if number == self.resumed_from + 1:
            warn_of_one_device(self.state, batch)
        try:
            result = self.step(self.state, batch)
            if type(result) is not tuple or len(result) != 2:
                raise TypeError(f"Step {number} returned {type(result).__name__}; expected the pair (state, metrics).")
        except BaseException as error:
            add_note(error, f"jaxprefetch: raised by step {number}")
            with contextlib.suppress(Exception):
                self.delivery.rest()
            raise
        self.state, self.metrics = result
        self.done = number
        self.delivery.add(number, self.metrics)

    def _finish(self) -> None:
        self.delivery.rest()
        if self.source_ended and not self.done:
            logger.warning("jaxprefetch: the source is empty: no step was done. Pass an iterable that has batches.")
        elif self.source_ended:
            logger.warning(
                "jaxprefetch: the source has ended after %d of %d steps and cannot be begun anew. Pass an iterable "
                "that can (a list, a loader), or ask for fewer steps.",
                self.done,
                self.num_steps,
            )
        did_nothing = self.resumed_from and self.done == self.resumed_from  # and hooks have had the last step
        if not (self.termination.requested or did_nothing):
            self._evaluate()
        self._save()

    def _evaluate(self) -> None:
        self.delivery.rest()
        if self.evaluation.run is None or self.evaluation.last == self.done or self._is_broken():
            return
        if (evaluated := self.evaluation.run(self.state)) is None:
            raise TypeError(
                f"eval_fn returned None after step {self.done}, expected metrics. Let it return those, or {{}} if it "
                "has none."
            )
        metrics = self.delivery.read(self.done, evaluated)
        self.eval_metrics = {f"eval/{name}": value for name, value in metrics.items()}
        self.evaluation.ran(self.done)
        self.delivery.call(self.done, self.eval_metrics)

    def _save(self) -> None:
        self.delivery.rest()
        if self.checkpoints is None or self.saving.last == self.done or self._is_broken():
            return
        self.delivery.flush()
        metrics = self.eval_metrics if self.evaluation.last == self.done else None
        self.checkpoints.save(self.done, self.state, self.batches, metrics)
        self.saving.ran(self.done)

    def _is_broken(self) -> bool:
        return self.delivery.non_finite_step is not None

    def _stopped_by(self) -> StoppedBy:
        if self._is_broken():
            return "non-finite loss"
        if self.done >= self.num_steps:
            return "num_steps"
        return "source ended" if self.source_ended else "signal"

    def _waiting(self, started: float) -> float:
        """The share of the time that the loop has waited for the source."""
        return self.batches.statistics().source_wait_s / (time.perf_counter() - started)
