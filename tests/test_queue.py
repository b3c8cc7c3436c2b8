"""`DeviceQueue`: what is put is got, in order and on its devices; the bound, the end, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import threading
from collections.abc import Callable
from queue import Empty, Full
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated import InThread, batch, number, on_devices, refusing, wait
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_interrupts import Strike

from jaxprefetch import DeviceQueue

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
SPLIT = NamedSharding(MESH, PartitionSpec("data"))


def filled(queue: DeviceQueue[Any], *numbers: int, rows: int = 4) -> DeviceQueue[Any]:
    for n in numbers:
        queue.put(batch(n, rows), timeout=0)
    return queue


def rest(queue: DeviceQueue[Any]) -> list[int]:
    """What can be got without waiting."""
    got = []
    try:
        while True:
            got.append(number(queue.get(timeout=0)))
    except (Empty, EOFError):
        return got


# ---- what arrives


@pytest.mark.parametrize("sharding", [None, jax.devices()[2], SPLIT])
def test_batches_come_in_order_on_their_devices(sharding: Any) -> None:
    """First in, first out, placed as `jax.device_put` would."""
    queue = filled(DeviceQueue(5, sharding=sharding), *range(5))
    expected = jax.device_put(batch(0), sharding)["x"]
    for n in range(5):
        got = queue.get()
        assert number(got) == n
        assert got["x"].sharding == expected.sharding
        assert got["x"].committed == expected.committed


def test_a_producer_may_use_its_arrays_again() -> None:
    """What was put does not change when the buffer does, whatever its alignment."""
    queue, raw = DeviceQueue(8), np.zeros(1024, np.uint8)
    for n, offset in enumerate((0, 4, 16, 64)):
        buffer = raw[-raw.ctypes.data % 64 + offset :][:256].view(np.float32)
        buffer[:] = n
        queue.put({"x": buffer})
        buffer[:] = -1
    assert rest(queue) == [0, 1, 2, 3]


def test_arrays_of_the_producers_are_passed() -> None:
    """`jax.Array` leaves come through as they are."""
    queue, array = DeviceQueue(1), jnp.arange(4.0)
    queue.put({"x": array, "n": 3})
    got = queue.get()
    assert got["x"] is array
    assert (got["n"].dtype, got["n"].weak_type) == (jnp.int32, True)


def test_transfers_are_explicit_and_contexts_do_not_matter() -> None:
    """Threads with other settings than those of the call put and get the same."""
    with jax.default_device(jax.devices()[1]):
        queue = DeviceQueue(2)
    with jax.transfer_guard_host_to_device("disallow"), jax.enable_x64(True):
        queue.put({"x": np.arange(4)})
        got = queue.get()
    assert (got["x"].devices(), got["x"].dtype) == ({jax.devices()[1]}, jnp.int32)


# ---- the bound


def test_put_is_refused_when_the_queue_is_full() -> None:
    """At the bound `put` waits until its timeout; after a `get` there is room for one."""
    queue = filled(DeviceQueue(2), 0, 1)
    for timeout in (0, 0.01):
        with pytest.raises(Full, match=f"put: the queue had no room within {timeout} s"):
            queue.put(batch(2), timeout)
    assert len(queue) == 2
    assert number(queue.get()) == 0
    filled(queue, 2)
    with pytest.raises(Full):
        queue.put(batch(3), 0)
    assert rest(queue) == [1, 2]


def test_get_is_refused_when_the_queue_is_empty() -> None:
    """Without a batch `get` waits until its timeout, and loses nothing."""
    queue = DeviceQueue(2)
    for timeout in (0, 0.01):
        with pytest.raises(Empty, match=f"get: no batch came within {timeout} s"):
            queue.get(timeout)
    assert rest(filled(queue, 7)) == [7]
    assert len(queue) == 0


def test_a_waiting_producer_goes_on_when_there_is_room() -> None:
    """`put` without a timeout returns after a `get`, and its batch is the next."""
    queue = filled(DeviceQueue(1), 0)
    thread = InThread(lambda: queue.put(batch(1)))
    assert number(queue.get()) == 0
    thread.result()
    assert number(queue.get()) == 1


def test_a_waiting_consumer_goes_on_when_there_is_a_batch() -> None:
    """`get` without a timeout returns what is put then."""
    queue = DeviceQueue(1)
    threads = [InThread(lambda: number(queue.get())) for _ in range(2)]
    queue.put(batch(0))
    queue.put(batch(1))
    assert sorted(thread.result() for thread in threads) == [0, 1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_device_memory_is_bounded(size: int) -> None:
    """There are at most `size` batches on the devices besides the consumer's."""
    queue, got = DeviceQueue(size), None
    for n in range(20):
        while len(queue) < size:
            queue.put(batch(n, rows=7919))
        got = queue.get()
        assert on_devices(7919) <= size + 1
    del got


