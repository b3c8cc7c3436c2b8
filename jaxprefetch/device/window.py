"""The window: which batch may go to the devices next, and what `next()` has to wait for.

Everything that decides is here, and nothing else is: no JAX, no thread, no clock. The caller reports facts (a batch is
staged, has been issued, has landed; a fence is done; the source has ended) and asks `decide()` what to do next.

    window = Window(size=2)
    window.stage({"gpu:0": 1024}); window.call()        # next(0)
    window.decide()                     # (Do.ISSUE, 0)

Theory of operation. A GPU client lets a copy into new memory start only when the compute that was enqueued before the
put has finished, a queued copy holds its memory, and memory of a dropped array is reusable at once, in stream order.
So batch k+1 has to be put before step k is dispatched, that is inside the call that returns batch k, and copies must
never pile up. The call that returns batch k therefore

    settles   k-1: waits until it has landed; with `delete_used` its memory is given back here;
    fills     while fewer than k+size are issued, the next is staged and it fits: issues it;
    decides   whether k goes out now or the next batch is worth waiting for. It is while the device is busy, that is
              until the fence of step k-1 is done and k has landed. Handing out earlier gives the lead away; waiting
              longer leaves a ready device idle, and for ever when the source needs the result of step k.

A batch is charged from its issue until it is released, and from its hand-out on also for what that makes of it (`out`);
so it is issued only where every hand-out up to its own will find room. It is released when it has landed and nobody
refers to it; where memory is not handed out in compute order (`released_by="fence"`) and for a batch that the consumer
deleted or donated, also the fence of its step has to be done. What follows: at most `size` batches in flight with
`delete_used`, `size + 1` without, because the consumer's variable holds k-1 until `next(k)` returns.

A Ctrl-C may strike any call: a fact is worked out, then written without a call between; told again, it changes nothing.
"""

from __future__ import annotations

from typing import Literal

from jaxprefetch.device.actions import Action, Do
from jaxprefetch.device.cost import Cost
from jaxprefetch.device.flight import Flight, InFlight


