"""The source: any iterable, and what a `for` loop over it would give.

Synopsis:

    source = Source(loader)
    iterator = source.open()         # a pass
    close_iterator(iterator)         # gives back what the pass holds
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any


class Source:
    """A source of batches and whether it can be gone through again.

    Raises:
        TypeError: it cannot be iterated, or iterating it does not give batches.
    """

    def __init__(self, source: Any):
        if isinstance(source, (Mapping, str, bytes)):
            raise TypeError(
                f"source: iterating a {type(source).__name__} does not give batches. "
                "Pass an iterable of batches; a single one goes into a list."
            )
        if not hasattr(source, "__iter__") and not hasattr(source, "__next__") and not hasattr(source, "__getitem__"):
            raise TypeError(f"source: expected an iterable of batches, got {type(source).__name__}.")
        self._source = source
        self.reiterable = not hasattr(source, "__next__")

    def open(self) -> Iterator[Any]:
        """The iterator of one pass."""
        return iter(self._source) if hasattr(self._source, "__iter__") or self.reiterable else self._source


def close_iterator(iterator: Any) -> None:
    """Calls `close()` where the iterator has one."""
    close = getattr(iterator, "close", None)
    if callable(close):
        close()


def closable_from_outside(iterator: Any) -> bool:
    """Whether `close()` may be called while another thread is inside `next()`: generators refuse that."""
    return not inspect.isgenerator(iterator) and callable(getattr(iterator, "close", None))
