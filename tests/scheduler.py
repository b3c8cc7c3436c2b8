"""A deterministic scheduler for tests: exactly one thread runs at a time, and a list of choices says which one goes on.

    with Scheduler(choices).installed() as scheduler:
        thread = scheduler.spawn("consumer", consume)      # a thread; it runs when it is chosen
        scheduler.wait(lambda: thread.done)                # this thread goes on when that is so
    print(scheduler.trace())

While it is installed, the library's modules in `DRIVEN` have locks, queues, threads and clocks of the scheduler's.
Every acquire, release, wait, notify, put, get, start, join and, in those modules, every line is a point at which
another thread may go on. Time is virtual: that a wait runs out is one more choice, and costs nothing. What a simulated
device does by itself (`moves`) is a choice, too. The same choices give the same run.

Choices are `Choices(preempt, turns)`. `preempt` has pairs (points to let pass, which other one then goes on); `turns`
says who goes on when the running thread is blocked. Where they end, threads run until they block, and in turn; with
`rate`, dice that were thrown once for all (`seed`) go on choosing.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from jaxprefetch import prefetcher, queue, turn
from jaxprefetch.device import feed, times
from jaxprefetch.host import bells, copying, inbox, inline, pipeline, reader, shelf

MOST_POINTS = 60_000
"""So many in one run: somebody runs in circles."""

SLICE_POINTS = 2_000
"""So many by one thread that never waits: then another goes on, as an operating system would have it."""

POINT_NS = 100
"""What the virtual clock moves on at each point."""


@dataclass(frozen=True)
class Choices:
    """Who goes on, where there is a choice."""

    preempt: tuple[tuple[int, int], ...] = ()
    turns: tuple[int, ...] = ()
    rate: float = 0.0  # how many of the points are chosen after these
    seed: int = 0


class Hang(AssertionError):
    """No thread can go on, or they go on for ever."""


class _Killed(BaseException):
    """Ends a thread of a run that is over."""


class _Actor:
    """A thread as the scheduler sees it."""

    def __init__(self, name: str):
        self.name = name
        self.baton = threading.Lock()  # free for the one thread that may run
        self.baton.acquire()
        self.ready: Callable[[], bool] | None = None  # None: it can go on
        self.deadline: int | None = None
        self.expired = self.done = self.killed = False
        self.idle = False  # waits until nothing else can happen
        self.ident = 0
        self.at: Any = "start"

    def can_run(self) -> bool:
        return not self.done and (self.ready is None or (not self.idle and self.ready()))


class Scheduler:
    """Runs threads one at a time; made on the test's thread, which is the first of them.

    Args:
        choices: see the module.
        spins: whether a thread may run for long without waiting for anything.

    Attributes:
        now: the virtual clock, in nanoseconds.
        moves: functions that give what a device could do now by itself: pairs (what, function).
        strikes: by number of a point, what runs there, on whatever thread has come to it, as finalisers do.
    """

    def __init__(self, choices: Choices = Choices(), *, spins: bool = True):
        self.now = 0
        self._spins = spins
        self._running = self._slices = 0  # points since the last wait; slices that were used up
        self.points = 0
        self.moves: list[Callable[[], list[tuple[str, Callable[[], None]]]]] = []
        self.strikes: dict[int, Callable[[], None]] = {}
        self._preempt = iter(choices.preempt)
        self._turns = iter(choices.turns)
        self._dice = random.Random(choices.seed)
        self._rate = choices.rate
        self._gap, self._pick = self._next_preemption()
        self._main = self._me = _Actor("test")
        self._actors = [self._main]
        self._failure: BaseException | None = None
        self._log: list[tuple[str, str, str]] = []
        self._over = False

    # ---- for tests

    @contextlib.contextmanager
    def installed(self) -> Iterator[Scheduler]:
        """The library's modules are driven inside; threads that are left at the end are ended."""
        global _current
        collects = gc.isenabled()
        gc.disable()  # it would run finalisers at places that nobody has chosen
        gc.freeze()  # and collecting what is there already takes longer than a run
        with pytest.MonkeyPatch.context() as patch:
            for module, names in DRIVEN.items():
                for name, value in names.items():
                    patch.setattr(module, name, value)
            _current = self
            try:
                yield self
            except Exception as error:
                error.add_note(self.trace())
                raise
            finally:
                self._end()
                _current = None
                gc.unfreeze()
                if collects:
                    gc.enable()

    def spawn(self, name: str, function: Callable[[], object]) -> Thread:
        """A thread that runs this; what it raises ends the run, as an error of the test's thread."""
        thread = Thread(target=function, name=name, daemon=True)
        thread.start()
        return thread

    def wait(
        self,
        ready: Callable[[], bool],
        timeout: float | None = None,
        what: str = "waits",
        *,
        idle: bool = False,
    ) -> bool:
        """Whether `ready()` holds, within so many virtual seconds; others run meanwhile.

        Args:
            idle: goes on only when nothing else can happen, be it ready or not.
        """
        self.point(what)
        if not idle and (ready() or (timeout is not None and timeout <= 0)):
            return ready()
        me = self._me
        if self._over:
            raise _Killed
        me.ready, me.idle, me.at, me.expired = ready, idle, what, False
        me.deadline = None if timeout is None else self.now + int(timeout * 1e9)
        self._block()
        me.ready, me.deadline, me.idle = None, None, False
        return ready()

    def point(self, what: Any) -> None:
        """Another thread may go on here."""
        if self._over:
            return
        self.now += POINT_NS
        self.points += 1
        if self.points > MOST_POINTS:
            self.fail(Hang(f"{MOST_POINTS} points and no end: threads run in circles\n{self._stacks()}"))
        self._running += 1
        if self._running > SLICE_POINTS:
            self._used_up(what)
        if self.strikes and (strike := self.strikes.pop(self.points, None)) is not None:
            self._note("is struck", what)
            strike()
        if self._gap == 0:
            pick = self._pick
            self._gap, self._pick = self._next_preemption()
            self._preempted(pick, what)
        elif self._gap > 0:
            self._gap -= 1

    def fail(self, error: BaseException) -> None:
        """Ends the run with this error, whatever thread has found it."""
        self._failure = self._failure or error
        self._give_to(self._main)
        raise _Killed

    def note(self, what: str) -> None:
        """A line for the trace."""
        self._log.append((self._me.name, what, ""))

    def left(self) -> list[str]:
        """Threads that have not ended, but for those of a copier that wait for work: they end when nobody has it."""
        open_ends = [actor for actor in self._actors[1:] if not actor.done]
        return [actor.name for actor in open_ends if (actor.name, actor.at) != ("jaxprefetch-copy", "get")]

    def trace(self) -> str:
        """What has happened, a line for each change of threads."""
        return "\n".join(["the schedule:", *(f"  {who:<20} {what:<28} {where}" for who, what, where in self._log)])

    @property
    def log(self) -> list[tuple[str, str, str]]:
        """The same, as it can be compared."""
        return list(self._log)

    # ---- who goes on

    def _next_preemption(self) -> tuple[int, int]:
        """(points to let pass, which other one then goes on); (-1, 0): never again."""
        if (chosen := next(self._preempt, None)) is not None:
            return chosen
        if not self._rate:
            return -1, 0
        return int(self._dice.expovariate(self._rate)), self._dice.randrange(8)

    def _preempted(self, pick: int, what: Any) -> None:
        me = self._me
        actors = self._after(me, lambda actor: actor.can_run())
        moves, timers = self._moves(), self._timers()
        if not (options := len(actors) + len(moves) + len(timers)):
            return
        pick %= options
        if len(actors) <= pick < len(actors) + len(moves):
            self._move(*moves[pick - len(actors)])
            return
        self._note("is preempted", what)
        me.at = _place(what)  # not the frame, which would keep all that it refers to
        self._give_to(actors[pick] if pick < len(actors) else self._expire(timers[pick - len(actors) - len(moves)]))

    def _used_up(self, what: Any) -> None:
        if not self._spins:
            self.fail(Hang(f"{self._me.name} runs in circles instead of waiting\n{self._stacks()}"))
        self._running, self._slices = 0, self._slices + 1
        self._preempted(self._slices, what)

    def _block(self) -> None:
        """This thread cannot go on: others do until it can."""
        me, self._running = self._me, 0
        self._note("ends" if me.done else "is blocked", "" if me.done else me.at)
        while True:
            actors = self._after(me, lambda actor: actor.can_run(), with_me=True)
            moves, timers = self._moves(), self._timers()
            options = len(actors) + len(moves) + len(timers)
            if not options:
                idle = [actor for actor in self._actors if actor.idle and not actor.done]
                if not idle:
                    self.fail(Hang(f"no thread can go on\n{self._stacks()}"))
                self._give_to(idle[0])
                return
            pick = next(self._turns, self._dice.randrange(options) if self._rate else 0) % options
            if len(actors) <= pick < len(actors) + len(moves):
                self._move(*moves[pick - len(actors)])
                continue
            chosen = actors[pick] if pick < len(actors) else self._expire(timers[pick - len(actors) - len(moves)])
            self._give_to(chosen)
            return

    def _after(self, me: _Actor, wanted: Callable[[_Actor], bool], with_me: bool = False) -> list[_Actor]:
        """The others, beginning with the one after me; me last."""
        at = self._actors.index(me)
        others = [*self._actors[at + 1 :], *self._actors[:at], *([me] if with_me else [])]
        return [actor for actor in others if wanted(actor)]

    def _timers(self) -> list[_Actor]:
        """Waits that could run out, the earliest first."""
        timed = [actor for actor in self._actors if actor.deadline is not None and not actor.done and actor.ready]
        return sorted((actor for actor in timed if not actor.can_run()), key=lambda actor: actor.deadline or 0)

    def _expire(self, actor: _Actor) -> _Actor:
        self.now = max(self.now, actor.deadline or 0)
        self._log.append((actor.name, "has waited long enough", str(actor.at)))
        return actor

    def _moves(self) -> list[tuple[str, Callable[[], None]]]:
        return [move for moves in self.moves for move in moves()]

    def _move(self, what: str, function: Callable[[], None]) -> None:
        self._log.append(("device", what, ""))
        try:
            function()
        except Exception as error:  # is not for the thread that happened to be chosen
            self.fail(error)

    def _give_to(self, actor: _Actor) -> None:
        me = self._me
        if actor is not me:
            self._me = actor
            actor.baton.release()
            if me.done:
                return
            me.baton.acquire()
        if me.killed:
            raise _Killed
        if self._failure is not None and me is self._main:
            failure, self._failure = self._failure, None
            raise failure

    # ---- threads

    def _begin(self, thread: Thread) -> None:
        """On the thread that starts another."""
        self._actors.append(thread.actor)

    def _run(self, thread: Thread, body: Callable[[], None]) -> None:
        """On the thread itself, from its first moment on."""
        actor = thread.actor
        actor.baton.acquire()
        actor.ident = threading.get_ident()
        try:
            if not actor.killed:
                sys.settrace(self._trace)
                body()
        except _Killed:
            pass
        except BaseException as error:
            if self._failure is None:
                self._failure = Hang(f"{actor.name} has failed with {error!r}")
                self._failure.__cause__ = error
            self._main.ready, self._main.idle = None, False
        sys.settrace(None)
        actor.done = True
        if self._over or self._failure is not None:
            self._give_to(self._main)
        else:
            with contextlib.suppress(_Killed):
                self._block()

    def _end(self) -> None:
        """Ends threads that are left, one after another, and the run."""
        self._over = True
        self.strikes = {}
        for actor in self._actors[1:]:
            if not actor.done:
                actor.killed = True
                self._me, self._main.killed = actor, False
                actor.baton.release()
                self._main.baton.acquire()
        self._me = self._main

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in FILES else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.point(frame)
        return self._line

    # ---- what is said

    def _note(self, what: str, where: Any) -> None:
        self._log.append((self._me.name, what, _place(where)))

    def _stacks(self) -> str:
        frames, text = sys._current_frames(), []
        for actor in self._actors:
            if not actor.done and actor is not self._main and actor.ident in frames:
                stack = traceback.extract_stack(frames[actor.ident])
                lines = [line for line in stack if "jaxprefetch" in line.filename or "/tests/" in line.filename]
                own = [line for line in lines if line.filename != __file__]
                text += [f"{actor.name} {_place(actor.at)}", *traceback.format_list(own[-6:])]
        return "".join(line if line.endswith("\n") else line + "\n" for line in text)


