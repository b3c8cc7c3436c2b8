"""One pass of several processes: each announces its batches, whoever comes last decides, all read what was decided.

Synopsis:

    agreement = Agreement(service, "jaxprefetch/0-3/0/0", process=1, processes=[0, 1, 2, 3])
    agreement.announce(12, {"ended": 12, "uneven": "error"})     # waits for nobody
    agreement.verdict(12, seconds=1.0)                           # None: not all have announced batch 12

Keys of batch 12, in the folder "12" of the pass:

    count       how many have announced it, and how many of them left a note: one addition each
    first       of batch 0: the card of whoever came first; those who have the same need no note
    notes/3     what process 3 has to tell
    verdict     written once, by whoever came last, or by one that has failed; all wait for this key

Nobody announces batch 13 before it has read the verdict on batch 12. So whoever decides on batch 13 may delete folder
12, and the service keeps two folders, however long the pass is. Work for a batch: two requests from each process (an
addition, a wait) and one more from one of them, however many processes there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxprefetch.processes.service import Service
from jaxprefetch.processes.verdict import decide

_NOTE = 1 << 15
"""What a note adds to the count, which has 32 bits."""

MOST_PROCESSES = _NOTE - 1


class Agreement:
    """What one process has to do with one pass. Used by one thread at a time.

    Args:
        service: where the keys are.
        folder: of the pass; the same in all processes.
        process: this one.
        processes: all that take part, in order.
        last: the folder of the pass before, which is deleted when all have begun this one.
    """

    def __init__(self, service: Service, folder: str, process: int, processes: Sequence[int], last: str | None = None):
        self._service, self._folder, self._me, self._processes = service, folder, str(process), processes
        self._last = last
        self._decided: dict[int, dict[str, Any]] = {}  # the last verdict that this process has written
        self._counts: dict[str, int] = {}  # what was announced, for an interrupt may strike

    def announce(self, number: int, note: Mapping[str, Any] | None, *, card: Mapping[str, Any] | None = None) -> None:
        """This process has batch `number`, or tells in a note what it has instead. Again, it changes nothing.

        Args:
            card: of batch 0, what all should have in common.
        """
        folder = f"{self._folder}/{number}"
        self._counts = {key: count for key, count in self._counts.items() if key.startswith(folder + "/")}
        if card is not None:
            note = self._compared(folder, card)
        if note is not None:
            self._service.set(f"{folder}/notes/{self._me}", json.dumps(note))
        count = self._service.add(f"{folder}/count", 1 + _NOTE * (note is not None), self._counts)
        if count % _NOTE == len(self._processes):
            self._decide(number, folder, noted=count >= _NOTE)

    def verdict(self, number: int, seconds: float) -> dict[str, Any] | None:
        """What was decided on this batch. Blocking: so many seconds at most, then None."""
        if number in self._decided:
            return self._decided[number]
        text = self._service.wait(f"{self._folder}/{number}/verdict", seconds)
        return None if text is None else json.loads(text)

    def settle(self, number: int, verdict: Mapping[str, Any]) -> None:
        """Decides without waiting for the others, unless it has been decided."""
        self._service.set_once(f"{self._folder}/{number}/verdict", json.dumps(verdict))

    def fail(self, number: int, text: str, *, closed: bool = False) -> None:
        """Tells all that there will be no batch `number` from this process, in whatever wait they are.

        Args:
            text: the error that they raise.
            closed: it is no failure, but the loop of this process has gone.
        """
        verdict = {"error": text, "process": int(self._me), "batch": number, "closed": closed}
        self._service.set_once(f"{self._folder}/failed", json.dumps(verdict))
        self.settle(number, verdict)

    def failure(self) -> dict[str, Any] | None:
        """What the first that failed has told."""
        text = self._service.get(f"{self._folder}/failed")
        return None if text is None else json.loads(text)

    def say_waiting(self, number: int) -> None:
        """This process waits for the verdict, as it has announced the batch."""
        self._service.set(f"{self._folder}/{number}/waiting/{self._me}", "")

    def missing(self, number: int) -> list[int]:
        """Who has not said that it waits for the verdict on this batch."""
        waiting = self._service.under(f"{self._folder}/{number}/waiting")
        return [process for process in self._processes if str(process) not in waiting]

    def _compared(self, folder: str, card: Mapping[str, Any]) -> dict[str, Any] | None:
        """A note with the card, where it is not the one of whoever came first."""
        text = json.dumps(card)
        if self._service.set_once(f"{folder}/first", text) or self._service.wait(f"{folder}/first", 60.0) == text:
            return None
        return {"card": card}

    def _decide(self, number: int, folder: str, *, noted: bool) -> None:
        notes = self._service.under(f"{folder}/notes") if noted else {}
        first = None if number else json.loads(self._service.wait(f"{folder}/first", 60.0) or "null")
        read = {int(process): json.loads(note) for process, note in notes.items()}
        verdict = decide(number, self._processes, first, read)
        if self._service.set_once(f"{folder}/verdict", json.dumps(verdict)):
            self._decided = {number: verdict}
        if (over := f"{self._folder}/{number - 1}" if number else self._last) is not None:
            self._service.delete(over)
