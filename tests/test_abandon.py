"""Prefetchers that are dropped without `close()`."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from gated import LIMIT_S, Counted, Gated, Loader, Watch, batch, number, on_devices, reader_threads, wait

from jaxprefetch import prefetch_to_device

by_host_size = pytest.mark.parametrize("host_size", [0, 4])


def join(threads):
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@by_host_size
def test_dropped_prefetcher_frees_everything(host_size, monkeypatch):
    """Dropping a prefetcher in the middle of a pass ends its thread, closes the source and frees all batches."""
    watch, done = Watch(monkeypatch), threading.Event()

    def source():
        try:
            for i in range(1000):
                yield batch(i, rows=1237)
        finally:
            done.set()

    batches = prefetch_to_device(source(), size=3, host_size=host_size)
    held = next(batches)
    threads, gone = reader_threads(), weakref.ref(batches)
    if host_size:
        watch.wait_reader_idle()
    del batches
    gc.collect()
    assert gone() is None
    join(threads)
    assert done.is_set()
    assert on_devices(1237) == 1
    assert number(held) == 0


def test_loop_left_by_break_leaves_no_thread():
    """A loop over a prefetcher that nothing else refers to ends its thread when it is left."""
    for delivered in prefetch_to_device(Counted()):
        if number(delivered) == 3:
            threads = reader_threads()
            break
    gc.collect()
    join(threads)


def test_dropped_while_its_thread_is_in_the_source():
    """Dropping does not wait for the source; the thread ends when the source gives its batch."""
    source = Gated(let=1)
    batches = prefetch_to_device(source)
    next(batches)
    source.wait_asked(2)
    threads = reader_threads()
    del batches
    gc.collect()
    assert all(thread.is_alive() for thread in threads)
    source.let(1)
    join(threads)
    assert source.asked == 2


def test_dropped_on_its_own_thread():
    """The last reference may go on the reader itself, in the middle of the source: nothing locks up."""
    held, dropped = [], threading.Event()

    def source():
        yield batch(0)
        wait(dropped)
        held.clear()
        gc.collect()
        yield batch(1)

    held.append(prefetch_to_device(source(), size=1))
    next(held[0])
    threads = reader_threads()
    dropped.set()
    join(threads)
    assert not held


def test_dropped_in_a_reference_cycle():
    """A prefetcher in a reference cycle, as a traceback makes it, ends when the cycle is collected."""
    batches = prefetch_to_device(Counted())
    cycle = [batches]
    cycle.append(cycle)
    next(batches)
    threads = reader_threads()
    del batches, cycle
    gc.collect()
    join(threads)


@by_host_size
def test_dropped_after_an_error_of_the_source(host_size):
    """A prefetcher whose source has failed is freed with its batches once it is dropped, as any other."""

    def source():
        yield batch(0, rows=1239)
        raise ValueError("the source is broken")

    batches = prefetch_to_device(source(), host_size=host_size)
    with pytest.raises(ValueError, match="the source is broken"):
        for _ in batches:
            pass
    gone = weakref.ref(batches)
    del batches, _
    gc.collect()
    assert gone() is None
    assert on_devices(1239) == 0


def test_dropped_before_it_started():
    """A prefetcher that was never used goes without a trace."""
    gone = weakref.ref(prefetch_to_device(Loader(3)))
    assert gone() is None
    assert not reader_threads()