def _place(where: Any) -> str:
    if hasattr(where, "f_code"):
        return f"{where.f_code.co_filename.rpartition('/')[2]}:{where.f_lineno} in {where.f_code.co_name}"
    return str(where)


_current: Scheduler | None = None


def _point(what: str) -> None:
    if _current is not None:
        _current.point(what)


def _wait(ready: Callable[[], bool], timeout: float | None, what: str) -> bool:
    return ready() if _current is None else _current.wait(ready, timeout, what)


# ---- what the library gets in place of threading, queue and time


class Thread(threading.Thread):
    """A thread that runs when it is chosen."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.actor = _Actor(self.name)
        self._begun = False

    @property
    def done(self) -> bool:
        return self.actor.done

    def start(self) -> None:
        if _current is None:
            raise RuntimeError("can't start a new thread outside of a run")
        self._scheduler, self._begun = _current, True
        self._scheduler._begin(self)
        super().start()
        _point(f"start of {self.name}")

    def run(self) -> None:
        self._scheduler._run(self, super().run)

    def join(self, timeout: float | None = None) -> None:
        _wait(lambda: self.actor.done, timeout, f"join of {self.name}")

    def is_alive(self) -> bool:
        return self._begun and not self.actor.done


class Lock:
    """As `threading.Lock`."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        free = _wait(lambda: not self._held, (None if timeout < 0 else timeout) if blocking else 0, "acquire")
        self._held = self._held or free
        return free

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        _point("release")

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """As `threading.RLock`."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._count = 0

    def acquire(self) -> bool:
        me = threading.get_ident()
        _wait(lambda: self._owner in (None, me), None, "acquire")
        self._owner, self._count = me, self._count + 1
        return True

    def release(self) -> None:
        if self._owner != threading.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
        _point("release")

    def let_go(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        return count

    def take_back(self, count: int) -> None:
        me = threading.get_ident()
        _wait(lambda: self._owner is None, None, "acquire")
        self._owner, self._count = me, count

    def is_mine(self) -> bool:
        return self._owner == threading.get_ident()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class _Told:
    so = False


class Condition:
    """As `threading.Condition`."""

    def __init__(self, lock: RLock | None = None):
        self._lock = lock or RLock()
        self._waiters: deque[_Told] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        self._check()
        _point("wait of a condition, before it is noted")  # Python's own is struck there, too
        told = _Told()
        self._waiters.append(told)
        count = self._lock.let_go()
        try:
            return _wait(lambda: told.so, timeout, "wait of a condition")
        finally:
            if not told.so:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(told)
            self._lock.take_back(count)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else Clock.perf_counter() + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - Clock.perf_counter()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        self._check()
        for _ in range(min(n, len(self._waiters))):
            self._waiters.popleft().so = True

    def notify_all(self) -> None:
        self.notify(len(self._waiters))

    def _check(self) -> None:
        if not self._lock.is_mine():
            raise RuntimeError("cannot use un-acquired lock")


class SimpleQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def __class_getitem__(cls, _: Any) -> type[SimpleQueue]:
        return cls

    def put(self, item: Any) -> None:
        self._items.append(item)
        _point("put")

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not _wait(lambda: bool(self._items), timeout if block else 0, "get"):
            raise Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Clock:
    """As `time`."""

    @staticmethod
    def perf_counter_ns() -> int:
        return _current.now if _current is not None else 0

    @staticmethod
    def perf_counter() -> float:
        return Clock.perf_counter_ns() / 1e9

    monotonic = perf_counter


THREADING = SimpleNamespace(
    Thread=Thread, Lock=Lock, RLock=RLock, Condition=Condition, current_thread=threading.current_thread
)

DRIVEN: dict[Any, dict[str, Any]] = {
    reader: {"threading": THREADING, "time": Clock, "SimpleQueue": SimpleQueue},
    inline: {"threading": THREADING},
    pipeline: {"time": Clock},
    bells: {"threading": THREADING, "time": Clock, "SimpleQueue": SimpleQueue},
    turn: {"threading": THREADING},
    prefetcher: {"threading": THREADING},
    queue: {"time": Clock},
    copying: {"threading": THREADING, "SimpleQueue": SimpleQueue},
    shelf: {"SimpleQueue": SimpleQueue},
    feed: {"time": Clock},
    times: {"time": Clock},
}
"""Modules of the library, and what they get."""

FILES = {module.__file__ for module in (reader, shelf, pipeline, inline, bells, inbox, turn, prefetcher, queue, feed)}
"""Whose every line is a point: what threads share without a lock is there."""
