"""What errors say. Those that pass through keep their type; where they happened is told in a note.

Synopsis:

    with Noted("jaxprefetch: raised while batch 3 was staged"):
        ...
    with WithoutOptions():       # for callers to whom `prefetch_to_device` and its options mean nothing
        ...
    difference(["x", "y"], ["x"])       # "expected x, y, got x: y is missing"
    shown(2.5), typed(2.5)              # "2.5" and "float 2.5": one line each, not all of what is long
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any

OPTION = "prefetch_to_device(..., "
"""How a message names an option that not every callable takes through which a user may have come. Where it can reach
one without (`WithoutOptions`), the cure goes on with "; else ...": what all of them can do."""

KEEP = f"{OPTION}keep_on_host=...) hands it on as it is; else leave it out."
"""The cure for a leaf that cannot go to a device."""

MOST_SHOWN = 100
"""Characters of the repr of what was got."""

SAY_AFTER_SECONDS = 10.0
"""A wait without a timeout that has lasted so long is logged, once a wait."""


def add_note(error: BaseException, text: str, *, unless: str | None = None, about: str = "") -> None:
    """Adds a note; an exception that refuses one (a frozen dataclass does) stays as it is instead of being replaced.

    Args:
        unless: the message begins with this: it says by itself what the note would.
        about: only if the message, or a note, has this in it.
    """
    with contextlib.suppress(Exception):
        if unless is not None and str(error).startswith(unless):
            return
        if not about or about in "\n".join([str(error), *getattr(error, "__notes__", ())]):
            error.add_note(text)


class Noted:
    """Adds the note to what is raised inside, as `add_note` does.

    `contextlib.contextmanager` would set the traceback, which a frozen dataclass refuses (seen in Python 3.11).
    """

    def __init__(self, text: str, *, unless: str | None = None, about: str = ""):
        self._text, self._unless, self._about = text, unless, about

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception):
            add_note(error, self._text, unless=self._unless, about=self._about)


def source_with_options(call: str, needs: str = "") -> Noted:
    """Tells who gave `call` a bare source how to set an option that a message names; `needs`: what else it needs."""
    text = f"jaxprefetch: pass {call} a prefetch_to_device(...), with that and all other options{needs}, as source"
    return Noted(text, about=OPTION)


class WithoutOptions(contextlib.ContextDecorator):
    """For those who have no such option: what is raised inside keeps only the "else ..." of a cure.

    Message and notes are changed after the fact, where they name an `OPTION`: what stages a batch does not know for
    whom, and for a cache it does so on a thread of its own. What names none is not touched: an exception of the
    source's may have arguments and notes of any kind.
    """

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                notes = getattr(error, "__notes__", None)
                if isinstance(notes, list):
                    notes[:] = map(_without_option, notes)
                if any(map(_names_option, error.args)):
                    error.args = tuple(map(_without_option, error.args))


def _names_option(part: Any) -> bool:
    return isinstance(part, str) and OPTION in part


def _without_option(part: Any) -> Any:
    if not _names_option(part):
        return part
    return re.sub(re.escape(OPTION) + ".*?; else (.)", lambda match: match[1].upper(), part)


def difference(expected: Sequence[str], got: Sequence[str]) -> str:
    """Which names are missing and which are too many, beside all that were expected and got; "" where it is neither."""
    missing = [name for name in expected if name not in got]
    extra = [name for name in got if name not in expected]
    told = [
        f"{some(names)} {'is' if len(names) == 1 else 'are'} {what}"
        for names, what in ((missing, "missing"), (extra, "too many"))
        if names
    ]
    return f"expected {some(expected)}, got {some(got)}: {', '.join(told)}" if told else ""


def shown(value: Any) -> str:
    """A value that was got: its repr, or, where that is long or of several lines, as `typed` has it."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN and "\n" not in text else typed(value)


def typed(value: Any) -> str:
    """The type of a value that was got, and the beginning of its repr, in one line."""
    text = re.sub(r"\s*\n\s*", " ", repr(value))
    return f"{type(value).__name__} {text[:MOST_SHOWN]}{' ...' if len(text) > MOST_SHOWN else ''}"


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    return (", ".join(names[:10]) or "none") + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def deleted(where: str) -> ValueError:
    """The error for an array of the source's own that is dead."""
    return ValueError(
        f"{where}: the source has deleted or donated this jax.Array, or the loop has, if it was in an earlier batch, "
        "too. Yield arrays that are alive, each once."
    )
