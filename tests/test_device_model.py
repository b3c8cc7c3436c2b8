"""What the window promises in time and in memory, on a model of one accelerator, and that each promise can fail."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from device_model import (
    DISPOSES,
    DROPS,
    FREE,
    KEEPS,
    MEASURED,
    SYNCHRONISES,
    Costs,
    Deadlock,
    Model,
    NoRoom,
    Result,
    Timeline,
    perfect,
)

from jaxprefetch.device.window import Action, Do, Window

STEP_S = 0.010
BATCHES = 500
COSTS = {"free": FREE, "measured": MEASURED}
RELEASES = ["landing", "fence"]

by_costs = pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS.keys())
by_deleting = pytest.mark.parametrize("delete_used", [False, True], ids=["keep", "delete_used"])
by_release = pytest.mark.parametrize("released_by", RELEASES)
by_size = pytest.mark.parametrize("size", [1, 2, 3, 4])


# ---- mutations: windows and a driver that break one rule each


class LeadOfOne(Window):
    """Issues batch k+1 only after step k has been dispatched."""

    def decide(self) -> Action:
        action = super().decide()
        if action[0] is Do.ISSUE and action[1] > self.taken:
            return (Do.HAND_OUT, self.taken)
        return action


class HandsOutAtOnce(Window):
    """Never waits for the next batch once it has one."""

    def decide(self) -> Action:
        action = super().decide()
        if action[0] in (Do.AWAIT_STAGED, Do.FENCE):
            return (Do.HAND_OUT, self.taken)
        return action


class AlwaysWaitsForTheNext(Window):
    """Keeps a batch until the next one has been staged, however long that takes."""

    def decide(self) -> Action:
        action = super().decide()
        return (Do.AWAIT_SOURCE, action[1]) if action[0] in (Do.AWAIT_STAGED, Do.FENCE) else action


class NotGated(Model):
    """Tells the window that batches have landed and fences are done without ever looking."""

    def _wait_for(self, kind: str, batch: int) -> None:
        pass


# ---- the runs


def constant(source: float, copy: float, batches: int = BATCHES) -> tuple[list[float], list[float], list[float]]:
    """S, X and C of a run with constant times, in steps."""
    return [source * STEP_S] * batches, [copy * STEP_S] * batches, [STEP_S] * batches


def drawn(rng: np.random.Generator, mean_s: float, batches: int) -> list[float]:
    """Times that are constant, jitter, jitter wildly, hiccup, or come in bursts."""
    factors = [
        np.ones(batches),
        rng.lognormal(0, 0.3, batches),
        rng.lognormal(0, 1, batches),
        np.where(rng.random(batches) < 0.05, 5.0, 1.0),
        np.arange(batches) % 4 // 3 * 4.0,
    ]
    return [float(f) * mean_s for f in factors[rng.integers(len(factors))]]


def promised(source: list[float], copy: list[float], step: list[float], host_s: float) -> float:
    """The makespan that constant times may take."""
    slowest = max(source[0], copy[0], step[0])
    return 1.005 * slowest * len(step) + 3 * slowest + host_s


def limit(size: int, delete_used: bool) -> int:
    return size if delete_used else size + 1


def run(times, *, mutation: type[Window] = Window, model: type[Model] = Model, size: int = 2, **options) -> Result:
    """One run; options of the window are picked out, the others are the model's."""
    picked = {name: options.pop(name) for name in ("delete_used", "max_bytes") if name in options}
    released_by = options.pop("released_by", "landing")
    window = mutation(size, released_by=released_by, **picked)
    result = model(*times, window=window, compute_order=released_by == "landing", **options).run()
    assert result.handed_out == list(range(len(times[0])))
    return result


# ---- time


@by_costs
@pytest.mark.parametrize(
    ("size", "host_size", "delete_used"), [(2, 4, False), (2, 2, True), (3, 4, True), (2, 1, False)]
)
def test_constant_times_run_at_the_pace_of_the_slowest(costs: Costs, size: int, host_size: int, delete_used: bool):
    """With constant times the loop is as fast as the slowest of source, copy and step, whichever that is."""
    for source, copy in itertools.product((0.0, 0.9, 1.0, 1.01, 1.05, 1.5), (0.1, 0.43, 1.0, 1.2)):
        times = constant(source, copy)
        result = run(times, size=size, host_size=host_size, costs=costs, delete_used=delete_used)
        assert result.makespan <= promised(*times, result.host_s), (source, copy)


