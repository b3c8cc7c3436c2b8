"""A cache whose oldest examples are replaced from a source while batches are taken: when, with what, and who waits."""

from __future__ import annotations

import queue
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from cached import PLACES, examples
from gated import Closable, Gated, InThread, Watch, reader_threads, run_python
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprefetch import DeviceCache
from jaxprefetch.refresh import Refresh

SPLIT = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P("data"))
ALL = list(range(8))


def cache_of(n: int = 8, **options: Any) -> DeviceCache:
    return DeviceCache(n, {"x": np.arange(n, dtype=np.float32)}, **options)


def rows(number: int, n: int = 4) -> dict[str, np.ndarray]:
    """Rows of the refresh that tell its batch."""
    return {"x": np.full(n, 100 + number, np.float32)}


def taken(cache: DeviceCache) -> list[int]:
    """All slots, as a take finds them."""
    return np.asarray(cache.take(range(cache.capacity))["x"]).astype(int).tolist()


class Counts:
    """Refreshing batches by number, whose content a test can tell, over a gate."""

    def __init__(self, gate: Gated):
        self.gate = gate

    def __iter__(self) -> Counts:
        return self

    def __next__(self) -> Any:
        return rows(int(next(self.gate)["x"][0]))


# ---- when


@given(
    every=st.integers(1, 4),
    sizes=st.lists(st.sampled_from([2, 4, 8]), max_size=5),
    takes=st.integers(0, 20),
    before=st.integers(0, 3),
)
def test_examples_are_replaced_at_fixed_takes(every: int, sizes: list[int], takes: int, before: int) -> None:
    """Against a plain ring: a batch comes in before each take whose number is a multiple of `every_takes`, in order."""
    model, oldest = [list(range(4)), list(range(4, 8))], 0
    due = [(j, n) for j, n in enumerate(sizes)]
    with cache_of(sharding=SPLIT) as cache:
        for _ in range(before):
            assert taken(cache) == ALL
        cache.refresh([rows(j, n) for j, n in enumerate(sizes)], every_takes=every)
        for number in range(before, before + takes):
            if number and number % every == 0 and due:
                j, n = due.pop(0)
                for own in model:
                    for place in range(oldest, oldest + n // 2):
                        own[place % 4] = 100 + j
                oldest += n // 2
            assert taken(cache) == model[0] + model[1]
        assert cache.refreshes == len(sizes) - len(due)


def test_the_key_determines_everything() -> None:
    """Random batches of a cache that is refreshed are the same in every run."""

    def run() -> list[Any]:
        with cache_of(sharding=SPLIT) as cache:
            cache.refresh((rows(j) for j in range(50)), every_takes=3)
            batches = cache.batches(4, jax.random.key(3))
            return [np.asarray(next(batches)["x"]).tolist() for _ in range(60)]

    assert run() == run()


def test_a_deterministic_refresh_waits_for_what_is_due() -> None:
    """Takes go on until a batch is due; that take waits for the source."""
    gate = Gated()
    with cache_of() as cache:
        cache.refresh(Counts(gate), every_takes=3)
        assert [taken(cache) for _ in range(3)] == [ALL] * 3
        waiting = InThread(lambda: taken(cache))
        gate.wait_asked(1)
        gate.let(1)
        assert waiting.result() == [100, 100, 100, 100, 4, 5, 6, 7]
        gate.let(9)


def test_without_determinism_no_take_waits(monkeypatch: Any) -> None:
    """While the source is late takes find the old examples; when it has delivered, the new ones, batch by batch."""
    watch, gate = Watch(monkeypatch), Gated()
    with cache_of() as cache:
        cache.refresh(Counts(gate), every_takes=2, deterministic=False)
        assert [taken(cache) for _ in range(9)] == [ALL] * 9
        gate.let(2)
        watch.wait_reader_idle()  # both are staged: there is no room for a third
        seen = [taken(cache) for _ in range(4)]
        assert seen[0] == [100, 100, 100, 100, 4, 5, 6, 7]
        assert seen[-1] == [100] * 4 + [101] * 4
        assert cache.refreshes == 2
        gate.let(9)


class Stub:
    """A prefetcher whose batches are staged and land when a test says so."""

    def __init__(self) -> None:
        self.staged, self.given, self.landed, self.closed = 0, 0, set[int](), False

    def next_is_staged(self) -> bool:
        return self.staged > self.given

    def __next__(self) -> Any:
        self.given += 1
        return Rows(self, self.given - 1)

    def close(self) -> None:
        self.closed = True


class Rows:
    """An array that may be on its way."""

    def __init__(self, stub: Stub, number: int):
        self.stub, self.number = stub, number

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.number in self.stub.landed

    def block_until_ready(self) -> Rows:
        self.stub.landed.add(self.number)
        return self


def test_rows_are_put_a_take_before_they_are_due() -> None:
    """What is staged is put after a take's own replacement, so that its copy has a step to hide behind."""
    stub = Stub()
    refresh = Refresh(stub, 2, deterministic=True)
    stub.staged = 5
    given = []
    for take in range(6):
        if refresh.due(take) is not None:
            refresh.applied()
        refresh.prepare()
        given.append(stub.given)
    assert given == [1, 1, 2, 2, 3, 3]


def test_rows_on_their_way_are_not_written() -> None:
    """Without determinism rows that have not landed wait for a later take; with it the take waits for them."""
    stub = Stub()
    refresh = Refresh(stub, 2, deterministic=False)
    stub.staged = 1
    refresh.prepare()
    assert [refresh.due(take) for take in range(4)] == [None] * 4
    stub.landed.add(0)
    assert refresh.due(4).number == 0
    refresh.applied()
    assert refresh.due(5) is None
    waits = Refresh(stub, 2, deterministic=True)
    assert [waits.due(0), waits.due(1)] == [None, None]
    assert waits.due(2).number in stub.landed


# ---- the end and errors


def test_when_the_source_ends_the_examples_stay() -> None:
    """A finite source replaces what it has, and takes go on."""
    with cache_of() as cache:
        cache.refresh([rows(0)])
        assert [taken(cache) for _ in range(4)] == [ALL] + [[100, 100, 100, 100, 4, 5, 6, 7]] * 3
        assert cache.refreshes == 1


def failing() -> Iterator[Any]:
    yield rows(0)
    raise OSError("disk full")


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_sources_error_is_raised_once_where_it_is_due(deterministic: bool) -> None:
    """An error of the source comes in the place of its batch; afterwards the cache is as it was, without a refresh."""
    with cache_of() as cache:
        cache.refresh(failing(), every_takes=2, deterministic=deterministic)
        for thread in reader_threads():
            thread.join()  # all is staged
        assert [taken(cache)[0] for _ in range(4)] == [0, 0, 100, 100]
        with pytest.raises(OSError, match="disk full"):
            cache.take([0])
        assert not reader_threads()
        assert cache.takes == 4
        assert [taken(cache)[0] for _ in range(4)] == [100] * 4


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"y": np.ones(4, np.float32)},
            "refresh, batch 0: expected x, got y: x is missing, y is too many. Pass a tree",
        ),
        ({"x": np.ones((4, 2), np.float32)}, "refresh, batch 0, leaf x: expected an array of shape"),
        ({"x": np.ones(4, np.int32)}, "refresh, batch 0, leaf x: expected float32, got int32"),
        ({"x": np.ones(10, np.float32)}, "refresh, batch 0: 10 examples are more than the 8 slots"),
    ],
)
def test_rows_that_do_not_belong_are_an_error(wrong: Any, text: str) -> None:
    """Another structure, shape, dtype or number is named when it is due, and nothing is written."""
    with cache_of() as cache:
        cache.refresh([wrong])
        assert taken(cache) == ALL
        with pytest.raises(ValueError, match=text):
            cache.take([0])
        assert taken(cache) == ALL


