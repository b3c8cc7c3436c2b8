"""Processes that end while a prefetcher is at work, and how they end: the matrix, and what runs it.

    python tests/exits.py                        # a table with the time from the beginning of the exit to its end
    python tests/exits.py spawn SIGINT           # of the cases that have these words

Each case is a way to end, what the library is doing then, who takes the batches, and which processes make them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
LIMIT_S = 60.0
"""After this a process counts as hanging, and is killed."""

WAYS = {
    "end": (0, ""),
    "exception": (1, "KeyError: 'mine'"),
    "sys.exit": (3, ""),
    "SIGINT": (-signal.SIGINT, "KeyboardInterrupt"),
    "SIGTERM": (-signal.SIGTERM, ""),
    "SIGTERM, handled": (4, ""),
}
"""Exit code and last line of the errors: nothing else may be said but a traceback that ends with it."""

PLACES = {
    "reader waits for room": "batches = prefetch(numbered()); next(batches); begin()",
    "reader pulls": "batches = prefetch(stuck()); next(batches); asked.wait(); begin()",
    "reader copies": "batches = prefetch(large(), host_size=1); batches.start_prefetch(); asked.wait(); begin()",
    "source uses JAX": "batches = prefetch(jitted()); train(batches); begin()",
    "no reader": "batches = prefetch(numbered(), host_size=0); train(batches); begin()",
    "several": "many = [prefetch(stuck()) for _ in range(4)]; [next(batches) for batches in many]; begin()",
    "main waits": "main_waits = True; take_two_and_wait(prefetch(stuck()))",
    "caller waits": "caller(lambda: take_all(prefetch(stuck()))); taken.wait(); begin()",
    "caller copies": "caller(lambda: next(prefetch(large(), host_size=0))); asked.wait(); begin()",
    "caller trains": "caller(lambda: train(prefetch(numbered()), 10**9)); asked.wait(); begin()",
    "caller ends later": "caller(until_main_has_ended, daemon=False); asked.wait(); begin()",
    "queue: get waits": "queue = DeviceQueue(2); caller(lambda: take(queue)); asked.wait(); begin()",
    "queue: put waits": "queue = DeviceQueue(2); caller(lambda: fill(queue)); asked.wait(); begin()",
}
"""What the library is doing then; a caller is another thread that takes batches, a daemon unless it ends later."""

WITH_WORKERS = {
    "workers": "batches = prefetch(workers); train(batches); begin()",
    "workers wait": "workers.most = 2; batches = prefetch(workers); next(batches); workers.stuck.wait(); begin()",
    "workers and main wait": "workers.most = 2; workers.tell = tell_when_taken; take_two_and_wait(prefetch(workers))",
}
"""The same, with a source whose batches come from worker processes."""

SCRIPT = """
import itertools, signal, sys, threading, time
import numpy as np
WAY, METHOD = {way!r}, {method!r}
if METHOD:  # before there are threads, which a fork would cut off
    from exits import Workers
    workers = Workers(METHOD)
import jax
from jaxprefetch import DeviceQueue, prefetch_to_device as prefetch

asked, taken = threading.Event(), threading.Event()
main_waits = False
signal.signal(signal.SIGINT, signal.default_int_handler)
if WAY == "SIGTERM, handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))

def tell():
    print(time.monotonic_ns(), flush=True)

def begin():  # the exit
    tell()
    if WAY == "exception":
        raise KeyError("mine")
    if WAY == "sys.exit":
        sys.exit(3)
    while WAY != "end":  # a signal that comes right before a wait without an end would not wake it
        threading.Event().wait(0.05)

def numbered():
    for i in itertools.count():
        if i == 30:
            asked.set()
        yield {{"x": np.full(100_000, i, np.float32)}}

def stuck(before=None):
    yield from itertools.islice(before or numbered(), 2)
    asked.set()
    if main_waits:
        tell_when_taken()
    threading.Event().wait()

def tell_when_taken():  # what is compiled for the first batch may run code that has Python forget of a Ctrl-C
    taken.wait()
    tell()

def take_two_and_wait(batches):
    next(batches), next(batches)
    taken.set()
    next(batches)

class Large:
    def __array__(self, dtype=None, copy=None):
        asked.set()
        return zeros

zeros = np.zeros(1 << 28, np.uint8)

def large():
    while True:
        yield {{"x": Large()}}

def jitted():
    make = jax.jit(lambda i: jax.numpy.full(100_000, i))
    for i in itertools.count():
        yield {{"x": make(np.float32(i))}}

def train(batches, steps=20):
    step = jax.jit(lambda x: (x @ x).sum())
    for k, batch in enumerate(batches):
        result = step(batch["x"])
        if k == steps:
            return result

