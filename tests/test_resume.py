"""The state of a prefetcher: that of the batch taken last, whatever is on its way, and back to there."""

from __future__ import annotations

import copy

import grain
import numpy as np
import pytest
from gated import Closable, Counted, Loader, Watch, batch, number, numbers, reader_threads

from jaxprefetch import prefetch_to_device
from jaxprefetch.host import resume as resume_module
from jaxprefetch.host.states import from_json, to_json

by_host_size = pytest.mark.parametrize("host_size", [0, 1, 4])


class Shuffled:
    """Goes through its batches in a new order each pass; newly made, it does the same again."""

    def __init__(self, length=5):
        self.length = length
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter([batch(i) for i in self.rng.permutation(self.length)])


class OwnState:
    """An iterator with Grain's protocol."""

    def __init__(self, length=7, start=0):
        self.length = length
        self.at = [start]  # changed in place: whoever keeps a state has to copy it

    def __iter__(self):
        return self

    def __next__(self):
        if self.at[0] == self.length:
            raise StopIteration
        self.at[0] += 1
        return batch(self.at[0] - 1)

    def get_state(self):
        return self.at

    def set_state(self, state):
        self.at = list(state)


class Opens:
    """A loader whose iterators have Grain's protocol."""

    def __iter__(self):
        return OwnState()


class Loads:
    """A loader with torchdata's protocol: its state is that of its iterator, and after an end the next pass's."""

    def __init__(self, length=7):
        self.length = length
        self.at = 0
        self.loaded = False

    def __iter__(self):
        self.at, self.loaded = (self.at if self.loaded else 0), False
        while self.at < self.length:
            self.at += 1
            yield batch(self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.loaded = state["at"], True


def grain_iterator():
    return iter(grain.MapDataset.range(20).seed(3).shuffle().map(batch).to_iter_dataset())


def grain_loader():
    whole = grain.sharding.NoSharding()
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 20, 1),
        sampler=grain.samplers.IndexSampler(20, shuffle=True, seed=3, num_epochs=1, shard_options=whole),
        operations=[AsBatch()],
    )


class AsBatch(grain.transforms.Map):
    def map(self, element):
        return batch(int(element))


SOURCES = {
    "list": (lambda: [batch(i) for i in range(7)], "replay"),
    "loader": (lambda: Loader(7), "replay"),
    "shuffled": (lambda: Shuffled(7), "replay"),
    "generator": (lambda: (batch(i) for i in range(7)), "replay"),
    "iterator": (lambda: OwnState(), None),
    "opens": (lambda: Opens(), None),
    "loads": (lambda: Loads(), None),
    "grain-iterator": (grain_iterator, None),
    "grain-dataset": (lambda: grain.MapDataset.range(7).map(batch).to_iter_dataset(), None),
    "grain-loader": (grain_loader, None),
}
by_source = pytest.mark.parametrize(("make", "resume"), SOURCES.values(), ids=SOURCES)


def made(make, resume, **options):
    return prefetch_to_device(make(), resume=resume, **options)


# ---- there and back


@by_source
@by_host_size
@pytest.mark.parametrize("taken", [0, 1, 3, 7])
def test_goes_on_behind_the_batch_taken_last(make, resume, host_size, taken):
    """What follows the state is what would have followed, however far the thread was ahead; the state is JSON."""
    with made(make, resume, host_size=host_size) as batches:
        for _ in range(taken):
            next(batches)
        state = to_json(batches.get_state())
        expected = numbers(batches)
    with made(make, resume, host_size=host_size) as batches:
        batches.set_state(from_json(state))
        assert numbers(batches) == expected


@by_source
def test_second_resume_in_the_same_epoch(make, resume):
    """The state of a resumed prefetcher counts from the beginning of the pass."""
    with made(make, resume) as batches:
        everything = numbers(batches)
    state, delivered = None, []
    for taken in (2, 1, 2):
        with made(make, resume) as batches:
            if state is not None:
                batches.set_state(state)
            delivered += [number(next(batches)) for _ in range(taken)]
            state = batches.get_state()
    assert delivered == everything[:5]
    assert state["taken"] == 5


@pytest.mark.parametrize("kind", ["list", "loader", "shuffled", "opens", "loads", "grain-dataset", "grain-loader"])
@pytest.mark.parametrize("at", ["in the pass", "behind its last batch", "behind its end", "in the next"])
def test_later_passes(kind, at):
    """A state taken in the second pass, or between passes, goes on with the batches of that pass, and the next."""
    make, resume = SOURCES[kind]

    def run(batches):
        whole = numbers(batches)
        for _ in range({"in the pass": 3, "in the next": 2}.get(at, len(whole))):
            next(iter(batches))
        if at == "behind its end":
            assert next(batches, None) is None

    with made(make, resume) as batches:
        run(batches)
        state = batches.get_state()
        expected = [numbers(batches), numbers(batches)]
    with made(make, resume) as batches:
        batches.set_state(copy.deepcopy(state))
        assert [numbers(batches), numbers(batches)] == expected