def test_max_bytes_counts_the_consumers_batches() -> None:
    """Threads that hold a batch each leave less for the others; when nothing is left, `get` says so for now."""
    queue = DeviceQueue(1, max_bytes=4 * 16)  # four batches
    done, threads = [threading.Event() for _ in range(3)], []

    def hold(event: threading.Event) -> int:
        got = queue.get()
        taken.set()
        wait(event)
        return number(got)

    for n in range(3):
        taken = threading.Event()
        threads.append(InThread(lambda n=n: hold(done[n])))
        queue.put(batch(n))
        wait(taken)
        assert queue._feed.window.max_bytes == 64 - 16 * max(n - 1, 0)
    queue.put(batch(3))
    fourth = queue.get()  # 3 held, and this one
    queue.put(batch(4))
    with pytest.raises(ValueError, match=r"get: 4 threads hold a batch of 16 bytes .* is 80; max_bytes is 64"):
        queue.get()
    for n, thread in enumerate(threads):
        done[n].set()
        assert thread.result() == n
    del thread, threads
    assert [number(fourth), number(queue.get())] == [3, 4]


# ---- the end


def test_what_was_put_before_the_end_can_be_taken() -> None:
    """After `close()` the rest comes, then the end, for every consumer, again and again."""
    queue = filled(DeviceQueue(3), 0, 1, 2)
    queue.close()
    queue.close()
    assert [number(queue.get()) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(EOFError, match="get: this queue is closed, and all of its batches have been taken"):
            queue.get()
    assert list(queue) == []


def test_iteration_goes_on_until_the_end() -> None:
    """A loop over the queue ends when it is closed and empty."""
    queue = DeviceQueue(2)

    def produce() -> None:
        for n in range(10):
            queue.put(batch(n))
        queue.close()

    thread = InThread(produce)
    assert [number(b) for b in queue] == list(range(10))
    thread.result()


def test_a_closed_queue_takes_no_more() -> None:
    """`put` after the end is an error, also for producers that wait."""
    queue = filled(DeviceQueue(1), 0)
    waiting = InThread(lambda: queue.put(batch(1)))
    queue.close()
    with pytest.raises(ValueError, match="put: this queue is closed"):
        waiting.result()
    with pytest.raises(ValueError, match="put: this queue is closed"):
        queue.put(batch(2), timeout=0)
    assert rest(queue) == [0]


def test_waiting_consumers_learn_of_the_end() -> None:
    """`get` of an empty queue ends when it is closed."""
    queue = DeviceQueue(1)
    waiting = [InThread(queue.get) for _ in range(3)]
    queue.close()
    for thread in waiting:
        with pytest.raises(EOFError, match="closed"):
            thread.result()


def test_a_put_that_is_staging_when_the_queue_closes_is_refused() -> None:
    """A batch that was not accepted before the end is not delivered after it."""
    queue, inside, leave = DeviceQueue(2), threading.Event(), threading.Event()

    class Slow:
        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            inside.set()
            wait(leave)
            return np.ones(4, np.float32)

    thread = InThread(lambda: queue.put({"x": Slow()}))
    wait(inside)
    queue.close()
    leave.set()
    with pytest.raises(ValueError, match="put: this queue is closed"):
        thread.result()
    assert list(queue) == []


def test_leaving_the_context_drops_what_is_left() -> None:
    """Afterwards no batch is on the devices but the consumer's."""
    with filled(DeviceQueue(3), 0, 1, 2, rows=6007) as queue:
        got = queue.get()
    assert on_devices(6007) == 1
    assert number(got) == 0
    assert rest(queue) == []


def test_a_dropped_queue_leaves_nothing() -> None:
    """A queue that nobody refers to takes its batches with it."""
    queue = filled(DeviceQueue(3), 0, 1, 2, rows=6011)
    queue.get()
    del queue
    gc.collect()
    assert on_devices(6011) == 0


# ---- clear


def test_clear_empties_it() -> None:
    """What was put and not taken is gone, on the host and on the devices, and the queue goes on."""
    queue = filled(DeviceQueue(3), 0, 1, 2, rows=6029)
    got = queue.get()  # 1 and 2 are on the devices, too
    filled(queue, 3, rows=6029)
    queue.clear()
    assert len(queue) == 0
    assert on_devices(6029) == 1
    assert rest(filled(queue, 4, 5, rows=6029)) == [4, 5]
    queue.clear()
    queue.clear()
    assert rest(filled(queue, 6, rows=6029)) == [6]
    assert number(got) == 0


def test_clear_gives_room_to_waiting_producers() -> None:
    """A producer that waits at the bound goes on, and what it puts then is there."""
    queue = filled(DeviceQueue(1), 0)
    waiting = InThread(lambda: queue.put(batch(1)))
    queue.clear()
    waiting.result()
    assert rest(queue) == [1]


def test_a_closed_queue_stays_closed_when_it_is_cleared() -> None:
    """Clearing a queue that has ended leaves the end."""
    queue = filled(DeviceQueue(2), 0, 1)
    queue.close()
    queue.clear()
    assert list(queue) == []
    queue.clear()
    with pytest.raises(ValueError, match="closed"):
        queue.put(batch(2))


# ---- errors


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"y": np.ones(4, np.float32)}, ValueError, "Batch 1: expected x, got y: x is missing, y is too many, against"),
        ({"x": np.ones(4, np.float32), "y": 1}, ValueError, "Batch 1: expected x, got x, y: y is too many"),
        (
            {},
            ValueError,
            "Batch 1: expected x, got none: x is missing, against .* once: put only batches like it, or make",
        ),
        ({"x": np.ones(8, np.float32)}, ValueError, r"leaf x was float32\[4\] and is float32\[8\], .* once: pad them"),
        ({"x": np.ones(4, np.int32)}, ValueError, r"leaf x was float32\[4\] and is int32\[4\], .* put only"),
        ({"x": np.ones(3, np.float32)}, ValueError, "leaf x: axis 0 has 3 rows; the 4 devices along mesh axis 'data'"),
        ({"x": "text"}, TypeError, "leaf x: str cannot go to a device"),
    ],
)
def test_a_batch_that_does_not_belong_changes_nothing(wrong: Any, error: type[Exception], text: str) -> None:
    """Another structure, shape or dtype, or rows that do not divide, are the producer's error; the queue goes on."""
    queue = filled(DeviceQueue(3, sharding=SPLIT), 0)
    for _ in range(5):
        with pytest.raises(error, match=text):
            queue.put(wrong)
    assert len(queue) == 1
    assert rest(filled(queue, 1, 2)) == [0, 1, 2]


