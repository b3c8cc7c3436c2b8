"""The same agreement without the coordination service: by public API alone, with a small collective for each batch.

Synopsis:

    gathered = Gathered(reader, devices, Cards(1, "error"), filler, inline=False)
    gathered.before_next(12)             # on the loop's thread, in every process: batch 12 passes, or the end
    gathered.items[12]

A collective runs on the devices, behind the steps that are queued there, and the loop waits for it: that is the price.
All processes have to ask for the same batches in the same order, between the same steps. One that leaves the loop alone
leaves the others in a collective, as it would in one of theirs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch.host.inline import Inline
from jaxprefetch.host.pipeline import End
from jaxprefetch.host.reader import Reader
from jaxprefetch.host.shelf import Shelf
from jaxprefetch.processes.cards import Cards, error_of, told
from jaxprefetch.processes.skipping import SkipsFirst
from jaxprefetch.processes.verdict import decide


class Gathered(Shelf):
    """Lets items of the reader pass in order. All of it on the consumer's thread, but for `cancel` and `close`.

    Args:
        reader: whose items they are.
        devices: one of each process.
        cards: what to tell of batches.
        filler: makes a staged batch of padding, for after this process's own end.
        inline: the reader has no thread.
    """

    def __init__(
        self,
        reader: Reader | Inline | SkipsFirst,
        devices: Iterable[Any],
        cards: Cards,
        filler: Callable[[int], Any],
        *,
        inline: bool,
    ):
        super().__init__()
        self._inline = inline
        self._reader, self._cards, self._filler = reader, cards, filler
        self._devices = tuple(sorted(devices, key=lambda device: device.process_index))
        self._processes = [device.process_index for device in self._devices]
        self._passed = 0
        self._ended_at: int | None = None
        self._over = False

    def start(self) -> None:
        """Starts the reader."""
        self._reader.start()

    def before_next(self, taken: int) -> None:
        """Agrees on the batch that `next()` is about to return, and on those behind it that all have already.

        Blocking: for this process's batch, then for those of all others.
        """
        if self._inline:
            return  # `wait` is called for the same batches in every process
        while self._passed <= taken and not self._over:
            self._pass_one()
        if not self._over:
            for _ in range(int(_gather(self._devices, np.array([self._staged()], np.int32)).min())):
                self._leave(self._own(self._passed))

    def wait(self, number: int, timeout: float | None) -> bool:
        """Whether item `number` is there: batch 0 once all have it, others when `before_next` has said so."""
        while self._passed <= number and not self._over and (number == 0 or self._inline):
            self._pass_one()
        return super().wait(number, timeout)

    def give_room(self, issued: int, landed: int, now: bool) -> None:
        """As `Reader` has it."""
        self._reader.give_room(issued, landed, now)

    def cancel(self) -> None:
        """Asks the reader to stop. Never blocks."""
        super().cancel()
        self._reader.cancel()

    def close(self) -> None:
        """Stops the reader."""
        self.cancel()
        self._reader.close()

    def _pass_one(self) -> None:
        """One item passes, or the end does."""
        number = self._passed
        item = self._own(number)
        if isinstance(item, End) and item.error is None and self._ended_at is None:
            self._ended_at = number
        verdict = self._decide(number, item)
        if "error" in verdict:
            mine = isinstance(item, End) and item.error is not None and verdict.get("process") == self._cards.process
            item = item if mine else End(error_of(verdict))
        elif "end" in verdict:
            item = End()
        elif isinstance(item, End):
            item = self._filler(number)
        self._leave(item)

    def _decide(self, number: int, item: Any) -> dict[str, Any]:
        if isinstance(item, End) and item.error is not None:
            note: Any = {"failed": told(item.error, self._cards.process, number)}
        elif number == 0:
            note = {"card": self._cards.card(item, None)}
        else:
            note = self._cards.note(item, self._ended_at)
        texts = _gather_texts(self._devices, json.dumps(note))
        notes = {p: json.loads(text) for p, text in zip(self._processes, texts, strict=True) if text != "null"}
        for process, note in notes.items():
            if "failed" in note:
                return {"error": note["failed"], "process": process}
        first = None if number else notes[self._processes[0]]["card"]
        return decide(number, self._processes, first, notes)

    def _own(self, number: int) -> Any:
        if self._ended_at is None and number not in self._reader.items:
            self._reader.wait(number, None)
        return self._reader.items.get(number) or End()

    def _staged(self) -> int:
        """How many items are there that have nothing to tell."""
        number = self._passed
        while number in self._reader.items and self._cards.is_like_the_last(self._reader.items[number]):
            number += 1
        return number - self._passed

    def _leave(self, item: Any) -> None:
        self._over = isinstance(item, End)
        self.leave(self._passed, item)
        self._reader.items.pop(self._passed, None)
        self._passed += 1
        if self._over:
            self._reader.cancel()


def _gather(devices: tuple[Any, ...], values: np.ndarray) -> np.ndarray:
    """What all processes give, one row for each. A collective."""
    mesh = Mesh(np.array(devices), ("processes",))
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    array = jax.make_array_from_process_local_data(rows, values[None], (len(devices), *values.shape))
    return jax.device_get(_replicated(mesh)(array).addressable_data(0))


@functools.cache
def _replicated(mesh: Mesh) -> Any:
    return jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _gather_texts(devices: tuple[Any, ...], text: str) -> list[str]:
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = _gather(devices, np.array([len(data)], np.int32))[:, 0]
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(data)] = data
    return [row[:n].tobytes().decode() for row, n in zip(_gather(devices, padded), lengths, strict=True)]
