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

    Its iterator, or itself where it cannot be iterated, may have `read_into(out) -> rows` and `element_spec`: it writes
    its batches itself, into memory that it is given.

    Raises:
        TypeError: it cannot be iterated, or iterating it does not give batches.
    """

    def __init__(self, source: Any):
        if isinstance(source, (Mapping, str, bytes)):
            raise TypeError(
                f"source: iterating a {type(source).__name__} does not give batches. "
                "Pass an iterable of batches; a single one goes into a list."
            )
        if not any(hasattr(source, name) for name in ("__iter__", "__next__", "__getitem__", "read_into")):
            raise TypeError(f"source: expected an iterable of batches, got {type(source).__name__}.")
        self._source = source
        is_iterator = hasattr(source, "__next__") or (writes_batches(source) and not hasattr(source, "__iter__"))
        self.reiterable = not is_iterator

    def open(self) -> Iterator[Any]:
        """The iterator of one pass."""
        return iter(self._source) if hasattr(self._source, "__iter__") or self.reiterable else self._source


def writes_batches(iterator: Any) -> bool:
    """Whether it writes its batches into memory that it is given."""
    return callable(getattr(iterator, "read_into", None))


def close_iterator(iterator: Any) -> None:
    """Calls `close()` where the iterator has one."""
    close = getattr(iterator, "close", None)
    if callable(close):
        close()


def closable_from_outside(iterator: Any) -> bool:
    """Whether `close()` may be called while another thread is inside `next()`: generators refuse that."""
    return not inspect.isgenerator(iterator) and callable(getattr(iterator, "close", None))
