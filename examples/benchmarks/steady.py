"""Whether a figure that was read again and again stays flat: its slope, with a confidence interval.

    found = steady.slope(batches, resident_bytes, most_growth=8 << 20)
    found["verdict"]                        # "flat", "grows", "shrinks" or "undecided"

Memory is the sum of what came and went, so figures that follow one another are alike, and the interval of a fitted line
would be far too narrow. What may be taken for independent are the changes: the samples after the first tenth are
averaged in blocks, and the slope is the mean of the changes from block to block, whose scatter gives the interval.
Where figures only scatter about a level the interval is wider than it need be.
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
    """The mean change from block to block, and what it makes of the whole run.

    Args:
        at: the place of each sample, such as the batches taken before it.
        values: the samples.
        most_growth: over the whole run, this much counts as flat.
        blocks: how many means; at least 4.

    Returns:
        "growth" over the run with its interval from "low" to "high", "per_million", the block means, and the verdict:
        flat where the interval lies within ± `most_growth`, grows or shrinks where it lies beyond.
    """
    x, y = np.asarray(at, float), np.asarray(values, float)
    warm = int(len(x) * WARM)
    if len(x) - warm < blocks:
        raise ValueError(f"slope: {len(x)} samples are too few for {blocks} blocks. Run longer.")
    x, y = (np.array([part.mean() for part in np.array_split(each[warm:], blocks)]) for each in (x, y))
    changes = np.diff(y)
    whole = float(at[-1]) / (x[-1] - x[0])  # the whole run, in the distance from the first block to the last
    growth = changes.sum() * whole
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(changes) - 1) * changes.std(ddof=1) * len(changes) ** 0.5 * whole
    low, high = growth - half, growth + half
    return {
        "growth": float(growth),
        "low": float(low),
        "high": float(high),
        "most_growth": most_growth,
        "per_million": float(growth / at[-1] * 1e6),
        "confidence": CONFIDENCE,
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


def _verdict(low: float, high: float, most_growth: float) -> str:
    if -most_growth <= low and high <= most_growth:
        return "flat"
    if low > most_growth:
        return "grows"
    return "shrinks" if high < -most_growth else "undecided"
