"""Slots: one a batch, aligned, reused only when freed, registered and unregistered in the right order."""

from __future__ import annotations

import gc
import logging
import math
import mmap
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from queue import SimpleQueue

import ml_dtypes
import numpy as np
import pytest
from test_interrupts import Strike

from jaxprefetch.device.pinning import Pinning
from jaxprefetch.device.plan import HOST_ALIGNMENT
from jaxprefetch.host import copying
from jaxprefetch.host.copying import Copier
from jaxprefetch.host.slots import ALIGNMENT, Fresh, Slots

F32 = np.dtype(np.float32)


class Driver:
    """Says what is registered now."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int):
        assert address not in self.registered
        self.registered[address] = nbytes
        return lambda: self.registered.pop(address)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_slot_that_is_free_is_used_again() -> None:
    """The same memory serves the next batch of the same size once it is freed, and not before."""
    slots = Slots()
    first, second = slots.take(1000), slots.take(1000)
    assert not np.shares_memory(first.view(0, F32, (250,)), second.view(0, F32, (250,)))
    memory = first.view(0, F32, (250,))
    first.free()
    assert np.shares_memory(slots.take(1000).view(0, F32, (250,)), memory)


def test_a_slot_is_freed_once() -> None:
    """Freeing again does not give the memory to two batches."""
    slots = Slots()
    slot = slots.take(100)
    slot.free()
    slot.free()
    first, second = slots.take(100).view(0, F32, (8,)), slots.take(100).view(0, F32, (8,))
    assert not np.shares_memory(first, second)


def test_plans_and_slots_agree_on_alignment() -> None:
    """Where a plan begins a leaf is where a slot has an aligned place; the two do not know each other."""
    assert HOST_ALIGNMENT == ALIGNMENT


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 1, 4), (1, 1), (7,)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64, np.complex64, np.bool_, ml_dtypes.bfloat16])
@pytest.mark.parametrize("memory", [Slots().take(4096), Fresh()])
def test_views_are_what_a_device_reads_at_once(shape, dtype, memory) -> None:
    """Views are aligned, writable, and have default strides, also where an axis is 1."""
    view = memory.view(2 * ALIGNMENT, np.dtype(dtype), shape)
    assert view.shape == shape
    assert view.dtype == dtype
    assert view.flags.writeable
    assert not view.size or address(view) % ALIGNMENT == 0
    step, strides = view.itemsize, []
    for n in reversed(shape):
        strides.append(step)
        step *= n
    assert not view.size or view.strides == tuple(reversed(strides))


def test_fresh_memory_goes_leaf_by_leaf() -> None:
    """Arrays that are not from a slot share nothing, so one that is kept keeps no other."""
    fresh = Fresh()
    assert fresh.view(0, F32, (4,)).base is not fresh.view(0, F32, (4,)).base


def test_similar_sizes_share_slots() -> None:
    """Batches of changing lengths find the slots of others that are nearly as long."""
    slots = Slots()
    for nbytes in (1_000_000, 1_030_000, 1_010_000):
        slots.take(nbytes).free()
    assert slots.mapped_bytes < 1.15 * 1_030_000


@pytest.mark.parametrize(
    "nbytes", [0, 1, 4096, 4097, 2 << 20, (2 << 20) + 64, 3_000_000, 10_000_001, 16 << 20, (16 << 20) + 1, 40_000_001]
)
def test_slots_are_large_enough_and_not_much_larger(nbytes) -> None:
    """A slot has the bytes that were asked for, and wastes an eighth or a page at most."""
    slots = Slots()
    view = slots.take(nbytes).view(0, np.dtype(np.uint8), (nbytes,))
    view[...] = 1
    assert nbytes <= slots.mapped_bytes <= max(nbytes * 9 / 8, nbytes + mmap.PAGESIZE)
    assert slots.mapped_bytes % (mmap.PAGESIZE if nbytes < 16 << 20 else 2 << 20) == 0


def test_memory_is_unregistered_when_the_last_array_in_it_goes() -> None:
    """A slot that is dropped, not freed, stays registered for as long as some view of it may be read."""
    driver = Driver()
    slots = Slots(register=driver.register)
    slot = slots.take(5000)
    view = slot.view(64, F32, (10,))[3:]
    assert list(driver.registered.values()) == [slots.mapped_bytes]
    del slot
    slots.clear()
    gc.collect()
    assert driver.registered
    del view
    assert not driver.registered
    assert slots.mapped_bytes == 0


def test_memory_is_unregistered_before_it_is_unmapped() -> None:
    """The driver never hears of memory that is gone already: its place may have been given to someone else."""
    there: list[bool] = []

    def register(address: int, nbytes: int) -> Callable[[], None]:
        return lambda: there.append(_is_mapped(address))

    slots = Slots(register=register)
    view = slots.take(5000).view(0, F32, (10,))
    address = view.ctypes.data
    slots.clear()
    assert _is_mapped(address)
    del view
    assert there == [True]
    assert not _is_mapped(address)


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < end for start, end in ranges)


def test_an_interrupt_as_the_finaliser_is_made_leaves_nothing_registered(monkeypatch) -> None:
    """Memory is registered only when there is something that will unregister it."""

    def interrupted(*args):
        raise KeyboardInterrupt("now")

    driver = Driver()
    slots = Slots(register=driver.register)
    monkeypatch.setattr("jaxprefetch.host.slots.weakref", types.SimpleNamespace(finalize=interrupted))
    with pytest.raises(KeyboardInterrupt, match="now"):
        slots.take(5000)
    assert not driver.registered
    assert slots.mapped_bytes == 0


def test_an_interrupt_leaves_nothing_registered() -> None:
    """Wherever in `take` a Ctrl-C strikes: no memory stays registered or counted when the slot is dropped."""

    def take(at: int) -> int:
        registered: dict[int, int] = {}
        client = types.SimpleNamespace(dma_map=registered.setdefault, dma_unmap=registered.pop)
        slots, strike, interrupted = Slots(register=Pinning(client).register, copier=Copier(1)), Strike(at), False
        try:
            sys.setprofile(strike)
            slot = slots.take(5000)
            sys.setprofile(None)
            del slot
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.setprofile(None)
        assert interrupted == (at > 0), at
        assert not registered, at
        assert slots.mapped_bytes == 0, at
        return strike.places

    for at in range(1, take(0) + 1):
        take(at)


def test_clear_gives_up_what_is_free_and_what_is_freed_later() -> None:
    """After `clear` no memory stays mapped once it is free."""
    driver = Driver()
    slots = Slots(register=driver.register)
    free, used = slots.take(100), slots.take(100)
    free.free()
    del free
    slots.clear()
    assert len(driver.registered) == 1
    used.free()
    del used
    assert not driver.registered


def test_sizes_that_are_not_asked_for_any_more_make_room() -> None:
    """Before more than `max_bytes` is mapped, free slots of other sizes are given up; what is in use is never."""
    slots = Slots(max_bytes=3 << 20)
    for _ in range(2):
        slots.take(1 << 20).free()
    used = slots.take(1 << 20)
    slots.take(2 << 20).free()
    assert slots.mapped_bytes == 3 << 20
    slots.take(3 << 20)
    assert used.view(0, F32, (4,)).size == 4
    assert slots.mapped_bytes == 1 << 20


def test_a_registration_that_fails_is_said_once(caplog) -> None:
    """Where memory cannot be registered the slots are there all the same, with one warning that says what was lost."""

    def refuse(address: int, nbytes: int):
        raise RuntimeError("out of locked memory")

    slots = Slots(register=refuse)
    with caplog.at_level(logging.WARNING):
        held = [slots.take(100) for _ in range(3)]
    assert len(held) == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "out of locked memory" in caplog.text
    assert "copied once more" in caplog.text


# ---- copies


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "leaf",
    [
        np.arange(3_000_000, dtype=np.int32),
        np.arange(3_000_000, dtype=np.int32).reshape(3, 1000, 1000).transpose(2, 0, 1),
        np.asfortranarray(np.arange(2_000_000.0).reshape(2, -1)),
        np.arange(3_000_001, dtype=np.float64)[::-3],
        np.arange(9_000_000, dtype=">i2").reshape(9, 1, -1),
        np.zeros((0, 5)),
        np.float32(3).reshape(()),
    ],
    ids=["contiguous", "transposed", "fortran", "strided", "big-endian", "empty", "scalar"],
)
def test_copies_are_whole(threads, leaf) -> None:
    """Every value arrives, whatever the strides and however many threads copy."""
    copier = Copier(threads)
    out = np.full(leaf.shape, 7, leaf.dtype.newbyteorder("="))
    small = np.zeros(3, np.int64)
    copier.copy([(out, leaf), (small, np.arange(3))])
    np.testing.assert_array_equal(out, leaf)
    np.testing.assert_array_equal(small, np.arange(3))


@pytest.mark.parametrize("shape", [(8, 8, 8), (8, 4, 4), (8, 1), (8,)])
@pytest.mark.parametrize("threads", [1, 3])
def test_repeated_axes_are_copied_whole(monkeypatch, threads, shape) -> None:
    """An axis of length 1 is repeated, and no copy is cut along it, also where it is the longest there."""
    monkeypatch.setattr(copying, "PARALLEL_BYTES", 8)
    monkeypatch.setattr(copying, "chunk_bytes", lambda nbytes, threads: 64)
    leaf = np.arange(math.prod(shape[1:]), dtype=np.int64).reshape(1, *shape[1:])
    out = np.zeros(shape, np.int64)
    Copier(threads).copy([(out, leaf)])
    np.testing.assert_array_equal(out, np.broadcast_to(leaf, shape))


def test_a_forked_process_copies_as_well() -> None:
    """The threads stay behind in the parent: a copier made before the fork does without, one made after has its own."""
    code = """
