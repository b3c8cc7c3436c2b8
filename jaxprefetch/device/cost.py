"""Bytes by device, of a batch or a leaf, and what several of them come to.

Synopsis:

    costs = [{"gpu:0": 1024}, {"gpu:0": 512, "gpu:1": 512}]
    together(costs)                      # {"gpu:0": 1536, "gpu:1": 512}
    on_fullest(costs)                    # 1536, on the fullest device
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

Cost = Mapping[Hashable, int]


def together(costs: Iterable[Cost]) -> dict[Hashable, int]:
    """Their sum on each device."""
    total: dict[Hashable, int] = {}
    for cost in costs:
        for device, n in cost.items():
            total[device] = total.get(device, 0) + n
    return total


def on_fullest(costs: Iterable[Cost]) -> int:
    """Their sum on the fullest device."""
    return max(together(costs).values(), default=0)
