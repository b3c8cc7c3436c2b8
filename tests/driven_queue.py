"""One run of a `DeviceQueue` under the scheduler: its producers, its consumers, who closes it, and what has to hold.

    run(QueueCase(producers=(("wait", "wait"),), consumers=(("wait",),), closers=(("close", 1),)))

Raises AssertionError with the schedule when a batch that was accepted is lost, doubled or out of order, when somebody
hangs, or when a thread, a slot or an array is left.
"""

from __future__ import annotations

import collections
import gc
from dataclasses import dataclass, field
from queue import Empty, Full
from typing import Any, Literal

import jax
import numpy as np
import pytest
from driven_prefetcher import check_value, logged, number
from scheduler import Choices, Scheduler
from simulated import Device, Fault

from jaxprefetch import DeviceQueue
from jaxprefetch.device.completion import prepare_fence

ROWS = 4
BATCH_BYTES = 4 * ROWS
EACH = 100
"""Batches of a producer are numbered from this times its own number on."""

Put = Literal["wait", "try", "patient", "no array", "other shape"]
Get = Literal["wait", "try", "patient", "keep", "delete"]
Closing = Literal["close", "clear", "exit"]


@dataclass(frozen=True)
class QueueCase:
    """A queue and all that happens to it.

    Attributes:
        on: real arrays of the CPU's, or a simulated device and what releases a batch there.
        device_fault: see `Device`.
        producers: what each puts, and how long it waits for room.
        consumers: what each does with the batch that it takes; then it ends, or goes on to the end of the queue.
        closers: threads, what each does and after how many batches were taken.
        struck_at: the point at which a finaliser closes, on whatever thread is there.
    """

    on: Literal["cpu", "landing", "fence"] = "landing"
    size: int = 2
    capped: bool = False
    copiers: bool = False
    slow_copies: bool = False
    device_fault: Fault = ""
    device_at: int = 0
    producers: tuple[tuple[Put, ...], ...] = (("wait", "wait"),)
    consumers: tuple[tuple[Get, ...], ...] = ((),)
    to_the_end: bool = True
    closers: tuple[tuple[Closing, int], ...] = ()
    struck_at: int = 0
    choices: Choices = field(default_factory=Choices)

    @property
    def cleared(self) -> bool:
        """Whether batches may be dropped."""
        return any(closing != "close" for closing, _ in self.closers)


