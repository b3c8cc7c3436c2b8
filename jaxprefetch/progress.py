"""The progress bar: steps per second, the loss, and the share of the time that the loop waits for input.

Synopsis:

    bar = Progress(total=1000, done=0, show=True, waiting=lambda: 0.02)
    bar.update(1, {"loss": 0.5})
    bar.close()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxprefetch.extras import needs_extra

REFRESH_SECONDS = 0.1


class Progress:
    """A bar of tqdm's, which is looked after ten times a second and costs nothing in between.

    Args:
        total: steps altogether.
        done: steps that were done before.
        show: None shows it on a terminal, if tqdm is installed.
        waiting: tells the share of the time.

    Raises:
        ModuleNotFoundError: it is asked for, and tqdm is not installed.
    """

    def __init__(self, total: int, done: int, *, show: bool | None, waiting: Callable[[], float]):
        self._bar: Any = None if show is False else _make_bar(total, done, show)
        self._waiting = waiting
        self._due = 0.0

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """So many steps are done; `metrics` are the newest known."""
        if self._bar is not None and (now := time.perf_counter()) >= self._due:
            self._due = now + REFRESH_SECONDS
            self._show(step, metrics)

    def close(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Leaves the bar as it is at this step."""
        if self._bar is not None:
            try:
                self._show(step, metrics)
            finally:
                self._bar.close()

    def _show(self, step: int, metrics: Mapping[str, Any]) -> None:
        loss = metrics.get("loss")
        shown = {"loss": f"{loss:.4g}"} if isinstance(loss, (int, float)) else {}
        self._bar.set_postfix({**shown, "waiting": f"{self._waiting():.0%}"}, refresh=False)
        self._bar.update(step - self._bar.n)


def _make_bar(total: int, done: int, show: bool | None) -> Any:
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError as error:
        if show is None:
            return None
        raise needs_extra("progress=True", "tqdm", "train") from error
    bar = tqdm(total=total, initial=done, unit="step", disable=None if show is None else False, dynamic_ncols=True)
    return None if bar.disable else bar
