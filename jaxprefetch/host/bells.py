"""Threads that wait for each other's news, and lose none, whatever strikes and wherever.

Synopsis:

    bells = Bells()
    bells.sleep_until(lambda: items, timeout=1.0)    # whether it holds, asked under bells.lock
    items.append(1); bells.ring()                    # those who wait look again

Python's `Condition` is not for this: its methods are Python's, and a Ctrl-C or a finaliser that strikes in them leaves
its lock taken, or a waiter that is not noted yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue


class Bells:
    """One for each thread that waits: a `SimpleQueue`, whose `put` is reentrant.

    Attributes:
        lock: held while somebody looks; taken by `with` only, which a Ctrl-C cannot tear apart.

    Thread safety: all of it for any thread; `ring`, which needs no lock, for finalisers, too.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._hung: set[SimpleQueue[None]] = set()  # each call on it is one of C's

    def sleep_until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Whether `ready()`, under the lock, holds within so many seconds. Blocking: that long, without the lock.

        No news is missed: 1. who waits hangs up its bell, 2. looks, 3. sleeps until it rings. Who has news 1. writes
        it, 2. rings all bells. A finaliser may do that on the thread that waits, between any two of its steps: between
        the look and the sleep of a `Condition`, whose waiter is not noted yet, its news would be lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        bell: SimpleQueue[None] = SimpleQueue()
        try:
            self._hung.add(bell)
            while not self._look(ready):
                bell.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            return True
        except Empty:
            return self._look(ready)
        finally:
            self._hung.discard(bell)

    def ring(self) -> None:
        """Those who wait look again. Never blocks."""
        for bell in self._hung.copy():
            bell.put(None)

    def _look(self, ready: Callable[[], bool]) -> bool:
        with self.lock:
            return ready()
