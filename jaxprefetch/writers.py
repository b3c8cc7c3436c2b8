"""Hooks that write metrics down: JSON lines, CSV, TensorBoard. A hook is any callable `(step, metrics)`.

Synopsis:

    from jaxprefetch.writers import JSONLWriter, TensorBoardWriter

    train_loop(step, state, loader, num_steps=1000, hooks=[JSONLWriter("log.jsonl"), TensorBoardWriter("runs/1")])

A run that is resumed goes back to its last checkpoint and does the steps after it again. So each writer, when it is
first called, with step k, takes out what is there of steps k and later: what remains is one run. A new run does the
same to the log of a former one: where nothing remains of that, a warning tells how many rows were taken out.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np

from jaxprefetch.extras import needs_extra

logger = logging.getLogger("jaxprefetch")
R = TypeVar("R")


class _LinesWriter:
    """What writers of lines share: a file that is opened when it is first written to, behind earlier steps in it.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._file: TextIO | None = None

    def close(self) -> None:
        """Closes the file; another call opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lines(self) -> list[str]:
        """The lines that are there, if there is a file; a last one that a kill has cut is left out."""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        return [line for line in lines if line.endswith("\n")]

    def _earlier(self, step: int, rows: list[R], step_of: Callable[[R], Any]) -> list[R]:
        """Those of the rows that are of earlier steps; a warning if it is none."""
        steps: list[int] = []
        for row in rows:
            try:
                steps.append(int(step_of(row)))
            except (KeyError, TypeError, ValueError):
                raise ValueError(
                    f"{self._path}: expected a log with a step in each row, got {row!r:.200}. The file is left "
                    "as it is: pass the path of a new one."
                ) from None
        if steps and min(steps) >= step:
            logger.warning(
                "jaxprefetch: %s: the log of a former run, %d rows from step %d on, is replaced by this run's, from "
                "step %d on. Give each run a file of its own to keep both.",
                *(self._path, len(steps), min(steps), step),
            )
        return [row for row, at in zip(rows, steps, strict=True) if at < step]

    def _rewrite(self, write: Callable[[TextIO], object]) -> TextIO:
        """The file at its end, with what `write` writes in place of what was there; a kill leaves one of both."""
        new = self._path.with_name(self._path.name + ".new")
        with new.open("w", newline="") as file:
            write(file)
        new.replace(self._path)
        self._file = self._path.open("a", newline="", buffering=1)
        return self._file


class JSONLWriter(_LinesWriter):
    """One JSON object a line: `{"step": 3, "loss": 0.5}`. What is no finite number is written as a string, "NaN".

    Args:
        path: the file. If it exists, rows of earlier steps than the first that is written stay, all others go.
    """

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a line, to the operating system at once.

        Raises:
            ValueError: the file that is there is no such log.
        """
        file = self._file
        if file is None:
            kept = self._earlier(step, self._lines(), lambda line: json.loads(line)["step"])
            file = self._rewrite(lambda new: new.writelines(kept))
        file.write(json.dumps({"step": step} | {name: _plain(value) for name, value in metrics.items()}) + "\n")


class CSVWriter(_LinesWriter):
    """A table with the columns `step` and one for each metric that is a number; a new one widens the table.

    Args:
        path: the file. If it exists, rows of earlier steps than the first that is written stay, all others go.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._columns = ["step"]

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a row, to the operating system at once.

        Raises:
            ValueError: the file that is there is no such table.
        """
        row = {"step": step} | {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        file = self._file
        if file is None:
            file = self._widened(self._earlier(step, self._rows(), lambda old: old["step"]), row)
        elif any(name not in self._columns for name in row):
            self.close()
            file = self._widened(self._rows(), row)
        csv.writer(file).writerow([row.get(name, "") for name in self._columns])

    def _rows(self) -> list[dict[str, str]]:
        reader = csv.DictReader(self._lines())
        rows = list(reader)
        self._columns = list(reader.fieldnames or self._columns)
        return rows

    def _widened(self, rows: list[dict[str, str]], row: Mapping[str, Any]) -> TextIO:
        self._columns += [name for name in row if name not in self._columns]

        def write(file: TextIO) -> None:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)

        return self._rewrite(write)


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
