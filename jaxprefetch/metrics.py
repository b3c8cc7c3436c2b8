"""Who gets the metrics of which steps: the hooks, the progress bar, and the check that they are finite.

Synopsis:

    delivery = MetricsDelivery([print], every_steps=10, finite="loss")
    delivery.add(20, metrics)       # as the step returned them; nothing waits
    delivery.due()                  # print(10, {"loss": 0.5}), if step 10 is done by now
    delivery.rest()                 # print(20, ...), once step 20 is done
    delivery.non_finite_step        # None: all well
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxprefetch.arguments import check_takes
from jaxprefetch.errors import add_note
from jaxprefetch.late import LateMetrics

logger = logging.getLogger("jaxprefetch")

Hook = Callable[[int, Mapping[str, Any]], object]
"""Called with the number of a step and its metrics, which are numbers by name."""


class MetricsDelivery:
    """Reads metrics late and hands them on in order.

    Args:
        hooks: get every `every_steps`-th.
        every_steps: see `hooks`.
        finite: the metric that has to be a finite number; None checks nothing.
    """

    def __init__(self, hooks: Hook | Sequence[Hook], *, every_steps: int, finite: str | None):
        self._hooks: tuple[Hook, ...] = (hooks,) if callable(hooks) or not isinstance(hooks, Iterable) else tuple(hooks)
        for hook in self._hooks:
            check_takes("hooks", hook, "functions (step, metrics)", 2)
        self._every_steps = every_steps
        self._finite = finite
        self._late = LateMetrics()
        self.last: Mapping[str, Any] = {}  # the newest that were read
        self.non_finite_step: int | None = None  # the first step whose metric is none

    def add(self, step: int, metrics: Any) -> None:
        """Takes what a step has returned."""
        self._late.add(step, metrics, fetch=self._finite is not None or not step % self._every_steps)

    def due(self) -> None:
        """Delivers what is there. Blocking: for the oldest step, while too many are on their way."""
        self._deliver(self._late.due())

    def rest(self) -> None:
        """Delivers everything. Blocking: until all steps are done."""
        self._deliver(self._late.rest())

    def read(self, step: int, metrics: Any) -> dict[str, Any]:
        """These metrics, by name. Blocking: until they are there."""
        return self._late.read(step, metrics)

    def call(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Calls all hooks; what one raises passes through, with a note."""
        for hook in self._hooks:
            try:
                hook(step, metrics)
            except BaseException as error:
                name = getattr(hook, "__qualname__", type(hook).__name__)
                add_note(error, f"jaxprefetch: raised by the hook {name} for step {step}")
                raise

    def flush(self) -> None:
        """Has the hooks write down what they hold back."""
        for hook in self._hooks:
            flush = getattr(hook, "flush", None)
            if callable(flush):
                flush()

    def _deliver(self, read: Iterator[tuple[int, dict[str, Any]]]) -> None:
        for step, metrics in read:
            self.last = metrics
            if self._finite is not None and self.non_finite_step is None:
                self._check(self._finite, step, metrics)
            if not step % self._every_steps:
                self.call(step, metrics)

    def _check(self, name: str, step: int, metrics: Mapping[str, Any]) -> None:
        if name not in metrics:
            raise ValueError(
                f"stop_on_non_finite: step {step} has no metric {name!r} but {sorted(metrics)}. Name one of them."
            )
        if not np.isfinite(metrics[name]).all():
            self.non_finite_step = step
            logger.warning("jaxprefetch: step %d: %s is %s. The run ends.", step, name, metrics[name])