@by_size
@by_deleting
def test_a_source_that_keeps_up_gets_all_that_its_buffers_allow(size: int, delete_used: bool):
    """When nothing waits for the source the makespan is the best for `size` buffers, plus host costs at most."""
    rng = np.random.default_rng(size)
    for _ in range(12):
        times = [0.0] * 200, drawn(rng, rng.uniform(0.1, 1.5) * STEP_S, 200), drawn(rng, STEP_S, 200)
        consumer = str(rng.choice([KEEPS, DROPS]))
        best = perfect(*times, size)
        free = run(times, size=size, delete_used=delete_used, consumer=consumer)
        assert free.makespan == pytest.approx(best, rel=1e-9)
        costly = run(times, size=size, delete_used=delete_used, consumer=consumer, costs=MEASURED)
        assert best <= costly.makespan <= best + costly.host_s + 1e-9


@by_size
@by_deleting
def test_release_by_fence_is_as_fast_as_its_buffers_allow(size: int, delete_used: bool):
    """Where the fence of its step releases a batch, the makespan lies between the best for the bound and for `size`."""
    rng = np.random.default_rng(10 + size)
    for _ in range(12):
        times = [0.0] * 200, drawn(rng, rng.uniform(0.1, 1.5) * STEP_S, 200), drawn(rng, STEP_S, 200)
        result = run(times, size=size, delete_used=delete_used, released_by="fence")
        assert perfect(*times, limit(size, delete_used)) - 1e-9 <= result.makespan <= perfect(*times, size) + 1e-9


@by_release
@by_deleting
@pytest.mark.parametrize("size", [2, 3])
def test_a_consumer_that_deletes_or_donates_loses_little(released_by: str, delete_used: bool, size: int):
    """A loop that deletes or donates every batch loses at most a few percent at steps of 10 ms."""
    options = {"size": size, "delete_used": delete_used, "released_by": released_by, "consumer": DISPOSES}
    for source, copy in itertools.product((0.0, 0.9, 1.0, 1.05), (0.1, 0.43, 0.9)):
        times = constant(source, copy, 300)
        result = run(times, costs=MEASURED, **options)
        assert result.makespan <= (1.05 * 300 + 2) * max(source, copy, 1) * STEP_S, (source, copy)
        assert result.peak_batches <= limit(size, delete_used)


def test_the_first_batch_goes_out_at_once():
    """Batch 0 does not wait for batch 1."""
    assert run(constant(1.0, 0.5, 10)).first_s == pytest.approx(1.0 * STEP_S)


@by_release
@by_deleting
@pytest.mark.parametrize("consumer", [KEEPS, DROPS, DISPOSES, SYNCHRONISES])
def test_an_on_demand_source_never_deadlocks(released_by: str, delete_used: bool, consumer: str):
    """A source that needs the result of step k to make batch k+1 gets it, soon after the step has ended."""
    rng = np.random.default_rng(20)
    for size, host_size, costs in itertools.product((1, 2, 3), (1, 4), COSTS.values()):
        times = tuple(drawn(rng, mean * STEP_S, 40) for mean in (0.5, 0.5, 1.0))
        options = {"delete_used": delete_used, "released_by": released_by, "consumer": consumer}
        result = run(times, size=size, host_size=host_size, costs=costs, on_demand=True, **options)
        serial = sum(map(sum, times))
        assert result.makespan <= 1.1 * serial + result.host_s


# ---- memory


@by_size
@by_deleting
@by_release
def test_memory_stays_within_the_bound(size: int, delete_used: bool, released_by: str):
    """Whatever the times and the consumer, at most `size` batches are held with `delete_used`, one more without."""
    rng = np.random.default_rng(30 + size)
    for _ in range(20):
        times = tuple(drawn(rng, rng.uniform(0.05, 1.5) * STEP_S, 100) for _ in range(3))
        consumer = str(rng.choice([KEEPS, DROPS, DISPOSES, SYNCHRONISES]))
        options = {"delete_used": delete_used, "released_by": released_by, "consumer": consumer}
        costs = list(COSTS.values())[rng.integers(2)]
        result = run(times, size=size, host_size=int(rng.integers(1, 5)), costs=costs, **options)
        assert result.peak_batches == max(result.held_after_issue) <= limit(size, delete_used)
        assert max(result.unfinished_at_issue) <= size * (2 if consumer == DISPOSES else 1)


