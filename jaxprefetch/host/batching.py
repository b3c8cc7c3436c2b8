"""Rows: what happens to a batch with fewer of them than the first.

Synopsis:

    policy = LastBatch("pad")
    policy.admit(0, rows=96, shards=8)      # 96: deliver as it is
    policy.admit(7, rows=13, shards=8)      # 96: pad it to so many
"""

from __future__ import annotations

from typing import Literal

Mode = Literal["error", "drop", "pad"]
MODES = ("error", "drop", "pad")


class LastBatch:
    """Decides from the rows of each batch, in order. One object a pass.

    Args:
        mode: `"error"` delivers every batch as it is (one that cannot be split is refused where it is placed),
            `"drop"` leaves out a short last batch, `"pad"` fills up to the rows of batch 0, rounded up to the shards.
        rows: of batch 0, if it was delivered before a restart.

    Attributes:
        rows: of batch 0; None before it.
    """

    def __init__(self, mode: Mode, rows: int | None = None):
        self.mode = mode
        self.rows = rows
        self._short: tuple[int, int] | None = None

    def room(self, rows: int, shards: int) -> int | None:
        """The most rows to deliver of a batch that has so many at most; None where it will be held back."""
        if self.mode == "drop" and self.rows is not None and rows < self.rows:
            return None
        return rows if self.mode != "pad" else _rounded_up(max(rows, self.rows or 0), shards)

    def admit(self, number: int, rows: int, shards: int) -> int | None:
        """The rows to deliver; None to hold the batch back, which is right only if it turns out to be the last.

        Raises:
            ValueError: more rows than there is room for, or a short batch that was not the last.
        """
        if self._short is not None and self._short[0] != number:  # else asked again, after an interrupt
            short, had = self._short
            raise ValueError(
                f"Batch {short}: {had} rows where batch 0 has {self.rows}, and it is not the last: last_batch='drop' "
                "leaves out a short last batch only. Let the source batch evenly, or pass last_batch='pad'."
            )
        if self.rows is None:
            self.rows = rows
        if self.mode == "drop" and rows < self.rows:
            self._short = number, rows
            return None
        if self.mode != "pad":
            return rows
        if rows > self.rows:
            raise ValueError(
                f"Batch {number}: {rows} rows where batch 0 has {self.rows}: padding gives every batch the "
                "rows of the first. Let the source yield its largest batch first, or split larger ones."
            )
        return _rounded_up(self.rows, shards)


def _rounded_up(rows: int, shards: int) -> int:
    return -(-rows // shards) * shards