def fill(queue):
    queue.put(np.ones(3))
    queue.put(np.ones(3))
    asked.set()
    queue.put(np.ones(3))

def take(queue):
    asked.set()
    queue.get()

def take_all(batches):
    for k, batch in enumerate(batches):
        if k == 1:
            taken.set()

def until_main_has_ended():
    batches = prefetch(numbered())
    next(batches)
    asked.set()  # from Python 3.12 on no thread starts once the main one has ended
    threading.main_thread().join()
    train(batches)

def caller(function, daemon=True):
    threading.Thread(target=function, daemon=daemon).start()

"""


class Workers:
    """A loader with worker processes in the manner of PyTorch's: daemons, and queues between them and the caller."""

    def __init__(self, method: str):
        context = multiprocessing.get_context(method)
        self._asked, self._made = context.Queue(), context.Queue()
        self._processes = [context.Process(target=_work, args=(self._asked, self._made), daemon=True) for _ in range(2)]
        for process in self._processes:
            process.start()
        self._count, self.most = 0, float("inf")
        self.stuck, self.tell = threading.Event(), lambda: None

    def __iter__(self) -> Workers:
        return self

    def __next__(self) -> dict:
        self._count += 1
        if self._count <= self.most:
            self._asked.put(self._count)
        else:  # for ever
            self.stuck.set()
            self.tell()
        return {"x": self._made.get()}


def _work(asked: multiprocessing.Queue, made: multiprocessing.Queue) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent
    while True:
        made.put(np.full(100_000, asked.get(), np.float32))


@dataclass(frozen=True)
class Case:
    """One process."""

    way: str
    place: str
    method: str = ""  # how worker processes start, if there are some

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.way, self.place, self.method]))


@dataclass(frozen=True)
class Ended:
    """How it ended."""

    code: int | None  # None: it had to be killed
    errors: str
    seconds: float  # from the beginning of the exit


def cases() -> list[Case]:
    """All of them."""
    made = [Case(way, place) for place in PLACES for way in _ways(place)]
    methods = "fork", "spawn"
    return made + [Case(way, place, method) for method in methods for place in WITH_WORKERS for way in _ways(place)]


def some() -> list[Case]:
    """Each place once, with worker processes once for each way to start them; the ways take turns."""
    grouped: dict[tuple[str, str], list[Case]] = {}
    for case in cases():
        grouped.setdefault((case.place, case.method), []).append(case)
    return [group[i % len(group)] for i, group in enumerate(grouped.values())]


def _ways(place: str) -> list[str]:
    """A process that is killed while it does something of its own tells nothing about us, but for one that waits."""
    if "main wait" in place:
        return ["SIGTERM, handled", "SIGINT", "SIGTERM"][: 3 if place in PLACES else 2]
    return [way for way in WAYS if way != "SIGTERM"]


def run(case: Case) -> Ended:
    """Runs one to its end."""
    script = SCRIPT.format(way=case.way, method=case.method) + (PLACES | WITH_WORKERS)[case.place]
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if case.way.startswith("SIG"):
            process.send_signal(signal.Signals[case.way.partition(",")[0]])
        try:
            _, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler tells where its threads are
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            os.killpg(process.pid, signal.SIGKILL)  # with workers, which have the pipes, too
            _, errors = process.communicate()
            return Ended(None, errors, LIMIT_S)
    began = int(line) if line.isdigit() else time.monotonic_ns()
    return Ended(process.returncode, errors, (time.monotonic_ns() - began) / 1e9)


def run_all(chosen: list[Case]) -> dict[Case, Ended]:
    """Several at a time: most of each is spent importing JAX."""
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2))) as pool:
        return dict(zip(chosen, pool.map(run, chosen), strict=True))


def complaint(case: Case, ended: Ended) -> str | None:
    """What is wrong with how it ended; None where nothing is."""
    code, last = WAYS[case.way]
    if ended.code != code:
        return f"exit code {ended.code}, expected {code}: {ended.errors}"
    lines = ended.errors.rstrip().splitlines()
    if not last:
        return ended.errors or None
    if not lines or lines[-1] != last or sum("Traceback" in line for line in lines) != 1:
        return ended.errors
    return None if lines[0].startswith("Traceback") else ended.errors


def main() -> int:
    """Prints the table; returns the exit status."""
    chosen = [case for case in cases() if all(word in str(case) for word in sys.argv[1:])]
    bad = 0
    print(f"Python {sys.version.split()[0]}")
    for case, ended in run_all(chosen).items():
        wrong = complaint(case, ended)
        bad += wrong is not None
        print(f"{ended.seconds:6.2f} s  {case}" + (f"  WRONG: {wrong}" if wrong else ""))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