import os, sys, warnings
import numpy as np
from jaxprefetch.host.copying import Copier
leaf, before = np.arange(8 << 20, dtype=np.uint8), Copier(3)
before.copy([(np.empty_like(leaf), leaf)])
warnings.simplefilter("ignore")  # of Python 3.12, that a process with threads forks
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for copier in (before, Copier(3)):
    copier.copy([(out := np.empty_like(leaf), leaf)])
    assert (out == leaf).all()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_ctrl_c_waits_for_those_who_help(monkeypatch) -> None:
    """However often it strikes: nobody writes any more when the caller has it, for the memory may be another's then."""
    came, go_on, ended, strikes = threading.Event(), threading.Event(), [], []

    class Interrupted(SimpleQueue):
        def get(self, *args, **kwargs):
            if threading.current_thread() is threading.main_thread() and len(strikes) < 3:
                strikes.append(None)
                if len(strikes) == 3:
                    go_on.set()
                raise KeyboardInterrupt
            return super().get(*args, **kwargs)

    def task() -> None:
        if threading.current_thread() is threading.main_thread():
            assert came.wait(60)
            raise KeyboardInterrupt
        came.set()
        assert go_on.wait(60)
        ended.append(None)

    copier = Copier(2)
    monkeypatch.setattr("jaxprefetch.host.copying.SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        copier.run([task, task])
    assert len(ended) == 1
    assert len(strikes) == 3


def test_what_is_made_for_a_slot_lasts_as_long_as_its_key() -> None:
    """It is made anew for another key or other memory, and each time where memory is never used again."""
    slots, made = Slots(), []
    keys = [object(), object()]
    for key in (keys[0], keys[0], keys[1], keys[1], keys[0]):
        slot = slots.take(100)
        assert slot.once(key, lambda key, slot: made.append(key) or key) is key
        slot.free()
    assert made == [keys[0], keys[1], keys[0]]
    fresh = Fresh()
    assert fresh.once(keys[0], lambda key, slot: slot.view(0, F32, (2,))) is not fresh.once(
        keys[0], lambda key, slot: slot.view(0, F32, (2,))
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_in_a_task_arrives_when_all_have_ended(threads) -> None:
    """What one task raises is raised by `run`, and none runs on after that."""
    done = []

    def task(i: int) -> None:
        if i == 3:
            raise ValueError("task 3")
        done.append(i)

    copier = Copier(threads)
    with pytest.raises(ValueError, match="task 3"):
        copier.run([lambda i=i: task(i) for i in range(8)])
    count = len(done)
    copier.run([lambda: task(0)] * 2)
    assert len(done) == count + 2


def test_large_values_become_infinite_without_a_warning() -> None:
    """A float64 beyond float32 becomes infinite on every thread, and nothing is said."""
    out = np.empty(2_000_000, np.float32)
    Copier(3).copy([(out, np.full(2_000_000, 1e300))])
    assert np.isinf(out).all()