def test_after_clear_batches_are_still_compared_with_the_first_one_ever_put() -> None:
    """Numbers begin anew, so the error does not compare batch 0 with itself; it names every leaf that differs."""
    queue = DeviceQueue(2)
    queue.put({"x": np.ones(4, np.float32), "y": np.ones(4, np.float32), "z": 1})
    queue.clear()
    told = (
        r"^Batch 0: expected x, y, z, got x, y: z is missing; leaf x was float32\[4\] and is float32\[2\], "
        r"leaf y was float32\[4\] and is int32\[4\], against the first batch ever put into this queue\. .* put only"
    )
    with pytest.raises(ValueError, match=told):
        queue.put({"x": np.ones(2, np.float32), "y": np.ones(4, np.int32)})


def test_the_first_batch_may_be_refused() -> None:
    """A batch that cannot go anywhere does not say what batches are like."""
    queue = DeviceQueue(2)
    with pytest.raises(TypeError, match="leaf x: str cannot go to a device"):
        queue.put({"x": "text"})
    assert rest(filled(queue, 0)) == [0]


def test_a_put_on_the_devices_that_fails_is_the_end(monkeypatch: Any) -> None:
    """Batches before it come, then the error, again and again; producers are told."""
    queue = filled(DeviceQueue(3), 0, 1, 2)
    refusing(monkeypatch, 1, RuntimeError("INTERNAL: broken"), times=9)
    assert number(queue.get()) == 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="INTERNAL: broken"):
            queue.get()
    with pytest.raises(ValueError, match=r"put: this queue has failed, and get\(\) raises RuntimeError\('INTERNAL"):
        queue.put(batch(3))
    queue.clear()
    with pytest.raises(RuntimeError, match="INTERNAL: broken"):
        queue.get()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses a traceback that is set by Python code."""

    code: int


@jax.tree_util.register_pytree_node_class
class OnHostOnly:
    """A node that refuses arrays on devices."""

    def __init__(self, x: Any):
        self.x = x

    def tree_flatten(self) -> Any:
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> OnHostOnly:
        if isinstance(children[0], jax.Array):
            raise Frozen(3)
        return cls(*children)


def test_what_a_node_raises_arrives_as_it_is() -> None:
    """Also an exception that is a frozen dataclass, each time."""
    queue: DeviceQueue[Any] = DeviceQueue(2)
    queue.put(OnHostOnly(np.zeros(3)))
    for _ in range(2):
        with pytest.raises(Frozen, match="3"):
            queue.get(timeout=0)


def test_a_ctrl_c_after_the_hand_out_loses_nothing(monkeypatch: Any) -> None:
    """The batch that was taken when it struck comes first at the next call."""
    queue = filled(DeviceQueue(3), 0, 1)
    run, struck = queue._turn.run, []

    def torn(work: Callable[[], None], timeout: float | None = None) -> bool:
        its_turn = run(work, timeout)
        if not struck:
            struck.append(True)
            raise KeyboardInterrupt
        return its_turn

    monkeypatch.setattr(queue._turn, "run", torn)
    with pytest.raises(KeyboardInterrupt):
        queue.get()
    assert rest(queue) == [0, 1]


class Bell:
    """Hung up as that of a thread that waits would be."""

    def __init__(self, queue: DeviceQueue[Any]):
        self.rung = False
        queue._inbox._bells._hung.add(self)  # type: ignore[arg-type]

    def put(self, item: None) -> None:
        self.rung = True


def struck_anywhere(
    make: Callable[[], DeviceQueue[Any]],
    call: Callable[[DeviceQueue[Any]], Any],
    check: Callable[[DeviceQueue[Any], Bell, list[int]], None],
) -> None:
    """Calls it with a Ctrl-C at each place where one may strike, and checks what was got and the queue afterwards."""

    def once(at: int) -> int:
        queue, strike, got = make(), Strike(at, also=threading.__file__), None
        bell = Bell(queue)
        sys.setprofile(strike)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                got = call(queue)
                sys.setprofile(None)
        finally:
            sys.setprofile(None)
        try:
            check(queue, bell, [] if got is None else [number(got)])
        except BaseException as error:
            error.add_note(f"struck at place {at}")
            raise
        return strike.places

    places = once(0)
    assert places
    for at in range(1, places + 1):
        once(at)


def still_holds_two(queue: DeviceQueue[Any]) -> None:
    """An empty queue of that size works, and there is room for as many as ever."""
    assert len(queue) == 0
    filled(queue, 8, 9)
    with pytest.raises(Full):
        queue.put(batch(0), timeout=0)
    assert rest(queue) == [8, 9]


def test_two_batches_have_to_fit() -> None:
    """What no consumer could take beside its own batch is refused where it is put; a smaller one is taken."""
    one = batch(0)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(one))
    queue: DeviceQueue[Any] = DeviceQueue(2, max_bytes=2 * nbytes)
    with pytest.raises(ValueError, match=f"Batch 0: it takes {2 * nbytes:,} bytes on a device.*have to fit"):
        queue.put(batch(0, 8))
    assert rest(filled(queue, 0, 1)) == [0, 1]


def test_a_ctrl_c_anywhere_in_put_takes_no_room() -> None:
    """The batch was left, and who waits for it knows, or it was not; there is room for as many as ever."""

    def check(queue: DeviceQueue[Any], bell: Bell, got: list[int]) -> None:
        left = len(queue) - 1
        assert bell.rung or not left
        assert rest(queue) == [0, 1][: 1 + left]
        still_holds_two(queue)

    struck_anywhere(lambda: filled(DeviceQueue(2), 0), lambda queue: queue.put(batch(1), timeout=0), check)


def test_a_ctrl_c_anywhere_in_a_put_that_fails_takes_no_room() -> None:
    """Room that was taken for a batch that cannot be staged is there again, and who waits for it knows."""
    bells: list[Bell] = []

    def failing(queue: DeviceQueue[Any], batch: Any) -> Any:
        bells.append(Bell(queue))  # of a producer that finds no room from now on
        raise ValueError("no batch")

    def put(queue: DeviceQueue[Any]) -> None:
        bells.clear()
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ValueError):
            patch.setattr(DeviceQueue, "_staged", failing)
            queue.put(batch(1), timeout=0)

    def check(queue: DeviceQueue[Any], bell: Bell, got: list[int]) -> None:
        assert all(bell.rung for bell in bells)
        assert rest(queue) == [0]
        still_holds_two(queue)

    struck_anywhere(lambda: filled(DeviceQueue(2), 0), put, check)


@pytest.mark.parametrize("max_bytes", [None, 1024])
def test_a_ctrl_c_anywhere_in_get_loses_nothing(max_bytes: int | None) -> None:
    """The batch is got or still counts as being there, where another thread may take it; who waits knows."""

    def check(queue: DeviceQueue[Any], bell: Bell, got: list[int]) -> None:
        assert bell.rung or len(queue) == 2
        assert len(queue) + len(got) == 2
        taken = InThread(lambda: number(queue.get(timeout=0)))
        assert [*got, taken.result(), *rest(queue)] == [0, 1]
        still_holds_two(queue)

    def get(queue: DeviceQueue[Any]) -> Any:
        return queue.get()

    struck_anywhere(lambda: filled(DeviceQueue(2, max_bytes=max_bytes), 0, 1), get, check)


def test_a_waiting_consumer_takes_what_a_ctrl_c_kept_from_another() -> None:
    """It is woken for a batch that was put back."""
    queue, waits = filled(DeviceQueue(2), 0), threading.Event()
    hold = DeviceQueue._hold
    threads: list[InThread] = []

    def struck(queue: DeviceQueue[Any], batch: Any) -> None:
        if threads:
            hold(queue, batch)
            return
        bells, look = queue._inbox._bells, queue._inbox._bells._look
        patch.setattr(bells, "_look", lambda ready: look(ready) or waits.set())
        threads.append(InThread(lambda: number(queue.get())))
        wait(waits)
        assert bells._hung
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceQueue, "_hold", struck)
        with pytest.raises(KeyboardInterrupt):
            queue.get()
        assert threads[0].result() == 0


def test_a_ctrl_c_anywhere_in_clear_leaves_a_queue_that_works() -> None:
    """It is cleared or as it was; who waits for room knows; what is put afterwards comes."""

    def check(queue: DeviceQueue[Any], bell: Bell, got: list[int]) -> None:
        assert bell.rung or len(queue) == 2
        if room := 2 - len(queue):
            filled(queue, *range(5, 5 + room))
        left = rest(queue)
        assert left[len(left) - room :] == [5, 6][:room]
        assert left[: len(left) - room] in ([], [1], [0, 1])
        still_holds_two(queue)

    def make() -> DeviceQueue[Any]:
        queue = filled(DeviceQueue(2), 7, 0)
        assert number(queue.get()) == 7  # so that batch 0 is on its device
        return filled(queue, 1)

    struck_anywhere(make, lambda queue: queue.clear(), check)


def test_a_ctrl_c_anywhere_in_close_wakes_who_waits() -> None:
    """It is closed and told, or it is not closed."""

    def check(queue: DeviceQueue[Any], bell: Bell, got: list[int]) -> None:
        assert bell.rung or not queue._inbox._closed

    struck_anywhere(lambda: DeviceQueue(1), lambda queue: queue.close(), check)


@pytest.mark.parametrize("timeout", [1e10, 1e300, float("inf"), np.float32("inf")])
def test_a_timeout_beyond_all_clocks_is_none(timeout: Any) -> None:
    """`get` and `put` wait for as long as it takes."""
    queue = DeviceQueue(1)
    consumer = InThread(lambda: number(queue.get(timeout)))
    queue.put(batch(0))
    assert consumer.result() == 0
    filled(queue, 1)
    producer = InThread(lambda: queue.put(batch(2), timeout))
    assert number(queue.get()) == 1
    producer.result()
    assert rest(queue) == [2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"size": 0}, "size: expected an integer of at least 1"),
        ({"size": 2, "max_bytes": "much"}, "max_bytes: expected bytes"),
    ],
)
def test_wrong_arguments_are_errors(arguments: Any, text: str) -> None:
    """They are told at the call."""
    with pytest.raises(ValueError, match=text):
        DeviceQueue(**arguments)
