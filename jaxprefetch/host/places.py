"""Where the loop is in its source, as a state that can be saved: that of the batch taken last.

Synopsis:

    places = Places(source)
    places.set(state)                             # before anything is pulled
    places.begin_pass(pipeline.places, pulled)    # own states of the source, by the number of batches pulled
    state = places.get(taken=3, rows=96, ended=False)
    places.next_pass()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from jaxprefetch.errors import add_note
from jaxprefetch.host.resume import ResumableSource, Unknown
from jaxprefetch.host.source import AFTER_END
from jaxprefetch.host.states import check_state

VERSION = 1


class Places:
    """Counts passes and the batches taken of them. Used by the consumer's thread.

    Args:
        source: where the places are.
        one_back: states are those before the batch taken last, which will be pulled again to see what padding is like:
            after it the source may have ended.

    Attributes:
        ahead: how many batches are pulled that are not delivered: that one, after a restart.
        rows: of batch 0 of this pass, if that was taken before a restart.
        begun: something was pulled, or is about to be.
    """

    def __init__(self, source: ResumableSource, *, one_back: bool = False):
        self._source, self._one_back = source, one_back
        self.ahead = 0
        self._pulled: Callable[[], int] = lambda: 0
        self._pass = 0
        self._taken = 0  # of this pass, before a restart
        self.rows: int | None = None
        self.begun = False
        self._own: MutableMapping[int, Any] | None = None  # of this pass, once it has begun; the puller puts in
        self._before: Any = None  # the own state with which this pass begins, if it is not the first

    def begin_pass(self, own: MutableMapping[int, Any], pulled: Callable[[], int]) -> None:
        """Pulling begins; `own` gets the source's own state for each number of batches pulled, `pulled` tells that."""
        self._own, self._pulled, self.begun = own, pulled, True

    def next_pass(self) -> None:
        """The pass has ended, and another will begin."""
        self._before = self._own.get(AFTER_END) if self._own is not None else None
        self._pass, self._taken, self.rows, self._own, self.ahead = self._pass + 1, 0, None, None, 0

    def forget(self, taken: int) -> None:
        """So many batches of this pass were taken: no state before the last but one is asked for any more."""
        if self._own:
            self._own.pop(self._index(taken) - 2, None)

    def get(self, taken: int, rows: int | None, *, ended: bool) -> dict[str, Any]:
        """The state after so many batches of this pass since the restart.

        Args:
            taken: see above.
            rows: of batch 0 of this pass, as far as it is known.
            ended: the loop was told of the end of the pass.

        Raises:
            TypeError: the source cannot be resumed, or tells no state behind its batches.
            Exception: what it raised when it was asked for its own state.
        """
        if not self.begun:
            self._source.check_resumable()
            return self._state(self._pass, self._taken, self.rows, self._source.place_before(), again=self.ahead)
        if not self._source.resumable:
            raise self._source.refusal()
        if ended and self._source.reiterable:
            return self._state(self._pass + 1, 0, None, self._own.get(AFTER_END) if self._own is not None else None)
        if self._own is None:
            return self._state(self._pass, 0, None, self._before)
        at = self._index(taken)
        again = taken + self.ahead - at
        return self._state(self._pass, self._taken + at, rows or self.rows, self._own.get(at), again=again)

    def _index(self, taken: int) -> int:
        """How many batches were pulled at the place that is the state's; those that padding stands for were not."""
        pulled = taken + self.ahead
        return max(0, min(pulled, self._pulled()) - 1) if self._one_back else pulled

    def set(self, state: Any) -> None:
        """The first pass begins where the state was taken; on the thread that pulls.

        Raises:
            ValueError: reading has begun; it is no such state, or of another kind of source.
            TypeError: the source cannot be resumed.
        """
        if self.begun:
            raise ValueError("set_state: reading has begun. Set the state of a newly made prefetcher.")
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise ValueError(
                f"set_state: expected what get_state() of version {VERSION} gave, got {state!r:.200}. Begin anew "
                "without it, or read it with the version that wrote it."
            )
        self._source.check_resumable()
        state = dict(state)
        again = state.pop("again", False)
        number_of_pass, taken = check_state(state, "set_state", ("pass", "taken"), ("version", "how", "rows", "source"))
        if (rows := state["rows"]) is not None:
            (rows,) = check_state({"rows": rows}, "set_state", ("rows",))
        if state["how"] != self._source.how:
            raise ValueError(
                f"set_state: the state was taken by {state['how']!r}, and this source is resumed by "
                f"{self._source.how!r}. Make it as it was made then, with the same `resume`."
            )
        self._source.go_to(number_of_pass, taken, state["source"])
        self._pass, self._taken, self.rows = number_of_pass, taken, rows
        self.ahead = int(again is True)

    def _state(self, number_of_pass: int, taken: int, rows: int | None, own: Any, *, again: int = 0) -> dict[str, Any]:
        if isinstance(own, Unknown):
            add_note(own.error, "jaxprefetch: raised by the source when it was asked for its state")
            raise own.error
        if own is None and taken and self._source.how != "replay":
            raise TypeError(
                f"source: {self._source.how}() of it, or of its iterator, gave None behind batch {taken - 1}, but None "
                "stands for the beginning of a pass. Let it return what brings the source back to that place, or pass "
                'resume="replay".'
            )
        last = {"again": True} if again else {}  # the batch after this place has been taken
        return last | {
            "version": VERSION,
            "how": self._source.how,
            "pass": number_of_pass,
            "taken": taken,
            "rows": rows,
            "source": own,
        }
