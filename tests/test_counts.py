"""How far ahead of the loop the source is pulled, and what `statistics()` counts."""

from __future__ import annotations

import itertools
import logging
import threading

import jax
import numpy as np
import pytest
from gated import Counted, Gated, InThread, Loader, Watch, batch, number, numbers, reader_threads, wait

from jaxprefetch import prefetch_to_device
from jaxprefetch.device import times
from jaxprefetch.host.reader import Reader

by_size = pytest.mark.parametrize("size", [1, 2, 3, 4])
by_host_size = pytest.mark.parametrize("host_size", [0, 1, 4])


def messages(caplog, text):
    return [record for record in caplog.records if text in record.getMessage()]


# ---- how far ahead


@by_size
def test_inline_pulls_size_at_first_then_one_each(size):
    """Without a thread the first `next()` pulls `size` batches and each later one pulls one."""
    source = Counted()
    with prefetch_to_device(source, size, host_size=0) as batches:
        pulled = [source.pulled]
        for k in range(5):
            assert number(next(batches)) == k
            pulled.append(source.pulled)
        assert pulled == [0, *range(size, size + 5)]
        assert not reader_threads()


@by_size
@pytest.mark.parametrize("host_size", [1, 2, 4])
@pytest.mark.parametrize("hurried_ns", [0, 1 << 62])
def test_reader_stays_host_size_ahead_of_the_window(size, host_size, hurried_ns, monkeypatch):
    """Whenever the reader rests, it has pulled exactly `host_size` batches more than were issued.

    In a loop that hurries more than half of that.
    """
    monkeypatch.setattr(times, "HURRIED_NS", hurried_ns)
    watch, source = Watch(monkeypatch), Counted()
    with prefetch_to_device(source, size, host_size=host_size) as batches:
        batches.start_prefetch()
        watch.wait_reader_idle()
        assert (source.pulled, batches.statistics().issued) == (host_size, 0)
        for k in range(6):
            assert number(next(batches)) == k
            watch.wait_reader_idle()
            issued = batches.statistics().issued
            assert k < issued <= k + size
            if not hurried_ns:
                assert source.pulled == issued + host_size
            assert host_size // 2 < source.pulled - issued <= host_size


def test_max_host_bytes_holds_the_reader_back(monkeypatch):
    """Batches wait on the host within `max_host_bytes`; the reader has one more in its hands and pulls no other.

    Each takes 64 bytes, for leaves start at multiples of these.
    """
    watch, source = Watch(monkeypatch), Counted()
    with prefetch_to_device(source, host_size=8, max_host_bytes=2 * 64) as batches:
        batches.start_prefetch()
        watch.wait_reader_idle()
        assert source.pulled == 3
        assert numbers(itertools.islice(batches, 20)) == list(range(20))


@by_host_size
def test_one_batch_always_gets_through_max_host_bytes(host_size):
    """A limit smaller than any batch lets them through one by one."""
    with prefetch_to_device(Loader(7), 3, host_size=host_size, max_host_bytes=1) as batches:
        assert numbers(batches) == list(range(7))


@by_size
@pytest.mark.parametrize("limit", [1, 64, 100, 200])
@pytest.mark.parametrize("use", ["delete", "donate"])
def test_batches_that_the_loop_disposes_of_hold_nothing_back(size, limit, use):
    """A reader that waits for the host memory of batches that were deleted or donated gets it."""
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    taken = []
    with prefetch_to_device(Loader(6), size, max_host_bytes=limit) as batches:
        for delivered in batches:
            taken.append(number(delivered))
            delivered["x"].delete() if use == "delete" else double(delivered["x"])
    assert taken == list(range(6))


# ---- what is counted


@by_size
@by_host_size
@pytest.mark.parametrize("delete_used", [False, True], ids=["keep", "delete_used"])
def test_counts_agree(size, host_size, delete_used):
    """After every batch the counts fit together and nothing has been above its bound."""
    nbytes = batch(0)["x"].nbytes
    with prefetch_to_device(Loader(9), size, host_size=host_size, delete_used=delete_used) as batches:
        taken = 0
        for _ in range(2):
            for _ in batches:
                taken += 1
                now = batches.statistics()
                assert now.taken == taken
                assert now.taken <= now.issued <= min(now.taken + size - 1, now.pulled)
                assert now.issued == now.released + now.in_flight
                assert 1 <= now.in_flight <= now.peak_in_flight <= now.bound == size + (not delete_used)
                assert now.bytes_in_flight == now.in_flight * nbytes
                assert now.peak_bytes_in_flight == now.peak_in_flight * nbytes <= now.bytes_bound
        end = batches.statistics()
    assert end.pulled == end.issued == end.taken == 18
    assert end.kept_by_consumer == 0


def test_statistics_outlive_close():
    """Closing keeps the counts and adds nothing to them."""
    batches = prefetch_to_device(Loader(5))
    list(batches)
    before = batches.statistics()
    batches.close()
    batches.close()
    assert batches.statistics().pulled == before.pulled == 5
    assert batches.statistics().taken == 5


def test_kept_batches_are_counted_and_said_once(caplog):
    """Batches that the loop keeps are counted beside the bound, and one warning tells of them."""
    with prefetch_to_device(Loader(12)) as batches:
        kept = list(batches)
        assert batches.statistics().kept_by_consumer == 11
        del kept[:6]
        assert batches.statistics().kept_by_consumer == 5
        assert batches.statistics().peak_in_flight <= batches.statistics().bound
    assert len(messages(caplog, "the loop still holds batch 0 at batch 3")) == 1
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_kept_batch_of_an_earlier_pass_is_told_as_one(caplog):
    """It has no number in this pass."""
    with prefetch_to_device([batch(i) for i in range(4)]) as batches:
        first, *_ = batches
        assert numbers(batches) == [0, 1, 2, 3]
    assert number(first) == 0
    assert len(messages(caplog, "the loop still holds")) == 1


def test_a_batch_looked_back_on_is_not_said(caplog):
    """A loop that holds the batch before last, as many do for a moment, is not warned."""
    with prefetch_to_device(Loader(8)) as batches:
        previous = None
        for delivered in batches:
            if previous is not None:
                assert number(previous) == number(delivered) - 1
            previous = delivered
    assert not messages(caplog, "still holds")


def test_statistics_while_another_thread_waits_in_next():
    """`statistics()` answers from any thread while `next()` waits for the source."""
    source, seen = Gated(let=1), threading.Event()
    with prefetch_to_device(source) as batches:
        assert number(next(batches)) == 0
        waiting = InThread(lambda: (seen.set(), next(batches))[1])
        wait(seen)
        source.wait_asked(2)
        assert batches.statistics().taken == 1
        assert isinstance(batches.statistics().verdict, str)
        source.let(100)
        assert np.asarray(waiting.result()["x"])[0] == 1


def test_news_that_nobody_waited_for_is_no_news_later(monkeypatch):
    """After many batches that were there in time, a wait for the source is one wait, not one for each of them."""
    watch, source, waits = Watch(monkeypatch), Gated(let=300), []
    wait_for_news = Reader.wait
    monkeypatch.setattr(Reader, "wait", lambda *args: (waits.append(args), wait_for_news(*args))[1])
    with prefetch_to_device(source) as batches:
        batches.start_prefetch()
        for k in range(300):
            if k < 290:
                watch.wait_reader_idle()
            assert number(next(batches)) == k
        waits.clear()
        waiting = InThread(lambda: next(batches))
        watch.wait_waits(waiting)
        source.let(1000)
        assert number(waiting.result()) == 300
    assert len(waits) <= 20
