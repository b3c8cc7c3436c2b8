"""`close()` and the end of a `with` block: what ends, what is freed, what stays."""

from __future__ import annotations

import threading
import weakref

import pytest
from gated import LIMIT_S, Counted, Loader, batch, number, numbers, on_devices, reader_threads

from jaxprefetch import prefetch_to_device

by_host_size = pytest.mark.parametrize("host_size", [0, 4])


class Finalised:
    """A generator's `finally`: where it ran, and when."""

    def __init__(self):
        self.event = threading.Event()
        self.thread = None

    def source(self, length=1000):
        try:
            yield from map(batch, range(length))
        finally:
            self.thread = threading.current_thread()
            self.event.set()


@by_host_size
def test_closed_prefetcher_has_ended(host_size):
    """After `close()`, once or twice, `next()` has ended, `iter()` is an error and nothing starts any more."""
    batches = prefetch_to_device(Loader(9), host_size=host_size)
    next(batches)
    batches.close()
    batches.close()
    assert [next(batches, None) for _ in range(2)] == [None, None]
    batches.start_prefetch()
    assert not reader_threads()
    with pytest.raises(ValueError, match=r"This prefetcher is closed\. Make a new one"):
        iter(batches)


@by_host_size
def test_close_before_the_first_next(host_size):
    """A prefetcher that never ran closes, without having opened its source."""
    loader = Loader(3)
    batches = prefetch_to_device(loader, host_size=host_size)
    batches.close()
    assert next(batches, None) is None
    assert loader.passes == 0


@by_host_size
@pytest.mark.parametrize("delete_used", [False, True], ids=["keep", "delete_used"])
def test_close_leaves_the_held_batch_alive(host_size, delete_used):
    """The batch in the loop's hands can be read after `close()`."""
    batches = prefetch_to_device(Loader(9), host_size=host_size, delete_used=delete_used)
    next(batches)
    held = next(batches)
    batches.close()
    assert number(held) == 1


@by_host_size
def test_close_frees_what_was_not_handed_out(host_size):
    """After `close()` neither devices nor host hold a batch that nobody took, though the prefetcher is still there."""
    made = []

    def source():
        for i in range(20):
            fresh = batch(i, rows=1231)
            made.append(weakref.ref(fresh["x"]))
            yield fresh

    batches = prefetch_to_device(source(), size=3, host_size=host_size, fresh_buffers=True)
    held = next(batches)
    if host_size:
        next(batches)
    batches.close()
    del held
    assert on_devices(1231) == 0
    assert len(made) >= 3
    assert [ref() for ref in made if ref() is not None] == []


@by_host_size
def test_context_manager_closes(host_size):
    """Leaving the `with` block closes."""
    done = Finalised()
    with prefetch_to_device(done.source(), host_size=host_size) as batches:
        next(batches)
    assert next(batches, None) is None
    assert done.event.is_set()


@by_host_size
def test_context_manager_closes_when_the_loop_fails(host_size):
    """An error in the `with` block passes through and closes."""
    done = Finalised()
    with (
        pytest.raises(KeyError, match="mine"),
        prefetch_to_device(done.source(), host_size=host_size) as batches,
    ):
        next(batches)
        raise KeyError("mine")
    assert next(batches, None) is None
    assert done.event.is_set()


def test_generator_is_closed_on_the_reader():
    """The generator's `finally` runs on the thread that ran the generator, before `close()` returns."""
    done = Finalised()
    with prefetch_to_device(done.source()) as batches:
        next(batches)
        (running,) = reader_threads()
    assert done.event.is_set()
    assert done.thread is running


def test_inline_generator_is_closed_by_close():
    """Without a thread the generator's `finally` runs within `close()`."""
    done = Finalised()
    batches = prefetch_to_device(done.source(), host_size=0)
    next(batches)
    batches.close()
    assert done.thread is threading.current_thread()


def test_thread_ends_with_the_source():
    """At the end of a pass the thread goes away by itself, without `close()`."""
    batches = prefetch_to_device(Loader(3))
    next(batches)
    running = reader_threads()
    assert numbers(batches) == [1, 2]
    for thread in running:
        thread.join(LIMIT_S)
    assert not reader_threads()


@by_host_size
def test_the_end_closes_the_iterator(host_size):
    """At the end of a pass the source's iterator is closed, without `close()` of ours."""
    closed = threading.Event()

    class Open(Counted):
        def close(self):
            closed.set()

    with prefetch_to_device(Open(3), host_size=host_size) as batches:
        assert numbers(batches) == [0, 1, 2]
        for thread in reader_threads():
            thread.join(LIMIT_S)
        assert closed.is_set()


@pytest.mark.parametrize("taken", [0, 1])
def test_error_in_the_source_s_close_is_logged(taken, caplog):
    """A source that cannot be closed does not fail `close()`, also if only its state was asked for."""

    class Stubborn(Counted):
        def get_state(self):
            return {"at": self.pulled}

        def set_state(self, state):
            raise NotImplementedError

        def close(self):
            raise OSError("still busy")

    with prefetch_to_device(Stubborn()) as batches:
        batches.get_state()
        for _ in range(taken):
            next(batches)
    assert "closing the source's iterator 'Stubborn' failed" in caplog.text
    assert "still busy" in caplog.text


@by_host_size
def test_element_spec_of_a_closed_prefetcher_says_so(host_size):
    """Asking a closed prefetcher for its first batch is an error that names the cause."""
    batches = prefetch_to_device(Loader(3), host_size=host_size)
    batches.close()
    with pytest.raises(ValueError, match="closed"):
        _ = batches.element_spec