class Run:
    """What happens in one run, and what has been seen."""

    def __init__(self, case: QueueCase, scheduler: Scheduler, device: Device):
        self.case, self.scheduler, self.device = case, scheduler, device
        most = max(len(case.consumers), 1) + 1
        self.queue: Any = DeviceQueue(case.size, max_bytes=most * BATCH_BYTES if case.capped else None)
        self.accepted: list[list[int]] = [[] for _ in case.producers]
        self.taken: list[list[int]] = [[] for _ in case.consumers]
        self.held: list[Any] = [None for _ in case.consumers]
        self.kept: list[Any] = []
        self.putting = self.getting = 0  # threads that wait for as long as it takes
        device.kept = lambda: sum(not any(batch is held for held in self.held) for batch in self.kept)

    # ---- threads

    def produce(self, producer: int) -> None:
        """A producer's thread."""
        buffer = np.zeros(ROWS, np.float32)
        for n, put in enumerate(self.case.producers[producer]):
            number = buffer[:] = EACH * producer + n
            try:
                self._put(put, buffer)
            except Full:
                assert put != "wait"
            except ValueError as error:
                if "this queue" not in str(error) and put != "other shape":
                    raise
            except TypeError:
                assert put == "no array"
            else:
                assert put != "no array"
                self.accepted[producer].append(number)
                assert len(self.queue) <= self.case.size, f"{len(self.queue)} batches in a queue of {self.case.size}"
            buffer[:] = -1

    def _put(self, put: Put, buffer: np.ndarray) -> None:
        batch: Any = {"x": buffer}
        if put == "no array":
            batch = {"x": "text"}
        elif put == "other shape" and any(self.accepted):
            batch = {"x": np.zeros((2, 2), np.float32)}
        timeout = {"try": 0.0, "patient": 0.01}.get(put)
        self.putting += timeout is None
        try:
            self.queue.put(batch, timeout)
        finally:
            self.putting -= timeout is None

    def consume(self, consumer: int) -> None:
        """A consumer's thread."""
        for get in self.case.consumers[consumer]:
            if not self.take(consumer, get):
                break
        else:
            while self.case.to_the_end and self.take(consumer, "wait"):
                pass
        self.held[consumer] = None

    def take(self, consumer: int, get: Get) -> bool:
        """Takes a batch; False at the end."""
        timeout = {"try": 0.0, "patient": 0.01}.get(get)
        self.getting += timeout is None
        try:
            batch = self.queue.get(timeout)
        except Empty:
            assert timeout is not None
            return True
        except EOFError:
            return False
        except Exception as error:
            if error is not self.device.error:
                raise
            return False
        finally:
            self.getting -= timeout is None
        self.taken[consumer].append(number(batch))
        self.held[consumer] = batch
        if get == "keep":
            self.kept.append(batch)
        elif get == "delete":
            batch["x"].delete()
        return True

    def close_at(self, closing: Closing, taken: int) -> None:
        """A closer's thread."""
        self.scheduler.wait(lambda: sum(map(len, self.taken)) >= taken, 3600.0)
        self.close(closing)

    def close(self, closing: Closing) -> None:
        """Twice, for the second changes nothing."""
        for _ in range(2):
            if closing == "close":
                self.queue.close()
            elif closing == "clear":
                self.queue.clear()
            else:
                self.queue.__exit__(None, None, None)

    def take_the_rest(self) -> None:
        """What nobody has taken, once it is closed."""
        self.taken.append([])
        self.held.append(None)
        while self.take(len(self.taken) - 1, "wait"):
            pass
        self.held[-1] = None

    # ---- what has to hold

    def check_waits(self) -> None:
        """Who waits has a reason."""
        closed = self.queue._inbox._closed and (self.getting or self.putting)  # now: a strike may come in what follows
        left = len(self.queue)
        assert not closed, "a thread waits though it is closed"
        assert not (self.getting and left), f"get() waits though {left} batches are there"
        assert not (self.putting and left < self.case.size), f"put() waits though there is room: {left} are there"

    def check_taken(self) -> None:
        """Nothing is lost, doubled or out of order."""
        counts = collections.Counter(n for own in self.taken for n in own)
        accepted = collections.Counter(n for own in self.accepted for n in own)
        assert not counts - accepted, f"taken {self.taken}, accepted {self.accepted}"
        lossy = self.case.cleared or self.case.device_fault not in ("", "memory once")
        assert lossy or counts == accepted, f"taken {self.taken}, accepted {self.accepted}"
        for own in self.taken:
            for producer in range(len(self.accepted)):
                numbers = [n for n in own if n // EACH == producer]
                assert numbers == sorted(numbers), f"taken {own}"

    def check_closed(self) -> None:
        """Closed is closed, and the batches that consumers have are what they were."""
        assert not self.queue._inbox._reserved, "room is reserved for nobody"
        with pytest.raises(ValueError, match="this queue"):
            self.queue.put({"x": np.zeros(ROWS, np.float32)}, 0)
        if self.case.device_fault in ("", "memory once"):
            assert len(self.queue) == 0
            with pytest.raises(EOFError, match="this queue is closed"):
                self.queue.get(0)
            for batch in self.kept:
                check_value(batch, number(batch))

    def drop(self) -> None:
        """Everybody goes."""
        self.device.error = None
        self.scheduler.strikes.clear()
        self.kept.clear()
        self.held.clear()
        self.queue = None
        gc.collect()


def run(case: QueueCase) -> Scheduler:
    """Runs it, and checks what has to hold."""
    prepare_fence(jax.devices()[:1])
    before = len(jax.live_arrays())
    with logged() as messages, Scheduler(case.choices).installed() as scheduler:
        device = Device(
            scheduler,
            fault=case.device_fault,
            at=case.device_at,
            bound=case.size + 2 * max(len(case.consumers), 1) - 1,  # while each of the others replaces its batch
            copiers=case.copiers,
            slow_copies=case.slow_copies,
        )
        with device.installed(None if case.on == "cpu" else case.on):
            one = Run(case, scheduler, device)
            _drive(one)
            one.check_taken()
            one.check_closed()
            one.drop()
            scheduler.wait(lambda: True, idle=True)
            assert not scheduler.left(), f"threads are left: {scheduler.left()}"
            device.check_empty()
            assert not device.pinned, f"{device.pinned} slots are still registered"
            assert len(jax.live_arrays()) == before, f"{len(jax.live_arrays()) - before} arrays are left"
    assert not any("failed" in message for message in messages), messages
    return scheduler


def _drive(one: Run) -> None:
    case, scheduler = one.case, one.scheduler
    if case.struck_at:
        scheduler.strikes[case.struck_at] = one.queue.close
    for n in range(len(case.consumers)):
        scheduler.spawn(f"consumer {n}", lambda n=n: one.consume(n))
    for n in range(len(case.producers)):
        scheduler.spawn(f"producer {n}", lambda n=n: one.produce(n))
    for n, (closing, taken) in enumerate(case.closers):
        scheduler.spawn(f"closer {n}", lambda closing=closing, taken=taken: one.close_at(closing, taken))
    scheduler.wait(lambda: True, what="waits for the end", idle=True)
    one.check_waits()
    scheduler.spawn("last closer", lambda: one.close("close"))
    scheduler.wait(lambda: True, what="waits until it is closed", idle=True)
    assert not scheduler.left(), f"{scheduler.left()} do not end when the queue is closed"
    scheduler.spawn("last consumer", one.take_the_rest)
    scheduler.wait(lambda: True, what="waits until all have ended", idle=True)