def test_state_before_the_first_batch_is_the_sources():
    """A source that was advanced before it was handed over is brought back to that place; nothing is started."""
    source = OwnState(start=4)
    with prefetch_to_device(source) as batches:
        state = batches.get_state()
        assert (state["source"], source.at) == ([4], [4])
        assert not reader_threads()
        assert numbers(batches) == [4, 5, 6]
    with prefetch_to_device(OwnState()) as batches:
        batches.set_state(state)
        assert batches.get_state() == state
        assert numbers(batches) == [4, 5, 6]


def test_state_when_the_thread_runs_and_nothing_is_taken():
    """What was pulled ahead is not in the state."""
    with prefetch_to_device(OwnState()) as batches:
        batches.start_prefetch()
        assert batches.get_state()["source"] == [0]
        assert number(next(batches)) == 0


def test_what_is_on_its_way_is_not_in_the_state(monkeypatch):
    """The source is ahead, the state is that of the batch in the loop's hands."""
    watch = Watch(monkeypatch)
    source = OwnState(length=100)
    with prefetch_to_device(source, size=3, host_size=4) as batches:
        next(batches)
        watch.wait_reader_idle()
        assert source.at[0] >= 7
        assert batches.get_state()["source"] == [1]


def test_state_after_close_and_after_an_error():
    """A closed prefetcher, and one that an error has ended, still tell the state of the batch taken last."""

    def failing():
        yield batch(0)
        yield batch(1)
        raise OSError("gone")

    with prefetch_to_device(failing(), resume="replay") as batches:
        next(batches)
        next(batches)
        with pytest.raises(OSError, match="gone"):
            next(batches)
        assert batches.get_state()["taken"] == 2
    assert batches.get_state()["taken"] == 2


class TornTurn:
    """A lock which a Ctrl-C strikes when it is first given back."""

    def __init__(self, lock):
        self.lock, self.locked, self.struck = lock, lock.locked, False

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *raised):
        self.lock.release()
        struck, self.struck = self.struck, True
        if not struck:
            raise KeyboardInterrupt


def test_batch_kept_back_by_an_interrupt_is_not_taken(monkeypatch):
    """A batch that a Ctrl-C kept from the loop is not in the state, also after `close()`."""
    with prefetch_to_device([batch(i) for i in range(5)], resume="replay") as batches:
        next(batches)
        monkeypatch.setattr(batches, "_turn", TornTurn(batches._turn))
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert batches.get_state()["taken"] == 1
    assert batches.get_state()["taken"] == 1


# ---- short last batches


@pytest.mark.parametrize("mode", ["drop", "pad", "error"])
def test_short_last_batch_is_treated_as_without_the_restart(mode):
    """The rows of the pass's first batch are part of the state, so that a short one is still short."""

    def source():
        return [batch(0, rows=8), batch(1, rows=8), batch(2, rows=5)]

    options = {"resume": "replay", "last_batch": mode, "host_size": 0}
    with prefetch_to_device(source(), **options) as batches:
        next(batches)
        next(batches)
        state = batches.get_state()
        expected = [{k: v.shape for k, v in b.items()} for b in batches]
    with prefetch_to_device(source(), **options) as batches:
        batches.set_state(from_json(to_json(state)))
        assert [{k: v.shape for k, v in b.items()} for b in batches] == expected
    assert len(expected) == (mode != "drop")


# ---- what cannot be resumed


@pytest.mark.parametrize("source", [lambda: [batch(0)], lambda: Loader(3), lambda: Counted(3)])
def test_source_without_a_state_is_refused_with_the_cure(source):
    """The error says what the source lacks and how to go on without it; nothing was pulled."""
    with prefetch_to_device(source()) as batches:
        for call in (batches.get_state, lambda: batches.set_state({"version": 1})):
            with pytest.raises(TypeError, match=r"no state_dict\(\) and load_state_dict\(\).*pass resume=\"replay\""):
                call()
        next(batches)
        with pytest.raises(TypeError, match="cannot be resumed"):
            batches.get_state()


def test_set_state_after_reading_began():
    """A state is set before the first batch, or not at all."""
    with prefetch_to_device(OwnState()) as batches:
        state = batches.get_state()
        next(batches)
        with pytest.raises(ValueError, match="set_state: reading has begun"):
            batches.set_state(state)