@by_size
@by_deleting
@by_release
def test_memory_reaches_the_bound_where_the_source_keeps_up(size: int, delete_used: bool, released_by: str):
    """With a source that keeps up all of the memory that was granted is used."""
    result = run(constant(0.0, 0.4, 50), size=size, delete_used=delete_used, released_by=released_by)
    assert result.peak_batches == limit(size, delete_used)


@by_size
@by_deleting
@by_release
def test_ragged_batches_stay_within_max_bytes(size: int, delete_used: bool, released_by: str):
    """With batches of different sizes neither the bytes held nor the batches held exceed their limits."""
    rng = np.random.default_rng(40 + size)
    for consumer in (KEEPS, DROPS, DISPOSES, SYNCHRONISES) * 3:
        sizes = [int(n) for n in rng.integers(25, 101, 150)]
        most = int(rng.integers(100 if delete_used else 200, 401))
        times = drawn(rng, 0.5 * STEP_S, 150), [n / 100 * STEP_S for n in sizes], drawn(rng, STEP_S, 150)
        options = {"delete_used": delete_used, "released_by": released_by, "consumer": consumer, "sizes": sizes}
        result = run(times, size=size, max_bytes=most, costs=MEASURED, **options)
        assert result.peak_bytes <= most
        assert result.peak_batches <= limit(size, delete_used)


@by_size
@by_deleting
@by_release
def test_hand_outs_that_add_bytes_stay_within_max_bytes(size: int, delete_used: bool, released_by: str):
    """With outputs of different sizes the bytes held never exceed the limit, not even for the time of a hand-out."""
    rng = np.random.default_rng(60 + size)
    for consumer in (KEEPS, DROPS, DISPOSES, SYNCHRONISES) * 3:
        sizes, outs = ([int(n) for n in rng.integers(low, 101, 150)] for low in (25, 0))
        most = int(rng.integers(200 if delete_used else 400, 701))
        times = drawn(rng, 0.5 * STEP_S, 150), [n / 100 * STEP_S for n in sizes], drawn(rng, STEP_S, 150)
        options = {"delete_used": delete_used, "released_by": released_by, "consumer": consumer}
        result = run(times, size=size, max_bytes=most, costs=MEASURED, sizes=sizes, outs=outs, **options)
        assert result.peak_bytes <= most
        assert result.peak_batches <= limit(size, delete_used)


@by_deleting
def test_room_for_outputs_is_used_to_the_last_byte(delete_used: bool):
    """Of four batches that go ahead the last fits just so with what hand-outs add, and one byte less is one less."""
    times, outs = constant(0.0, 0.4, 50), [20] * 50
    options = {"size": 4, "delete_used": delete_used, "sizes": [10] * 50, "outs": outs}
    most = 60 if delete_used else 90  # four batches ahead; the one handed out and the one before have outputs
    assert run(times, max_bytes=most, **options).peak_bytes == most
    assert run(times, max_bytes=most - 1, **options).peak_bytes == most - 10


@by_deleting
def test_max_bytes_is_used_to_the_last_byte(delete_used: bool):
    """A limit of bytes that is a whole number of batches is filled, and one byte less holds one batch less."""
    times, sizes = constant(0.0, 0.4, 50), [10] * 50
    options = {"size": 4, "delete_used": delete_used, "sizes": sizes}
    assert run(times, max_bytes=30, **options).peak_bytes == 30
    assert run(times, max_bytes=29, **options).peak_bytes == 20


@by_deleting
def test_the_least_that_must_fit_is_enough(delete_used: bool):
    """One batch with `delete_used`, two without, are enough to run the loop; one byte less is an error."""
    least = 10 if delete_used else 20
    times, options = constant(0.5, 0.4, 20), {"delete_used": delete_used, "sizes": [10] * 20}
    assert run(times, max_bytes=least, **options).peak_bytes == least
    with pytest.raises(NoRoom, match=r"batch \d: \(needed, charged, by the hand-out\) = \(10, \d+, 0\)"):
        run(times, max_bytes=least - 1, **options)


