"""Errors that pass through keep their type; where they happened is told in a note.

Synopsis:

    except Exception as error:
        add_note(error, "jaxprefetch: raised while batch 3 was staged")
        raise
"""

from __future__ import annotations

import contextlib


def add_note(error: BaseException, text: str) -> None:
    """Adds a note; an exception that refuses one (a frozen dataclass does) stays as it is instead of being replaced."""
    with contextlib.suppress(Exception):
        error.add_note(text)