def test_errors_count_the_batches_of_each_source() -> None:
    """From 0, however many batches earlier sources have replaced."""
    with cache_of() as cache:
        cache.refresh([rows(0)] * 3)
        for _ in range(4):
            cache.take([0])
        cache.refresh([rows(1), {"x": np.ones(4, np.int32)}])
        cache.take([0])
        with pytest.raises(ValueError, match="refresh, batch 1, leaf x: expected float32, got int32"):
            cache.take([0])
        assert cache.refreshes == 4


def test_rows_of_any_number_are_no_warning(caplog: Any) -> None:
    """No step of the loop's sees them: nothing is said of shapes, which may change from batch to batch."""
    with cache_of() as cache:
        cache.refresh([rows(0), rows(1, 2), rows(2, 8)])
        assert [taken(cache)[0] for _ in range(4)] == [0, 100, 100, 102]
    assert not caplog.records


@pytest.mark.parametrize(
    ("place", "where", "cure"),
    [
        ("default", "refresh, batch 0", "Pass a tree"),
        ("split", "refresh, batch 0", "Pass a tree"),
        ("inner axis, too", "Batch 0: sharding is not a prefix", "Yield the"),
    ],
)
def test_wrong_keys_are_named(place: str, where: str, cure: str) -> None:
    """Which are missing and which too many, wherever the examples lie, and nothing is written."""
    told = f"{where}: expected n, x, got x, y: n is missing, y is too many. {cure}"
    with DeviceCache(8, examples(*range(8)), sharding=PLACES[place]) as cache:
        cache.refresh([{"x": np.ones((8, 4), np.float32), "y": np.ones(8, np.int32)}])
        before = np.asarray(cache.take(range(8))["n"]).tolist()
        with pytest.raises(ValueError, match=told):
            cache.take(range(8))
        assert np.asarray(cache.take(range(8))["n"]).tolist() == before