# ---- order


def test_events_at_equal_times_happen_by_sequence():
    """What was scheduled first happens first when the times are equal."""
    timeline, happened = Timeline(), []
    for name, time in (("a", 2.0), ("b", 1.0), ("c", 2.0), ("d", 1.0)):
        timeline.schedule(time, name, 0, lambda name=name: happened.append(name))
    timeline.advance(2.0)
    assert happened == ["b", "d", "a", "c"]
    assert [event.kind for event in timeline.log] == happened


@by_release
def test_a_batch_goes_through_its_states_in_order(released_by: str):
    """The log is in order of time and sequence, and every batch is staged, issued, copied and used, in that order."""
    times = constant(1.0, 0.5, 60)
    log = run(times, released_by=released_by).log
    assert [event.time for event in log] == sorted(event.time for event in log)
    place = {(event.kind, event.batch): i for i, event in enumerate(log)}
    walk = ["staged", "issued", "copied", "ended"]
    for j in range(60):
        assert [place[kind, j] for kind in walk] == sorted(place[kind, j] for kind in walk)
        assert place["issued", j] < place["handed out", j] < place["dispatched", j] < place["ended", j]
        if j:
            assert all(place[kind, j - 1] < place[kind, j] for kind in [*walk, "handed out"])


@by_release
@pytest.mark.parametrize("source", [0.0, 1.0, 1.2])
def test_a_batch_is_put_before_the_step_ahead_of_it_unless_the_device_is_idle(released_by: str, source: float):
    """Batch j is issued before step j-1 is dispatched; only when step j-2 has ended may step j-1 go first."""
    log = run(constant(source, 0.5, 60), released_by=released_by, costs=MEASURED).log
    place = {(event.kind, event.batch): i for i, event in enumerate(log)}
    for j in range(2, 60):
        before = place["issued", j] < place["dispatched", j - 1]
        assert before or place["ended", j - 2] < place["dispatched", j - 1]


def test_equal_runs_are_equal():
    """The model has no hidden state: the same run gives the same log."""
    rng = np.random.default_rng(50)
    times = tuple(drawn(rng, STEP_S, 100) for _ in range(3))
    assert run(times, costs=MEASURED) == run(times, costs=MEASURED)


# ---- the mutations fail


def test_a_lead_of_one_fails_the_makespan():
    """Issuing only after the step was dispatched puts every copy behind a step, which the bound does not allow."""
    times = constant(0.0, 0.43)
    result = run(times, mutation=LeadOfOne)
    assert result.makespan > promised(*times, result.host_s)
    assert result.makespan == pytest.approx(1.43 * STEP_S * BATCHES, rel=0.01)
    assert result.makespan > 1.3 * perfect(*times, 2) + result.host_s


@by_release
@by_deleting
def test_a_driver_without_a_gate_fails_the_memory(released_by: str, delete_used: bool):
    """Without waiting for what has landed, copies pile up far above the bound."""
    options = {"delete_used": delete_used, "released_by": released_by}
    result = run(constant(0.0, 0.43, 100), model=NotGated, **options)
    assert result.peak_batches > 5 * limit(2, delete_used)


def test_a_driver_without_a_gate_fails_the_bytes():
    """Without waiting for what has landed, the limit of bytes is exceeded too."""
    result = run(constant(0.0, 0.43, 100), model=NotGated, max_bytes=30, sizes=[10] * 100)
    assert result.peak_bytes > 100


@by_costs
@pytest.mark.parametrize("host_size", [1, 2])
def test_handing_out_at_once_fails_the_makespan(costs: Costs, host_size: int):
    """A batch that goes out although the next is about to come gives the lead away, and the bound shows it."""
    times = constant(0.99, 0.43)
    result = run(times, mutation=HandsOutAtOnce, host_size=host_size, costs=costs)
    assert result.makespan > 1.1 * promised(*times, result.host_s)


def test_always_waiting_for_the_next_fails_on_demand():
    """A window that holds a batch back until the next one is staged deadlocks a source that needs its result."""
    with pytest.raises(Deadlock, match="nothing is scheduled"):
        run(constant(0.5, 0.4, 20), mutation=AlwaysWaitsForTheNext, on_demand=True)
