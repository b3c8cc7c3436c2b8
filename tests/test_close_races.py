"""`close()` while another thread, the reader or the source is in the middle of something."""

from __future__ import annotations

import threading

import pytest
from gated import LIMIT_S, Closable, Counted, Gated, InThread, Loader, Watch, batch, numbers, reader_threads, wait

from jaxprefetch import DevicePrefetcher, prefetch_to_device, reading
from jaxprefetch.host import reader
from jaxprefetch.host.pipeline import Pipeline

LEFT_BEHIND = "is left behind; it closes the source when it wakes"


def test_close_from_another_thread_ends_a_waiting_next(monkeypatch, caplog):
    """A `next()` that waits for the source ends when another thread closes."""
    watch, source = Watch(monkeypatch), Closable(let=1)
    batches = prefetch_to_device(source)
    next(batches)
    waiting = InThread(lambda: next(batches, "ended"))
    watch.wait_waits(waiting)
    batches.close()
    assert waiting.result() == "ended"
    assert LEFT_BEHIND not in caplog.text


@pytest.mark.parametrize("host_size", [0, 4])
def test_close_from_inside_the_source(host_size, caplog):
    """A source may close the prefetcher that pulls from it: the loop ends and its `finally` runs, without complaint."""
    done = threading.Event()

    def source():
        try:
            yield batch(0)
            batches.close()
            yield batch(1)
        finally:
            done.set()

    batches = prefetch_to_device(source(), size=1, host_size=host_size)
    assert numbers(batches) in ([], [0])
    wait(done)
    assert not caplog.records


def test_close_of_an_inline_pull_from_another_thread(caplog):
    """Closing while another thread is inside the generator lets that call end, then the generator is closed."""
    inside, done, gate = threading.Event(), threading.Event(), threading.Event()

    def source():
        try:
            inside.set()
            wait(gate)
            yield batch(0)
        finally:
            done.set()

    batches = prefetch_to_device(source(), host_size=0)
    pulling = InThread(lambda: next(batches, "ended"))
    wait(inside)
    batches.close()
    gate.set()
    assert pulling.result() == "ended"
    wait(done)
    assert not caplog.records


def test_two_threads_close_at_once(monkeypatch):
    """A `close()` in the middle of another one finds nothing left to do, and the counts stay what they are."""
    batches = prefetch_to_device(Counted())
    next(batches)
    during, close_reader = [], reader.Reader.close

    def closing(self):
        if not during:
            during.append(batches.statistics())
            InThread(batches.close).result()
        close_reader(self)

    monkeypatch.setattr(reader.Reader, "close", closing)
    batches.close()
    assert 1 <= during[0].taken <= during[0].issued <= during[0].pulled <= batches.statistics().pulled


@pytest.mark.parametrize("begin", [lambda batches: next(batches, None), DevicePrefetcher.start_prefetch])
def test_close_while_a_pass_begins(begin, monkeypatch):
    """A prefetcher that is closed by another thread just when it starts its own leaves no thread behind."""

    class Slow(reader.Reader):
        def __init__(self, *args, **options):
            InThread(batches.close).result()
            super().__init__(*args, **options)

    monkeypatch.setattr(reading, "Reader", Slow)
    batches = prefetch_to_device(Counted(100))
    begin(batches)
    left = reader_threads()
    batches.close()
    assert not left


def test_close_while_the_thread_starts(monkeypatch):
    """A `close()` by another thread, between the making of ours and its start, fails nowhere and leaves nothing."""
    start = threading.Thread.start

    def starting(thread):
        if thread.name == "jaxprefetch-reader":
            InThread(batches.close).result()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    batches = prefetch_to_device(Counted(100))
    assert next(batches, "ended") == "ended"
    for thread in reader_threads():
        thread.join(LIMIT_S)
    assert not reader_threads()


def test_thread_that_cannot_be_started_is_an_error_and_no_more(monkeypatch):
    """Where the system refuses a thread `next()` raises that; it can be called again, and closed."""
    start, refused = threading.Thread.start, []

    def starting(thread):
        if thread.name == "jaxprefetch-reader" and not refused:
            refused.append(True)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    with prefetch_to_device(Loader(3)) as batches:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(batches)
        assert not reader._live
        assert InThread(lambda: numbers(batches)).result() == [0, 1, 2]


def test_next_while_another_thread_closes_has_ended(monkeypatch):
    """`next()` in the middle of `close()` has ended; it is not mistaken for a second consumer."""
    batches = prefetch_to_device(Loader(9))
    next(batches)
    feed, seen = type(batches._feed), []
    clear = feed.clear

    def next_elsewhere():
        try:
            seen.append(next(batches, "ended"))
        except RuntimeError as error:
            seen.append(error)

    def clearing(self):
        if not seen:
            InThread(next_elsewhere).result()
        clear(self)

    monkeypatch.setattr(feed, "clear", clearing)
    batches.close()
    assert seen == ["ended"]


def test_source_that_blocks_for_ever_is_left_behind(caplog, monkeypatch):
    """`close()` gives up on a thread stuck in its source and says so; when it wakes it closes the source and ends."""
    monkeypatch.setattr(reader, "CLOSE_SECONDS", 0.1)
    entered, gate, done = threading.Event(), threading.Event(), threading.Event()

    def source():
        try:
            entered.set()
            wait(gate)
            yield batch(0)
        finally:
            done.set()

    batches = prefetch_to_device(source())
    batches.start_prefetch()
    wait(entered)
    batches.close()
    assert f"the reader is stuck in the source, for batch 0 and {LEFT_BEHIND}" in caplog.text
    assert not done.is_set()
    gate.set()
    wait(done)


def test_source_that_its_close_wakes_is_not_left_behind(caplog):
    """The `close()` of an iterator that is no generator is called from outside when the reader is stuck in it."""
    source = Closable()
    batches = prefetch_to_device(source)
    batches.start_prefetch()
    source.wait_asked(1)
    batches.close()
    assert source.closed.is_set()
    assert not reader_threads()
    assert LEFT_BEHIND not in caplog.text


def test_loader_that_is_closed_from_outside_is_not_opened_again(monkeypatch):
    """A thread that was late, but not in its source, when `close()` closed that from outside, opens no new pass."""
    monkeypatch.setattr(reader, "CLOSE_SECONDS", 0.1)
    opened, late, gate = [], threading.Event(), threading.Event()
    ask = Pipeline._ask

    class Pass(Counted):
        def close(self):
            pass

    class Passes:
        def __iter__(self):
            opened.append(Pass())
            return opened[-1]

    def asking(pipeline, number, call, *args):
        if number == 1 and not late.is_set():
            late.set()
            wait(gate)
        return ask(pipeline, number, call, *args)

    monkeypatch.setattr(Pipeline, "_ask", asking)
    batches = prefetch_to_device(Passes())
    batches.start_prefetch()
    wait(late)
    threads = reader_threads()
    batches.close()
    gate.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(opened) == 1


def test_source_whose_close_blocks_too_is_left_behind(caplog, monkeypatch):
    """A source that blocks in both `next()` and `close()` does not block ours."""
    monkeypatch.setattr(reader, "CLOSE_SECONDS", 0.1)
    gate = threading.Event()

    class Blocked(Gated):
        def close(self):
            wait(gate)

    source = Blocked()
    batches = prefetch_to_device(source)
    batches.start_prefetch()
    source.wait_asked(1)
    batches.close()
    assert LEFT_BEHIND in caplog.text
    source.let(1)
    gate.set()
