"""Hooks that write metrics down: JSON lines, CSV, TensorBoard. A hook is any callable `(step, metrics)`.

Synopsis:

    from jaxprefetch.writers import JSONLWriter, TensorBoardWriter

    train_loop(step, state, loader, num_steps=1000, hooks=[JSONLWriter("log.jsonl"), TensorBoardWriter("runs/1")])

A run that is resumed goes back to its last checkpoint and does the steps after it again. So each writer, when it is
first called, with step k, takes out what is there of steps k and later: what remains is one run.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from jaxprefetch.extras import needs_extra


class JSONLWriter:
    """One JSON object a line: `{"step": 3, "loss": 0.5}`. What is no finite number is written as a string, "NaN".

    Args:
        path: the file, which is gone on with if it exists.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._file: TextIO | None = None

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a line, to the operating system at once."""
        if self._file is None:
            self._file = _reopened(self._path, lambda line: json.loads(line)["step"] < step)
        self._file.write(json.dumps({"step": step} | {name: _plain(value) for name, value in metrics.items()}) + "\n")

    def close(self) -> None:
        """Closes the file; another call opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class CSVWriter:
    """A table with the columns `step` and one for each metric that is a number; a new one widens the table.

    Args:
        path: the file, which is gone on with if it exists.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._columns = ["step"]
        self._file: TextIO | None = None

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a row, to the operating system at once."""
        row = {"step": step} | {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if self._file is None:
            self._file = self._rewritten([old for old in self._rows() if int(old["step"]) < step], row)
        elif any(name not in self._columns for name in row):
            self.close()
            self._file = self._rewritten(self._rows(), row)
        csv.writer(self._file).writerow([row.get(name, "") for name in self._columns])

    def close(self) -> None:
        """Closes the file; another call opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rows(self) -> list[dict[str, str]]:
        reader = csv.DictReader(_whole_lines(self._path))
        rows = list(reader)
        self._columns = list(reader.fieldnames or self._columns)
        return rows

    def _rewritten(self, rows: list[dict[str, str]], row: Mapping[str, Any]) -> TextIO:
        self._columns += [name for name in row if name not in self._columns]
        new = self._path.with_name(self._path.name + ".new")
        with new.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        new.replace(self._path)
        return self._path.open("a", newline="", buffering=1)


class TensorBoardWriter:
    """Scalars for TensorBoard, written by tensorboardX.

    Args:
        logdir: the folder of the run.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """

    def __init__(self, logdir: str | os.PathLike[str]):
        try:
            import tensorboardX
        except ModuleNotFoundError as error:
            raise needs_extra("TensorBoardWriter", "tensorboardX", "tensorboard") from error
        self._open = tensorboardX.SummaryWriter
        self._logdir = os.fspath(logdir)
        self._writer: Any = None

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds every metric that is a number."""
        if self._writer is None:
            self._writer = self._open(self._logdir, purge_step=step)
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Writes what is still held back."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Closes the file; another call begins another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value, None if np.issubdtype(value.dtype, np.integer) else np.float64).tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _whole_lines(path: Path) -> list[str]:
    """The lines of the file, if there is one; a last one that a kill has cut is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def _reopened(path: Path, keep: Callable[[str], bool]) -> TextIO:
    """The file at its end, with the lines that are kept."""
    lines = [line for line in _whole_lines(path) if keep(line)]
    new = path.with_name(path.name + ".new")
    new.write_text("".join(lines))
    new.replace(path)
    return path.open("a", buffering=1)
