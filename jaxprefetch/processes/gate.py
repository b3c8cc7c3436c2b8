"""Between the reader and the loop: a batch passes once all processes have it, and the end once all know of it.

Synopsis:

    gate = Gate(reader, agreement, Cards(1, "pad"), filler, length=None, host_size=4)
    gate.start()                         # the reader, and a thread that announces and waits for verdicts
    gate.wait(0, timeout=None)           # until batch 0 is here and in all other processes, too
    gate.items[0]

To the loop an agreement that takes its time looks like a slow source: the window stays as it is, batch k is handed out
when its device would go idle, and a source that needs the result of a step gets it. The reader works on meanwhile.

Where the lengths of all sources are known only the first batch and the last are agreed on. Others pass by themselves,
and once a second somebody looks whether another process has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from jaxprefetch.errors import add_note
from jaxprefetch.host.inline import Inline
from jaxprefetch.host.pipeline import End
from jaxprefetch.host.reader import Reader
from jaxprefetch.host.shelf import Shelf
from jaxprefetch.processes.agreement import Agreement
from jaxprefetch.processes.cards import Cards, error_of, gone, told, wrong_length
from jaxprefetch.processes.others import LOOK_SECONDS, Others
from jaxprefetch.processes.skipping import SkipsFirst

logger = logging.getLogger("jaxprefetch")

JOIN_SECONDS = 1.5 * LOOK_SECONDS
"""What `close()` waits for the thread, which is in a request of `LOOK_SECONDS` at most."""


class _Failed(Exception):
    """Another process has failed; carries what it has told."""

    def __init__(self, failure: dict[str, Any]):
        super().__init__(failure["error"])
        self.failure = failure


class Gate(Shelf):
    """Lets items of the reader pass in order. With `host_size=0` there is no thread: `wait` does the work.

    Args:
        reader: whose items they are; `Inline` if there is no thread.
        agreement: on this pass.
        cards: what to tell of batches.
        filler: makes a staged batch of padding, for after this process's own end.
        length: batches of this process's source; None: it is not known.
        host_size: how many batches of padding may be here and not issued.

    Thread safety: `wait`, `give_room` for one consumer; `cancel`, `close` for any thread at any time.
    """

    def __init__(
        self,
        reader: Reader | Inline | SkipsFirst,
        agreement: Agreement,
        cards: Cards,
        filler: Callable[[int], Any],
        *,
        length: int | None,
        host_size: int,
    ):
        super().__init__()
        self._reader, self._agreement, self._cards, self._filler = reader, agreement, cards, filler
        self._own_length, self._host_size = length, host_size
        self._length: int | None = None  # of the pass, once that is agreed
        self._ended_at: int | None = None  # how many batches this process's source had
        self._number = 0  # the item that is next to pass; this and those above are its thread's
        self._over = False  # the end has passed, or the others know that this process has gone
        self._others = Others(agreement, cards.process)
        self._issued = 0  # written by the consumer
        self._wants_room = False  # written by the thread
        self._room: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the reader and the thread, once."""
        for gate in list(_live):
            if gate._cancelled and gate._thread is None:  # dropped without a close, and no thread has told the others
                gate._leave()
        self._reader.start()
        if not self._over:
            _live.add(self)
        if self._host_size and self._thread is None and not self._cancelled:
            self._thread = threading.Thread(target=self._run, name="jaxprefetch-agreement", daemon=True)
            try:
                self._thread.start()
            except BaseException:  # no more threads to be had: another call tries again
                self._thread = None
                raise

    def wait(self, number: int, timeout: float | None) -> bool:
        """Whether item `number` is there within so many seconds. Blocking: that long; without a thread, until it is."""
        while not self._host_size and self._number <= number and not (self._over or self._cancelled):
            self._pass_one()
        return super().wait(number, timeout if self._host_size else 0)

    def give_room(self, issued: int, landed: int, now: bool) -> None:
        """As `Reader` has it; the thread here is woken always."""
        self._issued = issued
        self._reader.give_room(issued, landed, now)
        if self._wants_room:
            self._room.put(None)

    def cancel(self) -> None:
        """Asks both threads to stop and wakes all sides. Never blocks; safe in finalisers."""
        super().cancel()
        self._reader.cancel()
        self._room.put(None)

    def close(self) -> None:
        """Stops both threads, and tells the others. Blocking: as the reader's `close`, then `JOIN_SECONDS` at most."""
        self.cancel()
        self._reader.close()
        self.join()

    def join(self) -> None:
        """Waits for the thread to end, `JOIN_SECONDS` at most; it has been cancelled."""
        thread = self._thread
        if thread is None:
            self._leave()
        elif thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)
            if thread.is_alive():
                logger.warning("jaxprefetch: the coordination service does not answer; its thread is left behind.")

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._over and not self._cancelled:
                self._pass_one()
        finally:
            self._leave()

    def _leave(self) -> None:
        """The others learn that nothing more comes from this process, if they do not know it."""
        over, self._over = self._over, True
        _live.discard(self)
        if not over:
            with contextlib.suppress(Exception):  # whoever cannot be told will not wait for long either
                self._agreement.fail(self._number, gone(self._cards.process, self._number), closed=True)

    def _pass_one(self) -> None:
        """One item passes, unless the pass is cancelled; after an interrupt it is tried again."""
        number = self._number
        try:
            item = self._next(number)
        except _Failed as failed:
            item = End(error_of(failed.failure))
        except Exception as error:
            add_note(error, f"jaxprefetch: raised while the processes agreed on batch {number}")
            item = End(error)
            with contextlib.suppress(Exception):
                self._agreement.fail(number, told(error, self._cards.process, number))
        if item is None:
            return
        self._over = self._over or isinstance(item, End)
        self.leave(number, item)
        self._reader.items.pop(number, None)
        self._number = number + 1
        if self._over:
            self._reader.cancel()

    def _next(self, number: int) -> Any:
        """The item as all processes see it; None when the pass was cancelled."""
        if self._cards.uneven == "drop" and number == self._length:
            return End()
        item = self._own(number)
        if item is None:
            return None
        agreed = self._length is not None and number != self._length - 1  # the last may be shorter in some only
        return self._by_length(number, item) if agreed else self._by_count(number, item)

    def _own(self, number: int) -> Any:
        """This process's item; None when cancelled."""
        while self._ended_at is None and number not in self._reader.items:
            if self._reader.wait(number, LOOK_SECONDS):
                if number not in self._reader.items:
                    return None
            elif (failure := self._others.failure(number)) is not None:
                if self._length is None:
                    self._agreement.settle(number, failure)
                raise _Failed(failure)
        item = self._reader.items.get(number) or End()
        if _is_end(item) and self._ended_at is None:
            self._ended_at = number
        return item

    def _by_count(self, number: int, item: Any) -> Any:
        """What becomes of it by what all have announced."""
        if isinstance(item, End) and item.error is not None:
            self._agreement.fail(number, told(item.error, self._cards.process, number))
            return item
        if number == 0:
            self._agreement.announce(0, None, card=self._cards.card(item, self._own_length))
        else:
            self._agreement.announce(number, self._cards.note(item, self._ended_at))
        if (verdict := self._verdict(number)) is None:
            return None
        if "error" in verdict:
            return End(error_of(verdict))
        if "end" in verdict:
            if verdict["end"]:
                logger.info("jaxprefetch: %s. All stop there, for uneven='drop'.", verdict["end"])
            return End()
        self._length = verdict.get("length", self._length)
        return self._padding(number) if isinstance(item, End) else item

    def _by_length(self, number: int, item: Any) -> Any:
        """What becomes of it by the agreed length of the pass."""
        if self._others.due and (failure := self._others.failure(number)) is not None:
            raise _Failed(failure)
        said, ended = self._own_length, _is_end(item)
        if said is not None and number < said and not isinstance(item, End):
            return item
        if ended and self._ended_at == said:
            return item if number == self._length else self._padding(number)
        own = item.error if isinstance(item, End) else None
        error = own or wrong_length(said, number, ended=ended)
        self._agreement.fail(number, told(error, self._cards.process, number))
        return End(error)

    def _verdict(self, number: int) -> dict[str, Any] | None:
        """What was decided; None when cancelled. Waits in short requests, for a close has to wait for each."""
        waited, seconds = 0.0, LOOK_SECONDS / 16
        while not self._cancelled:
            if (verdict := self._agreement.verdict(number, seconds)) is not None:
                return verdict
            waited, seconds = waited + seconds, min(2 * seconds, LOOK_SECONDS)
            if waited < LOOK_SECONDS:
                continue
            self._tell_what_comes()
            if (failure := self._others.failure(number)) is not None:
                self._agreement.settle(number, failure)
            else:
                self._others.say(number, waited)
        return None

    def _tell_what_comes(self) -> None:
        """An error that the reader has met already, behind batches on which no agreement comes."""
        for number, item in list(self._reader.items.items()):
            if isinstance(item, End) and item.error is not None:
                self._agreement.fail(number, told(item.error, self._cards.process, number))

    def _padding(self, number: int) -> Any:
        """A batch of padding, once it is wanted; None when cancelled."""
        self._wants_room = True
        while self._host_size and number - self._issued >= self._host_size and not self._cancelled:
            self._room.get()
        self._wants_room = False
        return None if self._cancelled else self._filler(number)


def _is_end(item: Any) -> bool:
    return isinstance(item, End) and item.error is None


def _stop_all() -> None:
    gates = list(_live)
    for gate in gates:
        gate.cancel()
    for gate in gates:
        gate.join()


_live: set[Gate] = set()  # for which the other processes may wait; each takes itself out

# As for readers: a daemon thread inside JAX when the interpreter goes away would abort the process. This is called
# before JAX's own handler, while the service is there, so that the other processes are told.
atexit.register(_stop_all)
