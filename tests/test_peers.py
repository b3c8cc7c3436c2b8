"""What other prefetchers do wrong, seen on the real ones, and that ours does not.

Each pair of tests is one behaviour. The first half documents the peer as it is installed: when it fails, the peer has
changed, for the better as we hope, and the claim in README has to go.
"""

from __future__ import annotations

import gc
import itertools
import threading
import types
import weakref

import grain
import jax
import pytest
from flax import jax_utils
from flax.training import prefetch_iterator
from gated import LIMIT_S, Closable, Counted, Gated, InThread, batch, number, numbers, reader_threads, up_to_error, wait

from jaxprefetch import prefetch_to_device


class DiskGone(Exception):
    """An error of the source's own."""


def breaks_after(good):
    yield from map(batch, range(good))
    raise DiskGone("gone")


def flax_prefetch(source, size=2):
    """flax's function wants a leading axis of devices; one device here."""
    device = jax.devices()[:1]
    shards = source if isinstance(source, list) else ({"x": b["x"][None]} for b in source)
    return jax_utils.prefetch_to_device(shards, size, devices=device)


@pytest.fixture
def flax_iterator():
    """flax's `PrefetchIterator`, without its deprecation warning, and closed at the end."""
    made = []

    def make(source, buffer_size=1):
        with pytest.warns(DeprecationWarning, match="PrefetchIterator is deprecated"):
            iterator = prefetch_iterator.PrefetchIterator(source, buffer_size)
        made.append((weakref.ref(iterator), iterator._thread))
        return iterator

    yield make
    for alive, thread in made:
        if alive() is not None:
            alive().close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


class GrainSource(grain.IterDataset):
    """A Grain dataset over any iterator."""

    def __init__(self, iterator):
        super().__init__()
        self._iterator = iterator

    def __iter__(self):
        return GrainIterator(self._iterator)


class GrainIterator(grain.DatasetIterator):
    def __init__(self, iterator):
        super().__init__()
        self._iterator = iterator

    def __next__(self):
        return next(self._iterator)

    def get_state(self):
        return {}

    def set_state(self, state):
        raise NotImplementedError


def grain_prefetch(source, size=2):
    dataset = GrainSource(source)
    return iter(grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=size))


class BreaksAtFirst(Counted):
    """Fails for its batch 1 and would go on after that."""

    def __next__(self):
        made = super().__next__()
        if number(made) == 1:
            raise DiskGone("for a moment")
        return made


# ---- an error of the source


def test_flax_loses_the_batches_before_an_error():
    """flax raises the source's error one call after it happened, and what was in its queue is gone."""
    batches = flax_prefetch(breaks_after(5))
    assert up_to_error(batches, DiskGone, "gone")[0] == [0, 1, 2, 3]
    assert next(batches, "ended") == "ended"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ours_delivers_the_batches_before_an_error(size):
    """All five batches made before the error are delivered, and the error after them, each time again."""
    with prefetch_to_device(breaks_after(5), size) as batches:
        assert up_to_error(batches, DiskGone, "gone")[0] == [0, 1, 2, 3, 4]
        assert up_to_error(batches, DiskGone, "gone")[0] == []


def test_flax_iterator_loses_an_error_of_the_first_batch(flax_iterator, monkeypatch):
    """flax's iterator forgets an error that came before its constructor was through: it looks like an empty source."""

    class Prompt(threading.Thread):
        def start(self):
            super().start()
            self.join(LIMIT_S)  # the thread is quicker than the constructor

    threads = types.SimpleNamespace(Thread=Prompt, Condition=threading.Condition)
    monkeypatch.setattr(prefetch_iterator, "threading", threads)
    assert list(flax_iterator(breaks_after(0))) == []


@pytest.mark.parametrize("host_size", [0, 4])
def test_ours_raises_an_error_of_the_first_batch(host_size):
    """The error of the first batch is raised, also when the thread was through with it long before `next()`."""
    with prefetch_to_device(breaks_after(0), host_size=host_size) as batches:
        batches.start_prefetch()
        for thread in reader_threads():
            thread.join(LIMIT_S)
        assert up_to_error(batches, DiskGone, "gone")[0] == []


def test_grain_calls_the_source_again_after_its_error():
    """Grain starts its thread anew after an error: what had failed goes on with a batch missing."""
    batches = grain_prefetch(BreaksAtFirst(4))
    assert number(next(batches)) == 0
    with pytest.raises(DiskGone, match="for a moment"):
        next(batches)
    assert numbers(batches) == [2, 3]
    batches.close()