class Window:
    """The batches between the host and the consumer, by number: taken <= issued, at most `size` ahead.

    Args:
        size: how many batches may be issued and not yet taken, counting the one that is about to be.
        delete_used: batch k-1 is given back in `next(k)`.
        max_bytes: the most bytes charged on any one device at any time.
        released_by: `"landing"` where device memory is handed out in compute order (GPU), else `"fence"`.
        inline: the source is pulled by the consumer itself, so staging is never worth waiting for in small steps.

    Raises:
        RuntimeError: for a fact that cannot be true; nothing has changed then.
    """

    def __init__(
        self,
        size: int,
        *,
        delete_used: bool = False,
        max_bytes: int | None = None,
        released_by: Literal["landing", "fence"] = "landing",
        inline: bool = False,
    ):
        self.size = size
        self.delete_used = delete_used
        self.max_bytes = max_bytes
        self.taken = 0
        self.issued = 0
        self.ended = False
        self.cut_by_bytes = 0  # hand-outs with less ahead than `size` allows, because of max_bytes
        self._inline = inline
        self._calling = False
        self._settled = 0  # batches below this have been settled
        self._fenced = -1  # the last step with a fence; fences finish in order
        self._refusals = 0  # times the next batch was refused by the device
        self.source_is_late = False  # a fact: it may wait for host memory of batches that are owed a landing
        self._staged: dict[int, InFlight] = {}  # by number; what has been issued since goes with the next one
        self.next_staged = 0  # number of the next batch to stage
        self._by_fence = released_by == "fence"
        self.flight = Flight(gives_back=delete_used and not self._by_fence)

    # ---- what is so

    @property
    def staged(self) -> int:
        """Batches that could be issued now."""
        return self.next_staged - self.issued

    @property
    def refused(self) -> bool:
        """Whether the device had no memory for the next batch."""
        return self._refusals > 0

    @property
    def in_flight(self) -> int:
        """Batches issued and not released."""
        return len(self.flight.batches)

    @property
    def released(self) -> int:
        """Batches that are not charged any more."""
        return self.issued - self.in_flight

    def has_landed(self, number: int) -> bool:
        """Whether all copies of this batch are known to be done."""
        batch = self.flight.batches.get(number)
        return number < self.issued and (batch is None or batch.landed)

    def cost_of(self, number: int) -> Cost:
        """Bytes of a batch in flight, by device."""
        return self.flight.batches[number].cost

    def shortage(self) -> tuple[int, int, int]:
        """(bytes that the next staged batch needs, bytes charged, those that its hand-out adds); see `Flight`."""
        return self.flight.shortage(self._staged[self.issued])

    # ---- facts

    def call(self) -> None:
        """`next()` was called; calling again after an interrupt continues the same call."""
        self._calling = True

    def stage(self, cost: Cost, *, foreign: bool = False, out: Cost | None = None) -> None:
        """One more batch can be issued; its hand-out adds `out`."""
        if self.ended:
            raise _wrong("a batch was staged after the end")
        number, self.source_is_late = self.next_staged, False
        self._staged[number] = InFlight(cost, out or {}, foreign)
        self.next_staged = number + 1

    def end(self) -> None:
        """The source has ended or failed: what is staged now is all there is."""
        self.ended = True

    def fail(self) -> None:
        """The next staged batch could not be issued, so nothing after it will be either."""
        self.next_staged = self.issued
        self.ended = True

    def restart(self) -> None:
        """A new pass over the source begins; batch numbers go on."""
        if not self.ended or self.staged or self.issued > self.taken:
            raise _wrong("a pass was begun before the last one was over")
        self.ended, self._calling, self.source_is_late = False, False, False

    def issue(self) -> int:
        """The next staged batch has been put; returns its number."""
        number = self.issued
        if not self._calling or not self.staged:
            raise _wrong("no batch is staged")
        if number >= self.taken + self.size or not self._fits():
            raise _wrong("batch %d does not fit", number)
        if self._settled != self.taken:
            raise _wrong("batch %d has not been settled", self._settled)
        batches = self.flight.with_issued(number, self._staged[number])
        self._staged.pop(number - 1, None)
        flight, self._refusals = self.flight, 0
        flight.batches = batches
        self.issued = number + 1
        return number

    def refuse(self) -> None:
        """The device had no memory for the next staged batch."""
        if not self._calling or not self.staged:
            raise _wrong("no batch is staged")
        self._refusals += 1

    def landed(self, number: int) -> None:
        """All of this batch has landed."""
        if number not in self.flight.batches:
            raise _wrong("batch %d is not in flight", number)
        self.flight.landed(number)

    def proved(self, number: int) -> None:
        """A copy that was put after this batch has landed, and so have all up to this batch."""
        if number not in self.flight.batches:
            raise _wrong("batch %d is not in flight", number)
        self.flight.proved(number)

    def settled(self, number: int, *, disposed: bool = False) -> None:
        """The consumer is past this batch: it has landed, or some of it was deleted or donated (`disposed`)."""
        if not self._calling or not number == self._settled < self.taken:
            raise _wrong("batch %d is not the next to settle", number)
        batch = self.flight.batches.get(number)
        if batch is not None:  # else it was told before
            batch.needs_fence = disposed or self._by_fence
            batch.dropped = self.delete_used and not batch.foreign
            if disposed:
                self.flight.release()
            else:
                self.flight.landed(number)
        self._settled = number + 1

    def fence(self, number: int) -> None:
        """A fence was dispatched behind the step of this batch."""
        if not self._fenced < number < self._settled:
            raise _wrong("step %d needs no fence", number)
        self._fenced = number

    def fence_done(self, number: int) -> None:
        """That fence is done, and so are all before it."""
        if not 0 <= number <= self._fenced:
            raise _wrong("step %d has no fence", number)
        self.flight.steps_done(number)

    def hand_out(self) -> int:
        """`next()` returns batch k: from here on the consumer's variable does not hold k-1 any more."""
        k, flight, batch = self.taken, self.flight, self.flight.batches.get(self.taken)
        most = flight.most_with_out(k) if batch else 0
        too_much = self.max_bytes is not None and most > self.max_bytes
        if not batch or not self._calling or self._settled != k or too_much:
            raise _wrong("batch %d cannot be handed out", k)
        short = self.staged > 0 and self.issued < k + self.size
        cut = self.cut_by_bytes + (short and len(flight.batches) < self._limit and not self._fits())
        batches, peak, previous = flight.without_dropped(k - 1), max(flight.peak_bytes, most), flight.batches.get(k - 1)
        if previous is not None:
            previous.dropped = True
        batch.handed_out, flight.batches, flight.peak_bytes = True, batches, peak
        self.cut_by_bytes, self.taken, self._calling = cut, k + 1, False
        return k

    # ---- what to do next

    def decide(self) -> Action:
        """What `next(k)` has to do now, k = `taken`. Asking changes nothing."""
        if not self._calling:
            raise _wrong("decide() outside of a call")
        k, issued = self.taken, self.issued
        if self._settled < k:
            return Do.SETTLE, k - 1
        if self._fenced < k - 1 and (previous := self.flight.batches.get(k - 1)) and previous.needs_fence:
            return Do.FENCE, k - 1
        if issued < k + self.size:
            if self.staged and not self._refusals and self._fits():
                return Do.ISSUE, issued
            if self._inline and not self.staged and not self.ended:
                return Do.AWAIT_SOURCE, issued
        return self._without_batch(k) if issued == k else self._with_batch(k)

    def _without_batch(self, k: int) -> Action:
        """Batch k has not been issued."""
        if not self.staged:
            if self.source_is_late and not self.ended and (owed := self.flight.newest_owed) is not None:
                return Do.PROVE_LANDING, owed
            return (Do.END if self.ended else Do.AWAIT_SOURCE), k
        if (waiting := self._first_waiting()) is not None:
            return waiting
        if self._refusals != 1 or not self._fits():
            return Do.NO_ROOM, k
        if self.flight.done < k - 1:  # refused: once more, when nothing runs that may hold memory
            return (Do.FENCE if self._fenced < k - 1 else Do.AWAIT_FENCE), k - 1
        return Do.ISSUE, k

    def _with_batch(self, k: int) -> Action:
        """Batch k is on its way; is the next one worth waiting for?"""
        hand_out = Do.HAND_OUT, k
        if self.max_bytes is not None and self.flight.most_with_out(k) > self.max_bytes:
            hand_out = self._first_waiting() or hand_out  # there is one: else batch k would not have been issued
        complete = self.issued == k + self.size or (self.ended and not self.staged)
        if complete or k == 0 or self._refusals or (self.flight.done >= k - 1 and self.flight.batches[k].landed):
            return hand_out
        if not self.staged:
            return (Do.FENCE, k - 1) if self._fenced < k - 1 else (Do.AWAIT_STAGED, k)
        waiting = self._first_waiting()
        return waiting if waiting is not None and self._fits(without_waiting=True) else hand_out

    # ---- the rules

    def _first_waiting(self) -> Action | None:
        """What would release the oldest batch that nobody refers to any more."""
        for number, batch in self.flight.batches.items():
            if batch.dropped:
                open_fence = self.flight.waits_for_fence(number, batch)
                return (Do.AWAIT_FENCE if open_fence else Do.PROVE_LANDING), number
        return None

    def _fits(self, *, without_waiting: bool = False) -> bool:
        """Whether the next staged batch may be issued; `without_waiting`: once what only a wait keeps is gone."""
        held = self.flight.referred_to() if without_waiting else self.flight.batches
        if len(held) >= self._limit:
            return False
        if self.max_bytes is None:
            return True
        j = self.issued
        return self.flight.most_to_come(j, self._staged[j], self.taken, held) <= self.max_bytes

    @property
    def _limit(self) -> int:
        """Batches in flight at any time."""
        last = self.flight.batches.get(self.taken - 1)  # the consumer's, until this call returns
        return self.size + (not self.delete_used or (last is not None and last.foreign))


def _wrong(what: str, *numbers: int) -> RuntimeError:
    return RuntimeError("window: " + what % numbers)
