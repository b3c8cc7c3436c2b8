"""The schedules bite: versions of the engine that are broken on purpose are caught within the number that CI runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import driven_prefetcher
import driven_queue
import pytest
import scheduler
import schedules
from hypothesis import Phase, given, settings

from jaxprefetch.device import feed
from jaxprefetch.device.actions import Action, Do
from jaxprefetch.device.feed import Feed
from jaxprefetch.device.staged import Sending
from jaxprefetch.device.window import Window
from jaxprefetch.host.bells import Bells
from jaxprefetch.host.inbox import Inbox
from jaxprefetch.host.pipeline import End, Pipeline
from jaxprefetch.host.reader import Reader
from jaxprefetch.prefetcher import DevicePrefetcher
from jaxprefetch.turn import Turn

Break = Callable[[pytest.MonkeyPatch], None]
SUITES = {
    "prefetcher": (schedules.prefetchers, driven_prefetcher.run),
    "queue": (schedules.queues, driven_queue.run),
}


def caught(suite: str) -> tuple[int, BaseException | None]:
    """How many schedules of the suite were run, and the failure that ended it."""
    strategy, run = SUITES[suite]
    count = 0

    @given(case=strategy())
    @settings(max_examples=schedules.IN_CI, derandomize=True, database=None, phases=[Phase.generate])
    def search(case: Any) -> None:
        nonlocal count
        count += 1
        run(case)

    try:
        search()
    except Exception as error:
        return count, error
    return count, None


# ---- the reader


def rings_before_it_looks(patch: pytest.MonkeyPatch) -> None:
    """A wake-up is lost: the consumer looks first and only then says that it waits."""

    def wait(reader: Any, number: int, timeout: float | None) -> bool:
        try:
            while number not in reader.items and not reader._cancelled:
                reader._waited_for = True
                reader._news.get(timeout=None)
        finally:
            reader._waited_for = False
        return True

    patch.setattr(Reader, "wait", wait)


def close_misses_the_consumer(patch: pytest.MonkeyPatch) -> None:
    """`close()` wakes the reader, not the thread that waits in `next()`."""

    def cancel(reader: Any) -> None:
        reader._cancelled = True
        reader._room.put(None)

    patch.setattr(Reader, "cancel", cancel)


def close_misses_the_reader(patch: pytest.MonkeyPatch) -> None:
    """`close()` wakes the consumer, not the reader that waits for room."""

    def cancel(reader: Any) -> None:
        reader._cancelled = True
        reader._news.put(None)

    patch.setattr(Reader, "cancel", cancel)


def reader_is_not_joined(patch: pytest.MonkeyPatch) -> None:
    """`close()` returns while the thread still runs."""
    patch.setattr(Reader, "close", Reader.cancel)


def reads_too_far(patch: pytest.MonkeyPatch) -> None:
    """The reader pulls one batch more than it may."""
    begin = Reader.__init__

    def init(reader: Any, *args: Any, host_size: int, **options: Any) -> None:
        begin(reader, *args, host_size=host_size + 1, **options)

    patch.setattr(Reader, "__init__", init)


def source_is_not_closed(patch: pytest.MonkeyPatch) -> None:
    """A pass that is cut short leaves its iterator open."""
    patch.setattr(Pipeline, "take_iterator", lambda pipeline: setattr(pipeline, "_end", pipeline._end or End()))


def source_is_asked_after_its_end(patch: pytest.MonkeyPatch) -> None:
    """A reader that has read the end asks once more."""
    advance = Pipeline.advance

    def again(pipeline: Any, *args: Any) -> Any:
        item = advance(pipeline, *args)
        if isinstance(item, End) and item.error is None and pipeline.iterator is not None:
            with contextlib.suppress(StopIteration):
                next(pipeline.iterator)
        return item

    patch.setattr(Pipeline, "advance", again)


# ---- the engine


def hands_out_at_once(patch: pytest.MonkeyPatch) -> None:
    """A batch goes out before the next one, which is staged, is put."""
    decide = Window.decide

    def at_once(window: Any) -> Action:
        action = decide(window)
        ready = window.issued > window.taken and window._settled == window.taken
        return (Do.HAND_OUT, window.taken) if action[0] is Do.ISSUE and ready else action

    patch.setattr(Window, "decide", at_once)


def settles_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """The batch handed out last is taken for landed: its slot is written again while it is read."""
    patch.setattr(feed, "wait_landed", lambda arrays: not any(array.is_deleted() for array in arrays))


def slot_is_free_when_it_is_put(patch: pytest.MonkeyPatch) -> None:
    """A slot is given back when its copy is queued."""

    def add(sending: Any, number: int, memory: Any, nbytes: int) -> None:
        memory.free()

    patch.setattr(Sending, "add", add)


def more_batches_than_allowed(patch: pytest.MonkeyPatch) -> None:
    """One batch more than the bound is put."""
    begin = Window.__init__

    def init(window: Any, size: int, **options: Any) -> None:
        begin(window, size + 1, **options)

    patch.setattr(Window, "__init__", init)


def end_overtakes_batches(patch: pytest.MonkeyPatch) -> None:
    """The end is seen before what was staged before it."""
    look = Feed._look

    def early(own: Any) -> None:
        if any(isinstance(item, End) for item in list(own._arrivals.items.values())):
            own.window.end()
        look(own)

    patch.setattr(Feed, "_look", early)


def error_overtakes_batches(patch: pytest.MonkeyPatch) -> None:
    """The source's error is raised when it is seen, before the batches that came before it."""
    look = Feed._look

    def early(own: Any) -> None:
        look(own)
        if own.error is not None:
            raise own.error

    patch.setattr(Feed, "_look", early)


