"""Rows for the loaders of other packages, which their worker processes can import without JAX.

DataLoader(Rows(), batch_size=4, num_workers=2)     # batches of rows 0-3, 4-7, ...
DataLoader(Rows(dies_at=13, told=path), ...)        # the worker that makes row 13 is gone, once tell(path) was called
DataLoader(Rows(fails_at=13), ...)                  # the worker that makes row 13 raises ValueError
DataLoader(Filled(96, {"bfloat16": 8}), ...)        # tensors of PyTorch's, of these dtypes and lengths
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

LENGTH = 24


class Rows:
    """A map-style data set: row i is full of i."""

    def __init__(self, dies_at: int | None = None, fails_at: int | None = None, told: str = ""):
        self.dies_at, self.fails_at, self.told = dies_at, fails_at, told

    def __repr__(self) -> str:  # Grain compares data sources by it
        return f"Rows({self.dies_at}, {self.fails_at}, {self.told!r})"

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.dies_at:
            open(self.told, "rb").close()  # waits; a batch that is still on its way would be lost with the worker
            os._exit(7)
        if index == self.fails_at:
            raise ValueError(f"row {index} is broken")
        return {"x": np.full(3, index, np.float32), "y": np.int32(index)}


def tell(path: str) -> None:
    """Waits until the worker that is to die is at its row, and lets it die. `path` is a named pipe (`os.mkfifo`)."""
    open(path, "wb").close()


class Filled:
    """A map-style data set: row i has for each dtype a tensor with so many values, all of them i modulo 251."""

    def __init__(self, length: int, values: dict[str, int]):
        self._length, self._values = length, values

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {name: torch.full((n,), index % 251, dtype=getattr(torch, name)) for name, n in self._values.items()}


def rows(batches: Iterable[Any]) -> list[list[int]]:
    """Which rows each batch has, as its two leaves agree."""
    out = []
    for batch in batches:
        y = np.asarray(batch["y"])
        np.testing.assert_array_equal(np.asarray(batch["x"]), np.repeat(y[:, None], 3, axis=1))
        out.append(y.tolist())
    return out


def in_order(size: int) -> list[list[int]]:
    """All rows in batches of this size."""
    return [list(range(start, min(start + size, LENGTH))) for start in range(0, LENGTH, size)]
