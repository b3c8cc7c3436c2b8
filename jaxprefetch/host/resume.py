"""Sources that can be brought back to a place: by their own state, or by going through them again.

Synopsis:

    source = ResumableSource(loader, resume="replay")
    source.check_resumable()                     # TypeError: says what it lacks
    source.go_to(number_of_pass=2, taken=17, own=None)
    iterator = source.open()                     # its next batch is the 18th of the third pass
    own = source.place(iterator)                 # the source's own state, if it has one
"""

from __future__ import annotations

import collections
import copy
import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxprefetch.host.loaders import exact_length, forgets, is_streamed, shuffles_anew
from jaxprefetch.host.source import Source, close_for_good, close_iterator, origin, writes_batches

CURE = (
    'If a newly made source yields the same batches in the same order again, pass resume="replay": it is then gone '
    "through once more up to its place."
)


@dataclass(frozen=True)
class Unknown:
    """What the source raised when it was asked for its state."""

    error: Exception


class ResumableSource(Source):
    """A source and how it is brought back to a place.

    By its iterator's `get_state()` and `set_state()` (Grain), or by its own `state_dict()` and `load_state_dict()`
    (torchdata, streams of Hugging Face), or with `resume="replay"` by counting.

    Attributes:
        resumable: there is such a way.

    Args:
        source: any iterable of batches.
        resume: `"replay"` or None.

    Raises:
        TypeError: it cannot be iterated, or iterating it does not give batches.
        ValueError: `resume` is something else, or the order of the batches cannot repeat.
    """

    def __init__(self, source: Any, resume: str | None = None):
        super().__init__(source)
        if resume not in (None, "replay"):
            raise ValueError(f"resume: expected None or 'replay', got {resume!r}.")
        if resume is not None and (why := shuffles_anew(source)):
            raise ValueError(f"resume='replay': {why}")
        self.replays = resume is not None
        self._forgets = forgets(source)
        self._loads = not self.replays and not self._forgets and _has(source, "state_dict", "load_state_dict")
        self._sticks = False  # the state that was loaded would be where the next pass begins, too
        self.resumable = self.replays or self._loads  # or its iterator has a state, as is known when it is there
        self._opened: Any = None  # an iterator that no pass has taken over yet
        self._passes_to_skip = 0
        self._to_skip: Iterator[int] = iter(())  # one for each batch of the pass
        self._behind: int | None = 0  # where in its next pass it will be opened; None: only the source knows

    def length(self) -> int | None:
        """How many batches the pass that is opened next will have; None where that is not known. Once a pass."""
        behind, self._behind = self._behind, 0
        return None if behind is None or (n := exact_length(self._source)) is None else max(0, n - behind)

    def open(self) -> Iterator[Any]:
        """The iterator of one pass, at its place. The same again until it is handed over.

        Blocking: in the source, as long as it takes to go through it again.

        Raises:
            ValueError: it has fewer batches than it had.
        """
        while self._passes_to_skip:
            collections.deque(_batches(self._open()), maxlen=0)
            close_iterator(self._opened)
            self._opened, self._passes_to_skip = None, self._passes_to_skip - 1
        iterator = self._open()
        if left := operator.length_hint(self._to_skip):
            # In C, the batch before its count: an interrupt in the source takes none of them away.
            collections.deque(zip(itertools.islice(_batches(iterator), left), self._to_skip, strict=False), maxlen=0)
            if left := operator.length_hint(self._to_skip):
                raise ValueError(
                    f"resume='replay': the source has ended {left} batches before the place that it was left at. "
                    "It has to yield the same batches as before."
                )
        return iterator

    def hand_over(self, iterator: Any) -> None:
        """See `Source`."""
        if iterator is self._opened:
            self._opened = None

    def has_places(self, iterator: Any) -> bool:
        """See `Source`."""
        has_state = _has_state(iterator)
        self.resumable = self.resumable or has_state
        return self._loads or (has_state and not self.replays)

    def place(self, iterator: Any) -> Any:
        """A copy of the source's own state, behind the batch pulled last."""
        return self._own(iterator)

    def place_before(self) -> Any:
        """The own state before the first batch. On the thread that pulls."""
        return self._own(None if self._loads or self.replays else self._open())

    def place_after(self) -> Any:
        """The own state after the end of a pass, from which the next one begins; None is the beginning."""
        if self._sticks:
            self._source.load_state_dict({})
            self._sticks = False
        return self._own(None) if self._loads and not is_streamed(self._source) else None

    @property
    def how(self) -> str:
        """By what it is brought back: states of one kind are of no use to the other."""
        return "replay" if self.replays else "state_dict" if self._loads else "get_state"

    def check_resumable(self) -> None:
        """On the thread that pulls, before the first pass.

        Raises:
            TypeError: nothing brings this source back to its place.
        """
        if not self.resumable:
            self.resumable = _has_state(self._open())
        if not self.resumable:
            raise self.refusal()

    def refusal(self) -> TypeError:
        """The error for a source that nothing brings back to its place."""
        why = self._forgets or (
            "it has no state_dict() and load_state_dict(), as torchdata's loaders have, and its iterator no "
            "get_state() and set_state(), as Grain's have."
        )
        return TypeError(f"source: a {type(self._source).__name__} cannot be resumed: {why} {CURE}")

    def go_to(self, number_of_pass: int, taken: int, own: Any) -> None:
        """The next pass begins behind so many batches of that one. On the thread that pulls.

        Args:
            number_of_pass: how many passes were made before.
            taken: batches of this pass.
            own: the source's own state there; None is the beginning.
        """
        if self.replays:
            same = isinstance(self._source, (list, tuple)) or not self.reiterable
            self._passes_to_skip = 0 if same else number_of_pass
            self._to_skip, self._behind = iter(range(taken)), taken
            return
        self._behind = 0 if own is None else None
        if own is not None and self._loads:
            self._sticks = is_streamed(self._source)
            if self._sticks and "epoch" in own:  # else it takes the state for that of another epoch, and begins anew
                self._source.set_epoch(own["epoch"])
            self._source.load_state_dict(own)
        elif own is not None:
            origin(self._open()).set_state(own)

    def close(self) -> None:
        """See `Source`; what closing raises is logged."""
        iterator, self._opened = self._opened, None
        close_for_good(iterator)

    def _own(self, iterator: Any) -> Any:
        try:
            if self._loads:
                return copy.deepcopy(self._source.state_dict())
            return copy.deepcopy(origin(iterator).get_state()) if not self.replays and _has_state(iterator) else None
        except Exception as error:
            return Unknown(error)

    def _open(self) -> Any:
        if self._opened is None:
            self._opened = super().open()
        return self._opened


def _has_state(iterator: Any) -> bool:
    return _has(origin(iterator), "get_state", "set_state")


def _has(thing: Any, *methods: str) -> bool:
    return all(callable(getattr(thing, name, None)) for name in methods)


def _batches(iterator: Any) -> Iterator[Any]:
    """Its batches, for being thrown away; one that writes into memory writes them there, as it does in a pass."""
    return iter(lambda: _write(iterator), 0) if writes_batches(iterator) else iterator


def _write(iterator: Any) -> int:
    out = jax.tree_util.tree_map(lambda leaf: np.empty(leaf.shape, leaf.dtype), iterator.element_spec)
    return iterator.read_into(out)
