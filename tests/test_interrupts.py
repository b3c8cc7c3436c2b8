"""Ctrl-C while the loop waits: it is raised there, and the next `next()` gives the batch that was due."""

from __future__ import annotations

import _thread
import inspect
import signal
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from gated import Counted, Loader, Watch, batch, number, numbers, refusing

import jaxprefetch
from jaxprefetch import prefetch_to_device
from jaxprefetch.device import packing
from jaxprefetch.device.placement import Placement
from jaxprefetch.host import reader
from jaxprefetch.host.inline import Inline
from jaxprefetch.host.pipeline import Pipeline
from jaxprefetch.host.slots import Slots
from jaxprefetch.host.source import Source
from jaxprefetch.layout import StagingOptions
from jaxprefetch.staging import Stager

HOUSE = str(Path(jaxprefetch.__file__).parent)

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


@pytest.mark.usefixtures("_ctrl_c_raises")
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


class Strike:
    """A Ctrl-C at the n-th place of the house where one may strike: a function begins, or a call into C returns."""

    def __init__(self, at: int, also: str = HOUSE):
        self.at = at
        self.within = HOUSE, also  # a module of Python's, whose functions the house calls
        self.places = 0

    def __call__(self, frame, event, _):
        code = frame.f_code
        closing = event == "call" and code.co_flags & inspect.CO_GENERATOR  # what strikes there is printed and ignored
        if event in ("call", "c_return") and code.co_filename.startswith(self.within) and not closing:
            self.places += 1
            if self.places == self.at:
                raise KeyboardInterrupt

    def take(self, batches) -> list[int]:
        """Takes all batches, and goes on after the interrupt."""
        taken = []
        while True:
            sys.setprofile(self)
            try:
                delivered = next(batches)
                sys.setprofile(None)
            except StopIteration:
                return taken
            except KeyboardInterrupt:
                continue
            finally:
                sys.setprofile(None)
            taken.append(number(delivered))


@pytest.mark.parametrize("host_size", [0, 8])
@pytest.mark.parametrize("delete_used", [False, True])
@pytest.mark.parametrize("how", ["alone", "packed", "on_device"])
def test_interrupt_anywhere_loses_nothing(how, host_size, delete_used, monkeypatch):
    """Wherever in `next()` Ctrl-C strikes: all batches come, once, in order, within the bounds, in both passes."""
    options = {"host_size": host_size, "delete_used": delete_used}
    if how == "packed":
        monkeypatch.setattr(packing, "PLATFORMS", ("cpu",))
        monkeypatch.setattr(packing, "FEWEST_LEAVES", 1)
    elif how == "on_device":
        options["on_device"] = lambda batch: {"x": batch["x"] * 1.0}

    def passes(at: int) -> int:
        strike, loader = Strike(at), [batch(i) for i in range(4)]
        with prefetch_to_device(loader, size=2, **options) as batches:
            batches.element_spec  # noqa: B018 -- waits for the first batch, so that runs are alike
            assert strike.take(batches) == [0, 1, 2, 3], at
            assert numbers(batches) == [0, 1, 2, 3], at
            statistics = batches.statistics()
        assert statistics.taken == statistics.issued == 8, at
        assert statistics.peak_in_flight <= statistics.bound, at
        assert statistics.peak_bytes_in_flight <= statistics.bytes_bound, at
        return strike.places

    places = passes(0)
    for at in range(1, places + 1):
        passes(at)


@pytest.mark.parametrize("when", ["before the thread runs", "after"])
def test_interrupted_start_of_the_thread_is_repeated(when, monkeypatch):
    """A Ctrl-C while the reader's thread is started, before or after it begins to run, leaves a `next()` that works."""
    start, struck = threading.Thread.start, []

    def starting(thread):
        if thread.name == "jaxprefetch-reader" and not struck:
            struck.append(thread)
            if when == "after":
                start(thread)
            raise KeyboardInterrupt("while starting")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    with prefetch_to_device(Loader(4)) as batches:
        with pytest.raises(KeyboardInterrupt, match="while starting"):
            next(batches)
        assert numbers(batches) == [0, 1, 2, 3]
    assert not reader._live


def test_memory_of_a_batch_that_is_staged_is_not_written_again(monkeypatch):
    """A Ctrl-C just after a source has written a batch leaves the batch its memory: the next is written elsewhere."""

    class Writing:
        def __init__(self):
            self.element_spec = {"x": jax.ShapeDtypeStruct((64,), np.float32)}
            self.written = 0

        def read_into(self, out):
            out["x"][:] = self.written
            self.written += 1
            return 64

    forget, struck = Pipeline.forget, []

    def forgetting(pipeline):
        if not struck:
            struck.append(pipeline)
            raise KeyboardInterrupt
        forget(pipeline)

    monkeypatch.setattr(Pipeline, "forget", forgetting)
    inline = Inline(Pipeline(Source(Writing()), Stager(Placement(), StagingOptions(), Slots())))
    with pytest.raises(KeyboardInterrupt):
        inline.wait(0, None)
    inline.wait(1, None)
    first, second = (inline.items[i].leaves[0] for i in range(2))
    assert not np.shares_memory(first, second)
    assert (first[0], second[0]) == (0, 1)
    inline.close()


def test_a_closed_pipeline_holds_no_batch():
    """After the end of a pass that was cut short neither a pulled batch nor memory offered for one is held."""
    pipeline = Pipeline(Source(Loader(3)), Stager(Placement(), StagingOptions()))
    pipeline.advance(0, lambda nbytes: None)
    pipeline.close()
    assert not pipeline._raw
    assert pipeline._offer is None
