"""Passes: their batches, order and ends, and who may take them."""

from __future__ import annotations

import _thread
import queue
import threading

import jax
import pytest
from gated import LIMIT_S, Counted, Gated, InThread, Loader, batch, number, numbers, reader_threads

from jaxprefetch import prefetch_to_device
from jaxprefetch.device.placement import Placement
from jaxprefetch.host import reader
from jaxprefetch.host.pipeline import Pipeline
from jaxprefetch.host.reader import Reader
from jaxprefetch.host.source import Source
from jaxprefetch.layout import StagingOptions
from jaxprefetch.staging import Stager

by_size = pytest.mark.parametrize("size", [1, 2, 3, 4])
by_host_size = pytest.mark.parametrize("host_size", [0, 1, 4])


def messages(caplog, text):
    return [record for record in caplog.records if text in record.getMessage()]


# ---- order and values


@by_size
@by_host_size
@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_yields_every_batch_once_in_order(size, host_size, length):
    """A pass yields the source's batches as `jax.Array`, once each and in order, at every size."""
    with prefetch_to_device([batch(i) for i in range(length)], size, host_size=host_size) as batches:
        delivered = list(batches)
    assert numbers(delivered) == list(range(length))
    assert all(isinstance(b["x"], jax.Array) for b in delivered)


@pytest.mark.parametrize(
    "source",
    [
        lambda: [batch(i) for i in range(5)],
        lambda: tuple(batch(i) for i in range(5)),
        lambda: (batch(i) for i in range(5)),
        lambda: map(batch, range(5)),
        lambda: Loader(5),
        lambda: Counted(5),
        lambda: OldProtocol(),
        lambda: OnlyNext(5),
    ],
    ids=["list", "tuple", "generator", "map", "loader", "iterator", "getitem", "only-next"],
)
def test_takes_any_iterable(source):
    """Lists, generators, loaders and both old iteration protocols give their five batches."""
    with prefetch_to_device(source()) as batches:
        assert numbers(batches) == [0, 1, 2, 3, 4]


class OldProtocol:
    def __getitem__(self, index):
        if index == 5:
            raise IndexError(index)
        return batch(index)


class OnlyNext:
    def __init__(self, length):
        self._batches = iter([batch(i) for i in range(length)])

    def __next__(self):
        return next(self._batches)


def test_nested_prefetchers_pass_batches_through():
    """A prefetcher is a source for another, which closes it at the end."""
    inner = prefetch_to_device(Loader(6))
    with prefetch_to_device(inner, size=3) as outer:
        assert numbers(outer) == list(range(6))
    with pytest.raises(ValueError, match="This prefetcher is closed"):
        iter(inner)


# ---- passes


@by_host_size
def test_iter_in_the_middle_continues_the_pass(host_size):
    """A loop that was left with `break` goes on where it stopped, and its source is opened once."""
    loader = Loader(6)
    with prefetch_to_device(loader, host_size=host_size) as batches:
        for delivered in batches:
            if number(delivered) == 1:
                break
        assert number(next(batches)) == 2
        assert numbers(batches) == [3, 4, 5]
        assert loader.passes == 1


@by_host_size
def test_iter_after_the_end_begins_a_new_pass(host_size):
    """A source that can be iterated again is gone through once a `for` loop."""
    loader = Loader(4)
    with prefetch_to_device(loader, host_size=host_size) as batches:
        assert [numbers(batches) for _ in range(3)] == [[0, 1, 2, 3]] * 3
    assert loader.passes == 3


def test_iter_twice_begins_one_pass():
    """`iter()` of a pass that has just begun continues it."""
    loader = Loader(3)
    with prefetch_to_device(loader) as batches:
        list(batches)
        assert numbers(iter(iter(batches))) == [0, 1, 2]
        assert loader.passes == 2


@by_host_size
def test_bare_next_stays_ended(host_size):
    """After the end `next()` ends again each time and does not open the source; only `iter()` does."""
    loader = Loader(2)
    with prefetch_to_device(loader, host_size=host_size) as batches:
        list(batches)
        assert [next(batches, None) for _ in range(3)] == [None] * 3
        assert loader.passes == 1
        assert numbers(batches) == [0, 1]


@by_host_size
def test_spent_iterator_is_empty_and_said_once(host_size, caplog):
    """Later passes over a one-shot iterator are empty, with one warning in all."""
    with prefetch_to_device(iter([batch(0), batch(1)]), host_size=host_size) as batches:
        assert [numbers(batches) for _ in range(3)] == [[0, 1], [], []]
    assert len(messages(caplog, "is spent, so this pass is empty")) == 1


def test_passes_may_differ_in_length():
    """Each pass has as many batches as the source yields in it."""
    lengths = iter([3, 0, 2])

    class Shrinking:
        def __iter__(self):
            return iter([batch(i) for i in range(next(lengths))])

    with prefetch_to_device(Shrinking()) as batches:
        assert [numbers(batches) for _ in range(3)] == [[0, 1, 2], [], [0, 1]]


# ---- the start


def test_start_prefetch_pulls_before_next():
    """`start_prefetch()` starts one thread, however often it is called, and does not wait for the source."""
    source = Gated()
    with prefetch_to_device(source) as batches:
        batches.start_prefetch()
        source.wait_asked(1)
        batches.start_prefetch()
        assert len(reader_threads()) == 1
        source.let(100)
        assert number(next(batches)) == 0


def test_nothing_is_pulled_before_the_first_next():
    """Making a prefetcher and asking for its iterator touches no batch and starts no thread."""
    source = Counted()
    with prefetch_to_device(source) as batches:
        iter(batches)
        assert source.pulled == 0
        assert not reader_threads()