def test_ours_does_not_call_the_source_again_after_its_error():
    """After an error the source is left alone and the error stays."""
    source = BreaksAtFirst(4)
    with prefetch_to_device(source) as batches:
        assert up_to_error(batches, DiskGone, "for a moment")[0] == [0]
        assert up_to_error(batches, DiskGone, "for a moment")[0] == []
    assert source.pulled == 2


# ---- what a list is


def test_flax_repeats_the_first_batch_of_a_list_for_ever():
    """flax takes `size` elements from the list's beginning, then its first one again and again."""
    batches = flax_prefetch([{"x": batch(i)["x"][None]} for i in range(5)])
    assert numbers(itertools.islice(batches, 12)) == [0, 1] + [0] * 10


def test_ours_yields_a_list_once_a_pass():
    """A list is a source like any other, and can be gone through again."""
    with prefetch_to_device([batch(i) for i in range(5)]) as batches:
        assert numbers(batches) == [0, 1, 2, 3, 4]
        assert numbers(batches) == [0, 1, 2, 3, 4]


# ---- after the end


def test_grain_calls_the_source_again_after_its_end():
    """Grain asks an ended source once more for every `next()`."""
    ends = []

    class Ending(Counted):
        def __next__(self):
            if self.pulled == self.length:
                ends.append(True)
            return super().__next__()

    batches = grain_prefetch(Ending(2))
    assert numbers(batches) == [0, 1]
    assert [next(batches, None) for _ in range(3)] == [None] * 3
    assert len(ends) == 4
    batches.close()


def test_ours_asks_for_the_end_once():
    """After its end a source is not called again, however often `next()` is."""
    ends = []

    class Ending(Counted):
        def __next__(self):
            if self.pulled == self.length:
                ends.append(True)
            return super().__next__()

    with prefetch_to_device(Ending(2)) as batches:
        assert numbers(batches) == [0, 1]
        assert [next(batches, None) for _ in range(3)] == [None] * 3
        assert numbers(batches) == []
    assert len(ends) == 1


# ---- a prefetcher that is dropped


def test_flax_iterator_that_is_dropped_leaks(flax_iterator):
    """flax's thread refers to its iterator, so that neither ever goes, with the batch in the buffer."""
    batches = flax_iterator(Counted())
    assert number(next(batches)) == 0
    alive, thread = weakref.ref(batches), batches._thread
    del batches
    gc.collect()
    assert alive() is not None
    assert thread.is_alive()


def test_grain_iterator_that_is_dropped_goes():
    """Grain ends its thread when its iterator is dropped, as ours does."""
    before = set(threading.enumerate())
    batches = grain_prefetch(Counted())
    assert number(next(batches)) == 0
    started = set(threading.enumerate()) - before
    del batches
    gc.collect()
    for thread in started:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_ours_that_is_dropped_goes():
    """A prefetcher that nothing refers to ends its thread and closes its source."""
    source = Closable(let=100)
    batches = prefetch_to_device(source)
    assert number(next(batches)) == 0
    alive, (thread,) = weakref.ref(batches), reader_threads()
    del batches
    gc.collect()
    assert alive() is None
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert source.closed.is_set()


# ---- a source that blocks


@pytest.mark.parametrize("dropped", [False, True], ids=["closed", "dropped"])
def test_grain_waits_for_a_source_that_blocks(dropped):
    """Closing or dropping Grain's iterator returns only after the source has: never, if that never does."""
    source, order = Gated(let=1), []
    held = [grain_prefetch(source)]
    next(held[0])
    source.wait_asked(2)
    stopping = held[0]._prefetch_should_stop

    def end():
        held.clear() if dropped else held[0].close()
        order.append("ended")

    ending = InThread(end)
    wait(stopping)  # it is on its way
    order.append("source gave way")
    source.let(1)
    ending.result()
    assert order == ["source gave way", "ended"]


@pytest.mark.parametrize("dropped", [False, True], ids=["closed", "dropped"])
def test_ours_leaves_a_source_that_blocks(dropped, caplog):
    """Closing or dropping ours returns while the source blocks; `close()` says that it left it behind."""
    source = Gated(let=1)
    held = [prefetch_to_device(source)]
    next(held[0])
    source.wait_asked(2)
    (thread,) = reader_threads()
    if dropped:
        held.clear()
        gc.collect()
    else:
        held[0].close()
        assert "the reader is stuck in the source, for batch 1" in caplog.text
    assert thread.is_alive()
    source.let(1)
