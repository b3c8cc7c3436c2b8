"""`DeviceQueue` under arbitrary histories, against a plain list; and many threads at once.

HYPOTHESIS_PROFILE=full sends 100,000 batches through it.
"""

from __future__ import annotations

import collections
import os
import threading
from queue import Empty, Full
from typing import Any

import jax
import numpy as np
import pytest
from gated import InThread, batch, number
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import DeviceQueue

BATCHES = 100_000 if os.environ.get("HYPOTHESIS_PROFILE") == "full" else 4_000
SPLIT = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data"))


class Model(RuleBasedStateMachine):
    """One thread puts and takes without waiting; a list knows what has to come."""

    @initialize(size=st.integers(1, 4), split=st.booleans(), capped=st.booleans())
    def make(self, size: int, split: bool, capped: bool) -> None:
        self.size = size
        self.queue = DeviceQueue(size, sharding=SPLIT if split else None, max_bytes=2 * 16 if capped else None)
        self.waiting: list[int] = []
        self.made, self.closed = 0, False
        self.held: Any = None

    @rule()
    def put(self) -> None:
        self.made += 1
        if self.closed:
            with pytest.raises(ValueError, match="put: this queue is closed"):
                self.queue.put(batch(self.made), 0)
        elif len(self.waiting) == self.size:
            with pytest.raises(Full):
                self.queue.put(batch(self.made), 0)
        else:
            self.queue.put(batch(self.made), 0)
            self.waiting.append(self.made)

    @rule()
    def put_what_does_not_belong(self) -> None:
        wrong = {"x": np.ones((4, 2), np.float32)} if self.made else {"x": "text"}
        if self.made and not (self.waiting or self.held):
            return  # it would be the first
        with pytest.raises((ValueError, TypeError, Full)):
            self.queue.put(wrong, 0)

    @rule()
    def get(self) -> None:
        if self.waiting:
            self.held = self.queue.get(0)
            assert number(self.held) == self.waiting.pop(0)
        else:
            with pytest.raises(EOFError if self.closed else Empty):
                self.queue.get(0)

    @rule()
    def clear(self) -> None:
        self.queue.clear()
        self.waiting.clear()

    @precondition(lambda self: self.made > 6)
    @rule()
    def close(self) -> None:
        self.queue.close()
        self.closed = True

    @invariant()
    def it_is_as_the_list_is(self) -> None:
        if hasattr(self, "queue"):
            assert len(self.queue) == len(self.waiting)
            assert self.queue._feed.window.in_flight <= self.size + 1
            assert self.held is None or number(self.held)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            self.queue.close()
            assert [number(b) for b in self.queue] == self.waiting


TestModel = Model.TestCase
TestModel.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("size", [1, 4])
def test_many_threads_lose_nothing(size: int) -> None:
    """4 producers, 2 consumers: every batch comes once, and those of a producer in its order."""
    producers, consumers, each = 4, 2, BATCHES // 4
    queue, seen = DeviceQueue(size), [[] for _ in range(consumers)]

    def produce(producer: int) -> None:
        buffer = np.empty(2, np.int32)
        for n in range(each):
            buffer[:] = producer, n
            queue.put({"x": buffer})

    def consume(own: list[Any]) -> None:
        for got in queue:
            own.append(tuple(np.asarray(got["x"]).tolist()))

    takers = [InThread(lambda own=own: consume(own)) for own in seen]
    makers = [InThread(lambda p=p: produce(p)) for p in range(producers)]
    for thread in makers:
        threading.Thread.join(thread)
        thread.result()
    queue.close()
    for thread in takers:
        threading.Thread.join(thread)
        thread.result()
    counts = collections.Counter(pair for own in seen for pair in own)
    assert counts == {(producer, n): 1 for producer in range(producers) for n in range(each)}
    for own in seen:
        for producer in range(producers):
            numbers = [n for p, n in own if p == producer]
            assert numbers == sorted(numbers)
    assert len(queue) == 0


def test_threads_that_clear_and_close_end_well() -> None:
    """While others put and take, clearing loses batches but neither doubles nor reorders, and all threads end."""
    queue, seen = DeviceQueue(3), []

    def produce() -> None:
        for n in range(1, 10**9):
            try:
                queue.put(batch(n))
            except ValueError:  # closed
                return

    def consume() -> None:
        for got in queue:
            seen.append(number(got))

    threads = [InThread(produce), InThread(consume)]
    for _ in range(50):
        queue.clear()
    while len(seen) < 50:
        queue.clear()
    queue.close()
    for thread in threads:
        thread.result()
    assert seen == sorted(set(seen))