def test_the_thread_that_takes_batches_is_known():
    """Whoever takes batches when the process exits has a moment to come to its end, started by others or not."""
    with prefetch_to_device([batch(i) for i in range(9)]) as batches:
        batches.start_prefetch()
        (made,) = batches._readers
        assert made.consumer is threading.current_thread()
        other = threading.Thread(target=next, args=(batches,))
        other.start()
        other.join(LIMIT_S)
        assert made.consumer is other


def test_a_thread_that_python_has_not_started_cannot_be_waited_for():
    """A consumer on a thread of some C library is no error when the process exits."""
    known, ends = queue.SimpleQueue(), threading.Event()

    def foreign():
        known.put(threading.current_thread())
        ends.wait(LIMIT_S)

    _thread.start_new_thread(foreign, ())
    thread = known.get(timeout=LIMIT_S)
    assert reader._join({"its reader": thread}, 0.0) == ["its reader"]
    ends.set()


@jax.tree_util.register_pytree_node_class
class Closing:
    """A node that closes the prefetcher which makes it."""

    def __init__(self, leaf, close):
        self.leaf, self.close = leaf, close

    def tree_flatten(self):
        return (self.leaf,), self.close

    @classmethod
    def tree_unflatten(cls, close, leaves):
        close.now()
        return cls(*leaves, close)


class Close:
    """What such a node calls."""

    def __init__(self):
        self.batches = None

    def now(self):
        if self.batches is not None:
            self.batches.close()


@by_host_size
def test_a_batch_that_closes_its_prefetcher_leaves_nothing(host_size):
    """`close()` while `next()` hands out: the batch comes, and what is left is freed without another call."""
    close = Close()
    ends = []

    def source():
        try:
            for i in range(9):
                yield Closing(batch(i)["x"], close)
        finally:
            ends.append(True)

    close.batches = batches = prefetch_to_device(source(), host_size=host_size)
    assert int(next(batches).leaf[0]) == 0
    assert ends == [True]
    assert not batches._readers
    with pytest.raises(StopIteration):
        next(batches)


# ---- room on the host


class Bell(queue.SimpleQueue):
    """Tells when somebody waits for it, and counts how often it was rung."""

    def __init__(self):
        super().__init__()
        self.waited_for, self.rung = threading.Event(), 0

    def get(self, *args, **options):
        self.waited_for.set()
        return super().get(*args, **options)

    def put(self, item, *args, **options):
        self.rung += 1
        super().put(item, *args, **options)


@pytest.mark.parametrize(
    ("host_size", "issued", "rung"),
    [(1, 1, 1), (2, 1, 1), (3, 1, 0), (3, 2, 1), (4, 1, 0), (4, 2, 1), (4, 3, 1), (8, 3, 0), (8, 4, 1)],
)
@pytest.mark.parametrize("now", [False, True])
def test_a_reader_is_woken_once_half_of_its_batches_are_gone(host_size, issued, rung, now):
    """Or at once where that is asked for, as before every wait."""
    source = Counted()
    made = Reader(Pipeline(Source(source), Stager(Placement(), StagingOptions())), host_size=host_size)
    made._room = bell = Bell()
    made.start()
    assert bell.waited_for.wait(LIMIT_S)
    assert source.pulled == host_size
    bell.waited_for.clear()
    made.give_room(issued, 0, now)
    assert bell.rung == (1 if now else rung)
    if bell.rung:  # it fills up what is free, and waits again
        assert bell.waited_for.wait(LIMIT_S)
        assert source.pulled == host_size + issued
    made.close()


# ---- element_spec


@by_host_size
def test_element_spec_tells_the_first_batch_and_loses_nothing(host_size):
    """`element_spec` has shapes, dtypes and shardings of the batches, before and after the first was taken."""
    with prefetch_to_device(Loader(4), host_size=host_size) as batches:
        spec = batches.element_spec["x"]
        first = next(batches)["x"]
        assert (spec.shape, spec.dtype, spec.sharding) == (first.shape, first.dtype, first.sharding)
        assert batches.element_spec["x"] == spec
        assert numbers(batches) == [1, 2, 3]


def test_element_spec_of_an_empty_source_is_an_error():
    """An empty source has no first batch to tell the spec from."""
    with (
        prefetch_to_device([]) as batches,
        pytest.raises(ValueError, match="element_spec: the source is empty"),
    ):
        _ = batches.element_spec


# ---- threads


def test_next_from_several_threads_one_after_another():
    """The consumer may change its thread between batches."""
    with prefetch_to_device(Loader(4)) as batches:
        assert [number(InThread(lambda: next(batches)).result()) for _ in range(4)] == [0, 1, 2, 3]


def test_next_from_two_threads_at_once_is_refused():
    """A second `next()` during one that waits raises and takes nothing away."""
    source = Gated()
    with prefetch_to_device(source) as batches:
        first = InThread(lambda: next(batches))
        source.wait_asked(1)
        with pytest.raises(RuntimeError, match="one thread at a time may take batches"):
            next(batches)
        source.let(100)
        assert number(first.result()) == 0
        assert number(next(batches)) == 1


def test_source_that_needs_the_step_does_not_block():
    """Batch k+1 may be made from the result of step k: `next()` does not insist on having it ahead."""
    results = queue.SimpleQueue()

    def from_results():
        yield batch(0)
        while True:
            yield batch(int(results.get()) + 1)

    step = jax.jit(lambda x: x.max())
    with prefetch_to_device(from_results(), size=2) as batches:
        for k in range(10):
            delivered = next(batches)
            assert number(delivered) == k
            results.put(step(delivered["x"]))
        results.put(jax.numpy.float32(0))