def error_is_told_once(patch: pytest.MonkeyPatch) -> None:
    """A failed put ends the pass as if the source had ended."""
    patch.setattr(Feed, "_fail", lambda own, error: (own._arrivals.items.clear(), own.window.fail()))


def puts_twice(patch: pytest.MonkeyPatch) -> None:
    """A batch is put twice, and the first is kept."""
    issue, kept = Feed._issue, []

    def twice(own: Any, number: int) -> None:
        staged = own._arrivals.items[number - own.first]
        kept[:] = [staged.plan.put(staged.leaves)]
        issue(own, number)

    patch.setattr(Feed, "_issue", twice)


def closing_keeps_what_is_on_its_way(patch: pytest.MonkeyPatch) -> None:
    """A closed prefetcher still holds the batches that it has put."""
    patch.setattr(Feed, "clear", lambda own: own._fences.clear())


def registry_keeps_the_reader(patch: pytest.MonkeyPatch) -> None:
    """A dropped prefetcher is kept by its finaliser: over the reader, the error of the source, and its traceback."""
    begin = DevicePrefetcher.__init__

    def cancel(readers: list[Any]) -> None:
        for reader in list(readers):
            reader.cancel()

    def init(batches: Any, *args: Any, **options: Any) -> None:
        begin(batches, *args, **options)
        weakref.finalize(batches, cancel, batches._readers).atexit = False

    patch.setattr(DevicePrefetcher, "__init__", init)


# ---- the queue


def news_wake_one(patch: pytest.MonkeyPatch) -> None:
    """What is left or taken wakes one thread, which may be another one than it is for."""

    def leave(inbox: Any, room: object, item: Any) -> None:
        with inbox._lock:
            inbox._check_open()
            inbox.items[inbox._left] = item
            inbox._left += 1
            inbox._reserved.discard(room)
            ring_one(inbox)

    def ring_one(inbox: Any) -> None:
        for bell in [*inbox._bells._hung][:1]:
            bell.put(None)

    patch.setattr(Inbox, "leave", leave)
    patch.setattr(Inbox, "changed", ring_one)


def queue_rings_before_it_looks(patch: pytest.MonkeyPatch) -> None:
    """A wake-up is lost: who waits looks first and only then hangs up its bell."""

    def sleep_until(bells: Any, ready: Callable[[], bool], timeout: float | None) -> bool:
        bell = scheduler.SimpleQueue()
        try:
            while not bells._look(ready):
                bells._hung.add(bell)
                bell.get(timeout=timeout)
        except scheduler.Empty:
            return bells._look(ready)
        finally:
            bells._hung.discard(bell)
        return True

    patch.setattr(Bells, "sleep_until", sleep_until)


def taking_wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    """Producers that wait for room are not told of it."""
    patch.setattr(Inbox, "changed", lambda inbox: None)


def room_is_not_reserved(patch: pytest.MonkeyPatch) -> None:
    """Batches that are being staged are not counted, so too many come."""
    patch.setattr(Inbox, "_has_room_or_end", lambda inbox: inbox._closed or inbox._left - inbox._taken < inbox._size)


def room_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    """A `put()` that fails keeps its room."""
    patch.setattr(Inbox, "withdraw", lambda inbox, room: None)


def turn_is_not_released(patch: pytest.MonkeyPatch) -> None:
    """Who waits for its turn is not told that it is free."""
    patch.setattr(Turn, "_give_up", lambda turn, thread: setattr(turn, "_holder", None))


def turn_is_for_everybody(patch: pytest.MonkeyPatch) -> None:
    """Two consumers are in the engine at once."""
    patch.setattr(Turn, "_takes", lambda turn, thread: True)


def close_puts_the_end_itself(patch: pytest.MonkeyPatch) -> None:
    """`close()` says where the end is, even in a finaliser in the middle of `leave()`, which then writes over it."""

    def close(inbox: Any) -> None:
        with inbox._lock:
            if not inbox._closed:
                inbox._closed = True
                inbox.items[inbox._left] = End()
                inbox._bells.ring()

    patch.setattr(Inbox, "close", close)
    patch.setattr(Inbox, "_tell_end", lambda inbox: None)


BROKEN: dict[str, list[Break]] = {
    "prefetcher": [
        rings_before_it_looks,
        close_misses_the_consumer,
        close_misses_the_reader,
        reader_is_not_joined,
        reads_too_far,
        source_is_not_closed,
        source_is_asked_after_its_end,
        hands_out_at_once,
        settles_without_waiting,
        slot_is_free_when_it_is_put,
        more_batches_than_allowed,
        end_overtakes_batches,
        error_overtakes_batches,
        error_is_told_once,
        puts_twice,
        closing_keeps_what_is_on_its_way,
        registry_keeps_the_reader,
    ],
    "queue": [
        news_wake_one,
        queue_rings_before_it_looks,
        taking_wakes_nobody,
        room_is_not_reserved,
        room_is_not_given_back,
        turn_is_not_released,
        turn_is_for_everybody,
        close_puts_the_end_itself,
    ],
}


@pytest.mark.parametrize(
    ("suite", "broken"),
    [pytest.param(suite, broken, id=broken.__name__) for suite, all_of in BROKEN.items() for broken in all_of],
)
def test_a_broken_engine_is_caught(suite: str, broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that was put in is found by the suite."""
    monkeypatch.setattr(scheduler, "FILES", {*scheduler.FILES, __file__})
    broken(monkeypatch)
    count, failure = caught(suite)
    print(f"{broken.__name__}: schedule {count}: {failure!r:.150}")
    assert failure is not None, f"{count} schedules have not found: {broken.__doc__}"