@pytest.mark.parametrize("how", ["None", "another", "close"])
def test_the_thread_ends_with_the_refresh(how: str) -> None:
    """`refresh(None)`, another refresh and `close()` end the reading and close the source."""
    gate = Closable(let=1)
    cache = cache_of()
    cache.refresh(Reading(gate))
    gate.wait_asked(2)
    if how == "close":
        cache.close()
    else:
        cache.refresh(None if how == "None" else [])
    assert gate.closed.is_set()
    if how == "another":
        assert taken(cache) == ALL
    cache.close()
    assert not reader_threads()


class Reading(Counts):
    """As `Counts`, with a `close()`."""

    def close(self) -> None:
        self.gate.close()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_refresh_goes_on_after_a_restore() -> None:
    """A restored cache, refreshed from batch `refreshes` on, serves what the saved one would have served."""
    with cache_of(sharding=SPLIT) as cache:
        cache.refresh([rows(j) for j in range(10)], every_takes=3)
        for _ in range(7):
            taken(cache)
        state = cache.get_state()
        expected = [taken(cache) for _ in range(12)]
        with pytest.raises(ValueError, match=r"set_state: a refresh is going on"):
            cache.set_state(state)
    with cache_of(sharding=SPLIT) as other:
        other.set_state(state)
        assert other.refreshes == 2
        other.refresh([rows(j) for j in range(10)][other.refreshes :], every_takes=3)
        assert [taken(other) for _ in range(12)] == expected


def test_actors_hand_over_through_a_queue() -> None:
    """Threads that make examples put them into a queue that the refresh reads; all of them arrive."""
    made: queue.Queue[Any] = queue.Queue(4)

    def actor(first: int) -> None:
        for number in range(first, first + 10):
            made.put(rows(number, 2))

    with cache_of(60, sharding=SPLIT) as cache:
        actors = [threading.Thread(target=actor, args=(10 * i,)) for i in range(3)]
        for thread in actors:
            thread.start()
        cache.refresh(iter(made.get, None))
        seen = [taken(cache) for _ in range(31)][-1]
        assert sorted(seen) == sorted(100 + n for n in range(30) for _ in range(2))
        for thread in actors:
            thread.join()
        made.put(None)


def test_wrong_arguments_are_errors() -> None:
    """They are told at the call, and a refresh that is going on goes on."""
    with cache_of() as cache:
        cache.refresh([rows(0)], every_takes=2)
        with pytest.raises(ValueError, match="every_takes: expected an integer of at least 1"):
            cache.refresh([], every_takes=0)
        with pytest.raises(TypeError, match="source: expected an iterable"):
            cache.refresh(3)  # pyright: ignore[reportArgumentType]
        assert [taken(cache)[0] for _ in range(3)] == [0, 0, 100]


def test_a_process_ends_well_while_a_refresh_goes_on() -> None:
    """Neither a reader at work nor a thread that waits for a batch of a queue holds up or spoils the end."""
    script = """
        import threading, numpy as np, jax
        from jaxprefetch import DeviceCache, DeviceQueue
        cache = DeviceCache(8, {"x": np.zeros(8, np.float32)})
        cache.refresh(({"x": np.ones(4, np.float32)} for _ in range(10**9)))
        batches = cache.batches(4, jax.random.key(0))
        for _ in range(5):
            next(batches)
        queue = DeviceQueue(1)
        threading.Thread(target=queue.get, daemon=True).start()
        print(cache.refreshes)
    """
    assert run_python(textwrap.dedent(script)) == (0, "4\n", "")
