"""Where an error happened is told in a note, which changes nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from jaxprefetch.errors import add_note


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses new attributes."""

    code: int


def test_a_note_is_added() -> None:
    """An exception carries the notes in order."""
    error = ValueError("wrong")
    add_note(error, "first")
    add_note(error, "second")
    assert error.__notes__ == ["first", "second"]


def test_an_exception_that_refuses_notes_stays_as_it_is() -> None:
    """Where no note can be added there is none, and the exception is not replaced by another."""
    with pytest.raises(Frozen, match="3"):
        try:
            raise Frozen(3)
        except Frozen as error:
            add_note(error, "lost")
            raise
