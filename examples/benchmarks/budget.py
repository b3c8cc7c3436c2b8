"""How many steps a measurement has, and the measurement itself. Imports neither JAX nor PyTorch: both are timed by it.

    sample = budget.measured(run, Budget(most=400, least=8, seconds=0.6))
    sample["ms"], sample["steps"]

`run(count)` does so many steps and returns the seconds until the last of them is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """One measurement has as many steps as fit into `seconds`, but at least `least` and at most `most`.

    `warm` steps go before it: compilation, and buffers that are made once.
    """

    most: int
    least: int
    seconds: float
    warm: int = 10

    def count(self, seconds_per_step: float) -> int:
        """Number of timed steps for a method that needs `seconds_per_step`."""
        return max(self.least, min(self.most, int(self.seconds / max(seconds_per_step, 1e-9))))


def measured(run: Callable[[int], float], budget: Budget, pace_ms: float | None = None) -> dict[str, float]:
    """Warms up and times `run`.

    Args:
        run: does so many steps; returns the seconds that they took.
        budget: decides how many.
        pace_ms: what a step takes, where it is known from an earlier round; else it is found out first.

    Returns:
        Milliseconds for each step, as "ms", and their number, as "steps".
    """
    run(budget.warm)
    if pace_ms is None:
        few = budget.least // 2 + 1
        pace_ms = 1e3 * run(few) / few
    steps = budget.count(pace_ms / 1e3)
    run(steps // 8)
    return {"ms": 1e3 * run(steps) / steps, "steps": steps}
