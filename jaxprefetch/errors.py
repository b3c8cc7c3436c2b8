"""Errors that pass through keep their type; where they happened is told in a note.

Synopsis:

    with Noted("jaxprefetch: raised while batch 3 was staged"):
        ...
"""

from __future__ import annotations

import contextlib
from types import TracebackType

KEEP = "Name it in keep_on_host of prefetch_to_device to receive it as it is, or leave it out of the batch."
"""The cure for a leaf that cannot go to a device."""
SAY_AFTER_SECONDS = 10.0
"""A wait without a timeout that has lasted so long is logged, once a wait."""


def add_note(error: BaseException, text: str, *, unless: str | None = None) -> None:
    """Adds a note; an exception that refuses one (a frozen dataclass does) stays as it is instead of being replaced.

    Args:
        unless: the message begins with this: it says by itself what the note would.
    """
    with contextlib.suppress(Exception):
        if unless is None or not str(error).startswith(unless):
            error.add_note(text)


class Noted:
    """Adds the note to what is raised inside, as `add_note` does.

    `contextlib.contextmanager` would set the traceback, which a frozen dataclass refuses (seen in Python 3.11).
    """

    def __init__(self, text: str, *, unless: str | None = None):
        self._text, self._unless = text, unless

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception):
            add_note(error, self._text, unless=self._unless)


def deleted(where: str) -> ValueError:
    """The error for an array of the source's own that is dead."""
    return ValueError(
        f"{where}: the source has deleted or donated this jax.Array, or the loop has, if it was in an earlier batch, "
        "too. Yield arrays that are alive, each once."
    )
