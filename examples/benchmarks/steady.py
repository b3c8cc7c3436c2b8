"""Whether a figure that was read again and again stays flat: its slope, with a confidence interval.

    found = steady.slope(batches, resident_bytes, most_growth=8 << 20)
    found["verdict"]                        # "flat", "grows", "shrinks" or "undecided"

Figures that follow one another are alike, so the interval of an ordinary fit would be far too narrow. Here the samples
after the first tenth are averaged in blocks, the line is fitted to the means, and what is still alike from one block to
the next, the lag-1 correlation of the residuals, lowers the number of points that count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

BLOCKS = 20
WARM = 0.1
"""This share of the run is left out: caches fill, and allocators find their size."""
CONFIDENCE = 0.95


def slope(at: Sequence[float], values: Sequence[float], *, most_growth: float, blocks: int = BLOCKS) -> dict:
    """The least squares line through block means, and what it makes of the whole run.

    Args:
        at: the place of each sample, such as the batches taken before it.
        values: the samples.
        most_growth: over the whole run, this much counts as flat.
        blocks: how many means; at least 4.

    Returns:
        "growth" over the run with its interval from "low" to "high", "per_million", "correlation", the block means, and
        the verdict: flat where the interval lies within ± `most_growth`, grows or shrinks where it lies beyond.
    """
    x, y = np.asarray(at, float), np.asarray(values, float)
    warm = int(len(x) * WARM)
    if len(x) - warm < blocks:
        raise ValueError(f"slope: {len(x)} samples are too few for {blocks} blocks. Run longer.")
    x, y = (np.array([part.mean() for part in np.array_split(each[warm:], blocks)]) for each in (x, y))
    centred = x - x.mean()
    rate = centred @ y / (centred @ centred)
    residuals = y - y.mean() - rate * centred
    correlation = _lag_1(residuals)
    counting = max(blocks * (1 - correlation) / (1 + correlation), 3.0)
    spread = np.sqrt(residuals @ residuals / (counting - 2) / (centred @ centred) * blocks / counting)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, counting - 2) * spread
    run = float(at[-1])
    low, high = (rate - half) * run, (rate + half) * run
    return {
        "growth": float(rate * run),
        "low": float(low),
        "high": float(high),
        "most_growth": most_growth,
        "per_million": float(rate * 1e6),
        "confidence": CONFIDENCE,
        "correlation": correlation,
        "block_means": y.tolist(),
        "least": float(min(values)),
        "most": float(max(values)),
        "verdict": _verdict(low, high, most_growth),
    }


def told(name: str, found: dict) -> str:
    """One line for people."""
    return (
        f"{name}: {found['verdict']}: {found['growth']:+,.4g} over the run, {found['confidence']:.0%} interval "
        f"{found['low']:+,.4g} to {found['high']:+,.4g}, up to ±{found['most_growth']:,.4g} is flat; "
        f"between {found['least']:,.0f} and {found['most']:,.0f}"
    )


def _lag_1(residuals: np.ndarray) -> float:
    """Positive lag-1 correlation, below 0.9; 0 for a line without residuals."""
    power = residuals @ residuals
    if not power:
        return 0.0
    return float(np.clip(residuals[:-1] @ residuals[1:] / power, 0.0, 0.9))


def _verdict(low: float, high: float, most_growth: float) -> str:
    if -most_growth <= low and high <= most_growth:
        return "flat"
    if low > most_growth:
        return "grows"
    return "shrinks" if high < -most_growth else "undecided"
