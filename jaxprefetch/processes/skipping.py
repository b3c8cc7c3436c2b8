"""A reader whose first batch is not delivered: it was taken before a restart, and shows only what padding is like.

Synopsis:

    reader = SkipsFirst(Reader(pipeline), cards.see)
    reader.wait(0, timeout=None)         # for what is the reader's item 1
    reader.items.get(0)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxprefetch.host.inline import Inline
from jaxprefetch.host.pipeline import End
from jaxprefetch.host.reader import Reader


class SkipsFirst:
    """Is to the gate what the reader is, and has a batch less.

    Args:
        reader: whose first batch is skipped.
        see: is shown that one.
    """

    def __init__(self, reader: Reader | Inline, see: Callable[[Any], None]):
        self._reader, self._see = reader, see
        self._first: Any = None  # what was skipped
        self.items = _OneLater()

    def start(self) -> None:
        """Starts the reader."""
        self._reader.start()

    def wait(self, number: int, timeout: float | None) -> bool:
        """As the reader has it. An error instead of the first batch is that of item 0."""
        if self._first is None:
            if not self._reader.wait(0, timeout):
                return False
            if 0 not in self._reader.items:
                return True
            self._first = self._reader.items.pop(0)
            self.items.all = self._reader.items
            if isinstance(self._first, End):
                self._reader.items[1] = self._first
                return True
            self._see(self._first)
            self._first.slot.free()
            self._reader.give_room(1, self._first.plan.host_bytes)
        return self._reader.wait(number + 1, timeout)

    def give_room(self, issued: int, landed: int, now: bool = True) -> None:
        """As the reader has it; the first batch has gone."""
        first = 0 if self._first is None or isinstance(self._first, End) else self._first.plan.host_bytes
        self._reader.give_room(issued + 1, landed + first, now)

    def cancel(self) -> None:
        """As the reader has it."""
        self._reader.cancel()

    def close(self) -> None:
        """As the reader has it."""
        self._reader.close()


class _OneLater:
    """Items by the number that they have without the first; none before that was skipped."""

    def __init__(self) -> None:
        self.all: dict[int, Any] = {}

    def __contains__(self, number: int) -> bool:
        return number + 1 in self.all

    def __getitem__(self, number: int) -> Any:
        return self.all[number + 1]

    def get(self, number: int) -> Any:
        """The item, or None."""
        return self.all.get(number + 1)

    def pop(self, number: int, default: Any) -> Any:
        """The item, taken out."""
        return self.all.pop(number + 1, default)

    def items(self) -> list[tuple[int, Any]]:
        """All of them."""
        return [(number - 1, item) for number, item in list(self.all.items()) if number]
