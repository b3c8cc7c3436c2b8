"""Ctrl-C while the loop waits: it is raised there, and the next `next()` gives the batch that was due."""

from __future__ import annotations

import _thread
import signal
import threading

import pytest
from gated import Counted, Loader, Watch, batch, number, numbers, refusing

from jaxprefetch import prefetch_to_device
from jaxprefetch.staging import Stager

by_host_size = pytest.mark.parametrize("host_size", [0, 1, 4])


@pytest.fixture
def _ctrl_c_raises():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_raises")
@pytest.mark.parametrize("how", ["to the waiting thread", "seen when the wait ends"])
@pytest.mark.parametrize("at", [0, 2])
def test_interrupted_wait_loses_nothing(how, at, monkeypatch):
    """Ctrl-C in a wait for the source raises there, and the next `next()` gives the batch that was due."""
    watch, main = Watch(monkeypatch), threading.current_thread()

    class Interrupting(Counted):
        def __next__(self):
            if self.pulled == at:
                watch.wait_waits(main)
                if how == "to the waiting thread":
                    signal.pthread_kill(main.ident, signal.SIGINT)
                else:
                    _thread.interrupt_main()
            return super().__next__()

    with prefetch_to_device(Interrupting(6), size=1) as batches:
        delivered = []
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            for b in batches:
                delivered.append(number(b))
        assert delivered == list(range(at))
        assert numbers(batches) == list(range(at, 6))


@pytest.mark.usefixtures("_ctrl_c_raises")
def test_interrupted_inline_pull_loses_nothing():
    """Without a thread Ctrl-C passes through the source, which is asked again for the same batch."""

    class Interrupting(Counted):
        interrupted = False

        def __next__(self):
            if self.pulled == 2 and not self.interrupted:
                self.interrupted = True
                signal.raise_signal(signal.SIGINT)
            return super().__next__()

    with prefetch_to_device(Interrupting(5), host_size=0) as batches:
        delivered = []
        with pytest.raises(KeyboardInterrupt, match="batch 2"):
            for b in batches:
                delivered.append(number(b))
        assert delivered + numbers(batches) == list(range(5))


@by_host_size
def test_interrupted_put_is_repeated(host_size, monkeypatch):
    """An interrupt inside a put changes nothing: the next `next()` puts that batch."""
    refusing(monkeypatch, 1, KeyboardInterrupt("now"), times=1)
    with prefetch_to_device(Loader(4), host_size=host_size) as batches:
        delivered = []
        with pytest.raises(KeyboardInterrupt, match="now"):
            for b in batches:
                delivered.append(number(b))
        assert delivered + numbers(batches) == [0, 1, 2, 3]


def test_interrupted_inline_generator_is_no_end():
    """A generator that Ctrl-C has killed is not taken for one that has ended: the interrupt is raised again."""

    def source():
        yield batch(0)
        signal.raise_signal(signal.SIGINT)
        yield batch(1)

    with prefetch_to_device(source(), size=1, host_size=0) as batches:
        assert number(next(batches)) == 0
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt, match="batch 1"):
                next(batches)


def test_interrupted_inline_staging_loses_nothing(monkeypatch):
    """A batch that was pulled when Ctrl-C struck its staging is staged by the next call."""
    stage, calls = Stager.stage, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt("while staging")
        return stage(*args)

    monkeypatch.setattr(Stager, "stage", interrupted)
    with prefetch_to_device(Loader(5), size=1, host_size=0) as batches:
        delivered = []
        with pytest.raises(KeyboardInterrupt, match="while staging"):
            for b in batches:
                delivered.append(number(b))
        assert delivered + numbers(batches) == list(range(5))
