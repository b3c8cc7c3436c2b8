"""Sources that a test holds back and lets go, and the states of threads that it can wait for.

    source = Gated()
    source.wait_asked(3)           # the source has been called for its third batch and holds it back
    source.let(1)                  # one batch may leave
    watch = Watch(monkeypatch)
    watch.wait_reader_idle()       # the reader waits for room: without next() nothing more will happen

Every wait has a limit, far above what it takes, after which the test fails instead of hanging.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
import pytest

import jaxprefetch
from jaxprefetch.device.plan import Plan
from jaxprefetch.host import reader, shelf

LIMIT_S = 20.0


def batch(number: int, rows: int = 4) -> dict[str, np.ndarray]:
    """A batch that can be told by its values."""
    return {"x": np.full(rows, number, np.float32)}


def numbers(batches: Iterable[Any]) -> list[int]:
    """Which batches these are, for batches made by `batch`."""
    return [number(b) for b in batches]


def number(delivered: Any) -> int:
    """Which batch this is; its values have to be all the same."""
    values = np.unique(np.asarray(delivered["x"]))
    assert len(values) == 1, values
    return int(values[0])


def up_to_error(batches: Iterable[Any], kind: type[BaseException], match: str) -> tuple[list[int], BaseException]:
    """Which batches are delivered before the error, and the error."""
    delivered = []
    with pytest.raises(kind, match=match) as caught:
        for b in batches:
            delivered.append(number(b))
    return delivered, caught.value


def refusing(monkeypatch: Any, at: int, error: BaseException, times: int) -> list[int]:
    """`Plan.put` raises `error` so many times when batch `at` is put; returns the numbers of all attempts."""
    put = Plan.put
    attempts: list[int] = []

    def failing(plan: Plan, leaves: Any) -> list[Any]:
        attempts.append(int(leaves[0][0]))
        if attempts[-1] == at and attempts.count(at) <= times:
            raise error
        return put(plan, leaves)

    monkeypatch.setattr(Plan, "put", failing)
    return attempts


class Loader:
    """A loader that can be iterated again; counts its passes."""

    def __init__(self, length: int):
        self.length = length
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return (batch(i) for i in range(self.length))


class Counted:
    """A one-shot iterator without end that counts what was pulled."""

    def __init__(self, length: float = float("inf")):
        self.pulled = 0
        self.length = length

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        if self.pulled >= self.length:
            raise StopIteration
        self.pulled += 1
        return batch(self.pulled - 1)


class Gated:
    """A one-shot iterator that gives a batch only when it is let; it has no `close()`, so nothing else wakes it.

    It is not told when its pass is given up: its last call must be let go before the test ends.
    """

    def __init__(self, let: int = 0):
        self.asked = 0
        self._changed = threading.Condition()
        self._let = let

    def __iter__(self) -> Gated:
        return self

    def __next__(self) -> Any:
        with self._changed:
            self.asked += 1
            mine = self.asked
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._let >= mine, LIMIT_S), "never let"
        return batch(mine - 1)

    def let(self, batches: int) -> None:
        """So many more may leave."""
        with self._changed:
            self._let += batches
            self._changed.notify_all()

    def wait_asked(self, times: int) -> None:
        """Waits until the source has been called so many times."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.asked >= times, LIMIT_S), f"asked {self.asked} times"


class Closable(Gated):
    """A gated iterator whose `close()` wakes it, as a socket's does; then it has ended."""

    def __init__(self, let: int = 0):
        super().__init__(let)
        self.closed = threading.Event()

    def __next__(self) -> Any:
        made = super().__next__()
        if self.closed.is_set():
            raise StopIteration
        return made

    def close(self) -> None:
        self.closed.set()
        self.let(1 << 30)


class Watch:
    """Knows which threads wait at an empty queue of a reader: made before the prefetcher starts."""

    def __init__(self, monkeypatch: Any):
        self._changed = threading.Condition()
        self._waiting: dict[threading.Thread, SimpleQueue[Any]] = {}
        watch = self

        class WatchedQueue(SimpleQueue):
            def put(self, item: Any, *args: Any, **options: Any) -> None:
                with watch._changed:
                    for thread in [t for t, queue in watch._waiting.items() if queue is self]:
                        del watch._waiting[thread]
                    super().put(item)

            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                with watch._changed:
                    if self.empty() and block:
                        watch._waiting[threading.current_thread()] = self
                        watch._changed.notify_all()
                return super().get(block, timeout)

        monkeypatch.setattr(reader, "SimpleQueue", WatchedQueue)
        monkeypatch.setattr(shelf, "SimpleQueue", WatchedQueue)

    def wait_reader_idle(self) -> None:
        """Waits until the reader waits for room: only a consumer can set it going again."""
        self._wait(lambda thread: thread in reader_threads())

    def wait_waits(self, waiting: threading.Thread) -> None:
        """Waits until this thread waits for the reader."""
        self._wait(lambda thread: thread is waiting)

    def _wait(self, wanted: Callable[[threading.Thread], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(wanted, self._waiting)), LIMIT_S), "the thread does not wait"


class InThread(threading.Thread):
    """Runs a function on a thread of its own; `result()` waits for it and gives its value or raises its error."""

    def __init__(self, function: Callable[[], Any]):
        super().__init__(name="test", daemon=True)
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Blocking: until the function is over."""
        self.join(LIMIT_S)
        assert not self.is_alive(), "the thread does not end"
        if self._error is not None:
            raise self._error
        return self._value


def reader_threads() -> list[threading.Thread]:
    """The readers that run."""
    return [thread for thread in threading.enumerate() if thread.name == "jaxprefetch-reader"]


def on_devices(rows: int) -> int:
    """How many arrays of so many rows there are on devices."""
    gc.collect()
    return sum(array.shape == (rows,) for array in jax.live_arrays())


def wait(event: threading.Event) -> None:
    """Waits for an event that has to come."""
    assert event.wait(LIMIT_S), "the event does not come"


def start_python(script: str) -> subprocess.Popen[str]:
    """Starts a script in an interpreter of its own, with the package under test and pipes to its output."""
    root = str(Path(jaxprefetch.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", script],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(script: str) -> tuple[int, str, str]:
    """Runs a script to its end: exit code, output, errors."""
    with start_python(script) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err
