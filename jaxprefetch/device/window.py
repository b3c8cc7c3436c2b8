"""The window: which batch may go to the devices next, and what `next()` has to wait for.

Everything that decides is here, and nothing else is: no JAX, no thread, no clock. The caller reports facts (a batch is
staged, has been issued, has landed; a fence is done; the source has ended) and asks `decide()` what to do next.

    window = Window(size=2)
    window.stage({"gpu:0": 1024})
    window.call()                       # next(0) has been called
    window.decide()                     # Action(do=Do.ISSUE, batch=0)
    window.issue()
    window.decide()                     # Action(do=Do.HAND_OUT, batch=0)
    window.hand_out()

Theory of operation. A GPU client lets a copy into new memory start only when the compute that was enqueued before the
put has finished, a queued copy holds its memory, and memory of a dropped array is reusable at once, in stream order.
So batch k+1 has to be put before step k is dispatched, that is inside the call that returns batch k, and copies must
never pile up. The call that returns batch k therefore

    settles   k-1: waits until it has landed; with `delete_used` its memory is given back here;
    fills     while fewer than k+size are issued, the next is staged and it fits: issues it;
    decides   whether k goes out now or the next batch is worth waiting for. It is while the device is busy, that is
              until the fence of step k-1 is done and k has landed. Handing out earlier gives the lead away; waiting
              longer leaves a ready device idle, and for ever when the source needs the result of step k.

A batch is charged from its issue until it is released. It is released when it has landed and nobody refers to it;
where memory is not handed out in compute order (`released_by="fence"`) and for a batch that the consumer deleted or
donated, also the fence of its step has to be done. What follows: at most `size` batches in flight with `delete_used`,
`size + 1` without, because the consumer's variable holds k-1 until `next(k)` returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, NamedTuple

Cost = Mapping[Hashable, int]
"""Bytes of one batch by device."""


class Do(Enum):
    """What the caller has to do next; each says which fact to report afterwards."""

    SETTLE = auto()  # wait until the batch has landed, or find it deleted or donated: settled(batch, disposed=...)
    ISSUE = auto()  # put the batch: issue(), or refuse() when the device has no memory for it
    FENCE = auto()  # dispatch a fence behind the step of this batch: fence(batch)
    AWAIT_FENCE = auto()  # wait for that fence: fence_done(batch)
    PROVE_LANDING = auto()  # wait until a batch put after this one, or a marker, has landed: proved(batch)
    AWAIT_SOURCE = auto()  # wait until the source has delivered or ended: stage() or end()
    AWAIT_STAGED = auto()  # look at the fence of step batch-1 and at the landing of batch, then wait a little for both
    HAND_OUT = auto()  # return the batch: hand_out()
    END = auto()  # the source has ended or failed, and everything before that has been handed out
    NO_ROOM = auto()  # the batch is needed and can never fit: an error


class Action(NamedTuple):
    do: Do
    batch: int


@dataclass(slots=True)
class _Batch:
    cost: Cost
    foreign: bool  # holds arrays of the source's own: never deleted by us, its landing proves nothing of others
    landed: bool = False
    dropped: bool = False  # no reference is left, as far as can be known
    disposed: bool = False  # the consumer deleted or donated some of it


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
        self.released = 0
        self.ended = False
        self.peak_batches = 0
        self.peak_bytes = 0
        self.cut_by_bytes = 0  # hand-outs with less ahead than `size` allows, because of max_bytes
        self._by_fence = released_by == "fence"
        self._inline = inline
        self._calling = False
        self._settled = 0  # batches below this have been settled
        self._fenced = -1  # the last step with a fence; fences finish in order
        self._done = -1  # the last step whose fence is done
        self._refusals = 0  # times the next batch was refused by the device
        self._staged: deque[tuple[Cost, bool]] = deque()
        self._flight: dict[int, _Batch] = {}  # issued and not released, in order
        self._bytes: dict[Hashable, int] = {}  # charged now, by device

    # ---- what is so

    @property
    def staged(self) -> int:
        """Batches that could be issued now."""
        return len(self._staged)

    @property
    def in_flight(self) -> int:
        """Batches issued and not released."""
        return len(self._flight)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes charged on the fullest device."""
        return max(self._bytes.values(), default=0)

    def shortage(self) -> tuple[int, int]:
        """(bytes that the next staged batch needs, bytes charged) on the device where they are most together."""
        cost, _ = self._staged[0]
        return max(((n, self._bytes.get(d, 0)) for d, n in cost.items()), key=sum, default=(0, 0))

    # ---- facts

    def call(self) -> None:
        """`next()` was called; calling again after an interrupt continues the same call."""
        self._calling = True

    def stage(self, cost: Cost, *, foreign: bool = False) -> None:
        """One more batch can be issued."""
        self._legal(not self.ended, "a batch was staged after the end")
        self._staged.append((cost, foreign))

    def end(self) -> None:
        """The source has ended or failed: what is staged now is all there is."""
        self.ended = True

    def fail(self) -> None:
        """The next staged batch could not be issued, so nothing after it will be either."""
        self._staged.clear()
        self.ended = True

    def restart(self) -> None:
        """A new pass over the source begins; batch numbers go on."""
        self._legal(
            self.ended and not self._staged and self.issued == self.taken,
            "a pass was begun before the last one was over",
        )
        self.ended, self._calling = False, False

    def issue(self) -> int:
        """The next staged batch has been put; returns its number."""
        self._legal(self._calling and bool(self._staged), "no batch is staged")
        self._legal(self.issued < self.taken + self.size and self._fits(), "batch %d does not fit", self.issued)
        self._legal(self._settled == self.taken, "batch %d has not been settled", self._settled)
        cost, foreign = self._staged.popleft()
        number = self.issued
        self._flight[number] = _Batch(cost, foreign)
        self.issued, self._refusals = number + 1, 0
        for device, n in cost.items():
            self._bytes[device] = self._bytes.get(device, 0) + n
        self.peak_batches = max(self.peak_batches, len(self._flight))
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_flight)
        return number

    def refuse(self) -> None:
        """The device had no memory for the next staged batch."""
        self._legal(self._calling and bool(self._staged), "no batch is staged")
        self._refusals += 1

    def landed(self, number: int) -> None:
        """All of this batch has landed."""
        batch = self._flight.get(number)
        self._legal(batch is not None, "batch %d is not in flight", number)
        assert batch is not None
        batch.landed = True
        if not batch.foreign:
            for other in range(min(self._flight), number):
                earlier = self._flight.get(other)
                if earlier is not None and earlier.cost.keys() <= batch.cost.keys():
                    earlier.landed = True
        self._release()

    def proved(self, number: int) -> None:
        """A copy that was put after this batch has landed, and so have all up to this batch."""
        self._legal(number in self._flight, "batch %d is not in flight", number)
        proven = self._flight[number].cost.keys()
        for other, batch in self._flight.items():
            batch.landed = batch.landed or (other <= number and batch.cost.keys() <= proven)
        self._release()

    def settled(self, number: int, *, disposed: bool = False) -> None:
        """The consumer is past this batch: it has landed, or some of it was deleted or donated (`disposed`)."""
        self._legal(
            self._calling and number == self._settled < self.taken, "batch %d is not the next to settle", number
        )
        batch = self._flight[number]
        self._settled = number + 1
        batch.disposed = disposed
        batch.dropped = self.delete_used and not batch.foreign
        if disposed:
            self._release()
        else:
            self.landed(number)

    def fence(self, number: int) -> None:
        """A fence was dispatched behind the step of this batch."""
        self._legal(self._fenced < number < self._settled, "step %d needs no fence", number)
        self._fenced = number

    def fence_done(self, number: int) -> None:
        """That fence is done, and so are all before it."""
        self._legal(0 <= number <= self._fenced, "step %d has no fence", number)
        self._done = max(self._done, number)
        self._release()

    def hand_out(self) -> int:
        """`next()` returns batch k: from here on the consumer's variable does not hold k-1 any more."""
        k = self.taken
        self._legal(self._calling and self.issued > k and self._settled == k, "batch %d cannot be handed out", k)
        if self._staged and self.issued < k + self.size and self._within_count() and not self._within_bytes():
            self.cut_by_bytes += 1
        if k - 1 in self._flight:
            self._flight[k - 1].dropped = True
        self.taken, self._calling = k + 1, False
        self._release()
        return k

    # ---- what to do next

    def decide(self) -> Action:
        """What `next(k)` has to do now, k = `taken`. Asking changes nothing."""
        self._legal(self._calling, "decide() outside of a call")
        k = self.taken
        if self._settled < k:
            return Action(Do.SETTLE, k - 1)
        previous = self._flight.get(k - 1)
        if previous is not None and self._needs_fence(previous) and self._fenced < k - 1:
            return Action(Do.FENCE, k - 1)
        if self.issued < k + self.size:
            if self._staged and not self._refusals and self._fits():
                return Action(Do.ISSUE, self.issued)
            if self._inline and not self._staged and not self.ended:
                return Action(Do.AWAIT_SOURCE, self.issued)
        return self._without_batch(k) if self.issued == k else self._with_batch(k)

    def _without_batch(self, k: int) -> Action:
        """Batch k has not been issued."""
        if not self._staged:
            return Action(Do.END if self.ended else Do.AWAIT_SOURCE, k)
        if (waiting := self._first_waiting()) is not None:
            return waiting
        if self._refusals != 1 or not self._fits():
            return Action(Do.NO_ROOM, k)
        if self._done < k - 1:  # refused: once more, when nothing runs that may hold memory
            return Action(Do.FENCE if self._fenced < k - 1 else Do.AWAIT_FENCE, k - 1)
        return Action(Do.ISSUE, k)

    def _with_batch(self, k: int) -> Action:
        """Batch k is on its way; is the next one worth waiting for?"""
        complete = self.issued == k + self.size or (self.ended and not self._staged)
        if complete or k == 0 or self._refusals or (self._done >= k - 1 and self._flight[k].landed):
            return Action(Do.HAND_OUT, k)
        if not self._staged:
            return Action(Do.FENCE, k - 1) if self._fenced < k - 1 else Action(Do.AWAIT_STAGED, k)
        waiting = self._first_waiting()
        if waiting is not None and self._fits(without_waiting=True):
            return waiting
        return Action(Do.HAND_OUT, k)

    # ---- the rules

    def _needs_fence(self, batch: _Batch) -> bool:
        return self._by_fence or batch.disposed

    def _fence_open(self, number: int, batch: _Batch) -> bool:
        return self._needs_fence(batch) and self._done < number

    def _first_waiting(self) -> Action | None:
        """What would release the oldest batch that nobody refers to any more."""
        for number, batch in self._flight.items():
            if batch.dropped:
                fenced = self._fence_open(number, batch)
                return Action(Do.AWAIT_FENCE if fenced else Do.PROVE_LANDING, number)
        return None

    def _fits(self, *, without_waiting: bool = False) -> bool:
        return self._within_count(without_waiting) and self._within_bytes(without_waiting)

    def _within_count(self, without_waiting: bool = False) -> bool:
        held = self._flight.get(self.taken - 1)  # by the consumer, until this call returns
        limit = self.size + (not self.delete_used or (held is not None and held.foreign))
        count = len(self._flight)
        if without_waiting:
            count -= sum(batch.dropped for batch in self._flight.values())
        return count < limit

    def _within_bytes(self, without_waiting: bool = False) -> bool:
        if self.max_bytes is None:
            return True
        cost, _ = self._staged[0]
        for device, n in cost.items():
            n += self._bytes.get(device, 0)
            if without_waiting:
                n -= sum(batch.cost.get(device, 0) for batch in self._flight.values() if batch.dropped)
            if n > self.max_bytes:
                return False
        return True

    def _release(self) -> None:
        done = [n for n, b in self._flight.items() if b.dropped and b.landed and not self._fence_open(n, b)]
        for number in done:
            self.released += 1
            for device, n in self._flight.pop(number).cost.items():
                self._bytes[device] -= n

    def _legal(self, condition: bool, what: str, *numbers: int) -> None:
        if not condition:
            raise RuntimeError("window: " + what % numbers)