@pytest.mark.parametrize("state", [None, {}, {"version": 0}, b"state"])
def test_set_state_of_something_else(state):
    """What is no state of a prefetcher is refused."""
    with (
        prefetch_to_device(OwnState()) as batches,
        pytest.raises(ValueError, match=r"expected what get_state\(\) of version 1 gave"),
    ):
        batches.set_state(state)


def test_set_state_of_another_kind_of_source():
    """Counts are of no use to a source with a state, and the other way round."""
    with prefetch_to_device(OwnState(), resume="replay") as batches:
        state = batches.get_state()
    with (
        prefetch_to_device(OwnState()) as batches,
        pytest.raises(ValueError, match="taken by 'replay', and this source is resumed by 'get_state'"),
    ):
        batches.set_state(state)


def test_replay_of_a_shorter_source():
    """A source with fewer batches than were taken is not the one that was left."""
    with prefetch_to_device([batch(i) for i in range(5)], resume="replay") as batches:
        for _ in range(4):
            next(batches)
        state = batches.get_state()
    with prefetch_to_device([batch(i) for i in range(2)], resume="replay") as batches:
        batches.set_state(state)
        with pytest.raises(ValueError, match="the source has ended 2 batches before the place"):
            next(batches)


def test_resume_knows_one_word():
    """A misspelt mode is an error at the call."""
    with pytest.raises(ValueError, match="resume: expected None or 'replay', got 'replays'"):
        prefetch_to_device([], resume="replays")


def test_source_that_fails_to_tell_its_state():
    """A source whose `get_state` raises delivers its batches; asked for the state, its error is raised with a note."""

    class Silent(OwnState):
        def get_state(self):
            raise RuntimeError("no state now")

    with prefetch_to_device(Silent()) as batches:
        assert number(next(batches)) == 0
        with pytest.raises(RuntimeError, match="no state now") as caught:
            batches.get_state()
        assert "when it was asked for its state" in caught.value.__notes__[0]
        assert numbers(batches) == list(range(1, 7))


def test_a_source_that_tells_no_state_is_not_begun_anew():
    """None stands for the beginning, so behind batches it is an error, not a state that would repeat them."""

    class Forgetful(OwnState):
        def get_state(self):
            return None if self.at == [2] else super().get_state()

    with prefetch_to_device(Forgetful(4)) as batches:
        next(batches)
        assert batches.get_state()["taken"] == 1
        next(batches)
        with pytest.raises(TypeError, match=r"get_state\(\) of it, or of its iterator, gave None behind batch 1"):
            batches.get_state()
        assert numbers(batches) == [2, 3]


@by_host_size
def test_a_source_that_cannot_be_set_back_for_the_next_pass(host_size, monkeypatch):
    """A stream that fails to go back to its beginning ends the pass with its error, behind all batches."""

    class Stuck(Loads):
        def load_state_dict(self, state):
            if not state:
                raise RuntimeError("stuck")
            super().load_state_dict(state)

    monkeypatch.setattr(resume_module, "is_streamed", lambda source: True)
    with prefetch_to_device(Stuck(4), host_size=host_size) as batches:
        next(batches)
        state = batches.get_state()
    with prefetch_to_device(Stuck(4), host_size=host_size) as batches:
        batches.set_state(state)
        for b in (1, 2, 3):
            assert number(next(batches)) == b
        for _ in range(2):
            with pytest.raises(RuntimeError, match="stuck") as caught:
                next(batches)
            assert "after its end, when it was set back" in caught.value.__notes__[0]


def test_an_iterator_that_was_opened_for_its_state_is_closed():
    """An iterator that was made to be asked, and never read, is closed with the prefetcher."""
    iterator = Closable()
    iterator.get_state = iterator.set_state = lambda *state: None

    class Once:
        def __iter__(self):
            return iterator

    with prefetch_to_device(Once()) as batches:
        batches.get_state()
    assert iterator.closed.is_set()


# ---- states as JSON


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"a": [1, 2.5, "x", True, None], "b": {"c": (1, (2,))}},
        {1: b"\x00\xff", (1, "a"): float("inf")},
        [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(2.5), np.zeros(0)],
        {"__jaxprefetch__": "not a tag"},
    ],
)
def test_states_survive_json(state):
    """Values and types come back, from JSON that any reader takes."""
    import json

    back = from_json(json.loads(json.dumps(to_json(state), allow_nan=False)))
    np.testing.assert_equal(back, state)
    assert repr(back) == repr(state)


def test_state_that_json_cannot_hold():
    """The error names the type and the place."""
    with pytest.raises(TypeError, match="has a set at state/a/0, which JSON cannot hold"):
        to_json({"a": [{1}]})
