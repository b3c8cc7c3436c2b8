"""Copies in native code do what NumPy's do, touch nothing else, and are missed by nobody who has no llvmlite."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading

import llvmlite
import numpy as np
import pytest
from gated import run_python
from hypothesis import given
from hypothesis import strategies as st

from jaxprefetch import batched
from jaxprefetch.host import machine_code, native
from jaxprefetch.host.copying import Copier, chunk_bytes
from jaxprefetch.host.native import PAST_CACHE_BYTES, PAST_CACHE_THREADS, ROW_BYTES
from jaxprefetch.host.slots import Fresh, Slots
from jaxprefetch.host.stacking import stack

GUARD = 100
NOISE = np.random.default_rng(0).integers(1, 256, 2 * PAST_CACHE_BYTES, np.uint8)


@pytest.fixture(params=["native", "numpy"])
def way(request, monkeypatch) -> str:
    """Who copies."""
    if request.param == "numpy":
        monkeypatch.setattr(native, "native", lambda: None)
    return request.param


def mapped(nbytes: int) -> np.ndarray:
    """Zeros in memory as slots have it."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def new(nbytes: int) -> np.ndarray:
    """Zeros in memory as other arrays have it."""
    return np.zeros(nbytes, np.uint8)


# ---- what is copied


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 1000))
def test_every_byte_arrives_and_no_other_changes(to: int, start: int, more: int) -> None:
    """Whatever the alignment of either side."""
    memory, leaf = mapped(2 * PAST_CACHE_BYTES), NOISE[start : start + PAST_CACHE_BYTES + more]
    out = memory[GUARD + to : GUARD + to + leaf.size]
    assert native.copy_past_cache([(out, leaf)]) == []
    np.testing.assert_array_equal(out, leaf)
    assert not memory[: GUARD + to].any()
    assert not memory[GUARD + to + leaf.size :].any()


@given(st.integers(0, 70), st.integers(0, 70), st.integers(0, 300))
def test_few_bytes_arrive_and_no_other_changes(to: int, start: int, size: int) -> None:
    """Fewer than a line, or than what is before the first whole one."""
    memory, leaf = new(600), NOISE[start : start + size]
    out = memory[GUARD + to : GUARD + to + size]
    native.native().copy([(out, leaf)])
    np.testing.assert_array_equal(out, leaf)
    assert not memory[: GUARD + to].any()
    assert not memory[GUARD + to + size :].any()


@pytest.mark.parametrize("size", [ROW_BYTES, ROW_BYTES + 1, ROW_BYTES + 63, 100_001])
@pytest.mark.parametrize("start", [0, 1, 64])
def test_every_row_arrives_and_no_other_byte_changes(size: int, start: int) -> None:
    """Also where there are more rows than leaves."""
    count = PAST_CACHE_BYTES // size + 1
    memory, leaves = mapped((count + 1) * size + 2 * GUARD), [NOISE[i % 999 : i % 999 + size] for i in range(count)]
    rows = memory[GUARD + start : GUARD + start + (count + 1) * size].reshape(count + 1, size)
    assert native.can_stack(rows, leaves)
    native.stack(rows, leaves)
    np.testing.assert_array_equal(rows[:-1], leaves)
    assert not memory[: GUARD + start].any()
    assert not memory[GUARD + start + count * size :].any()


def test_what_is_no_copy_of_bytes_is_left() -> None:
    """Other shapes, types and strides, small arrays, and memory that the system has just handed out."""
    n = PAST_CACHE_BYTES
    out, leaf = mapped(2 * n), np.zeros(2 * n, np.uint8)
    closed = out[:n].view()
    closed.flags.writeable = False
    left = [
        (out[:n].view(np.float32), leaf[:n].view(np.int32)),
        (out[:n].view("<i4"), leaf[:n].view(">i4")),
        (out[::2], leaf[:n]),
        (out[:n], leaf[::2]),
        (out.reshape(2, -1).T, leaf.reshape(2, -1).T),
        (out.reshape(2, -1), leaf.reshape(-1, 2)),
        (out.reshape(2, -1), leaf.reshape(2, -1)[:1]),
        (out[: n - 1], leaf[: n - 1]),
        (out[:0], leaf[:0]),
        (closed, leaf[:n]),
        (np.zeros(n, np.uint8), leaf[:n]),
        (np.frombuffer(bytearray(n), np.uint8), leaf[:n]),
        (Fresh().view(0, np.dtype(np.uint8), (n,)), leaf[:n]),
    ]
    assert [*map(id, native.copy_past_cache(left))] == [*map(id, left)]
    rows, row = out.reshape(2, -1), leaf[:n]
    assert native.can_stack(rows, [row, row])
    for others, leaves in [
        (rows[:, ::2], [row[: n // 2]] * 2),
        (rows, [row, leaf[::2]]),
        (rows, [row] * 3),
        (closed.reshape(2, -1), [row[: n // 2]] * 2),
        (out[: (ROW_BYTES - 1) * 99].reshape(99, -1), [row[: ROW_BYTES - 1]] * 99),
        (out[: n - 1].reshape(1, -1), [row[:-1]]),
        (rows.copy(), [row, row]),
        (np.empty((99, ROW_BYTES), object), [np.empty(ROW_BYTES, object)] * 99),
        (out, [*row]),
    ]:
        assert not native.can_stack(others, leaves)


@pytest.mark.parametrize("threads", [1, 3, 20])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex128, np.bool_, "datetime64[s]"])
def test_slots_get_what_numpy_would_put_there(threads: int, dtype, way: str) -> None:
    """Leaves of all sizes at once, in their order, by one thread and by several."""
    slot, start, pairs = Slots().take(64 << 20), 0, []
    for shape in [(5,), (3, 70_000), (300_000,), (1,), (700, 1000), (1_200_000,)]:
        leaf = NOISE[np.arange(np.prod(shape)) % NOISE.size].astype(dtype).reshape(shape)
        pairs.append((slot.view(start, leaf.dtype, shape), leaf))
        start += -(-leaf.nbytes // 64) * 64
    Copier(threads).copy(pairs)
    for out, leaf in pairs:
        np.testing.assert_array_equal(out, leaf)


def test_the_library_copies_and_stacks_with_it(monkeypatch) -> None:
    """Large leaves in slots, and samples of some size that make a large one; what goes elsewhere is NumPy's."""
    calls: list[tuple[str, int]] = []
    code = native.native()
    monkeypatch.setattr(code, "copy", lambda pairs: calls.append(("copy", len(pairs))))
    monkeypatch.setattr(code, "stack", lambda rows, leaves: calls.append(("stack", len(leaves))))
    slot, n, rows = Slots().take(8 << 20), PAST_CACHE_BYTES, PAST_CACHE_BYTES // ROW_BYTES
    Copier(1).copy([(slot.view(start, NOISE.dtype, (size,)), NOISE[:size]) for start, size in [(0, n), (2 * n, 99)]])
    row = NOISE[:ROW_BYTES]
    for out in (slot.view(0, NOISE.dtype, (rows, ROW_BYTES)), np.empty((rows, ROW_BYTES), np.uint8)):
        for count in (rows, rows - 1):
            stack([row] * count, out[:count], where="Batch 0", copier=Copier(1))
    stack([row[:-1]] * rows, slot.view(0, NOISE.dtype, (rows, ROW_BYTES - 1)), where="Batch 0", copier=Copier(1))
    assert calls == [("copy", 1), ("stack", rows)]


@pytest.mark.parametrize(
    ("made", "nbytes", "threads", "pieces"),
    [
        (mapped, 6 << 20, PAST_CACHE_THREADS - 1, 2),
        (mapped, 200 << 20, PAST_CACHE_THREADS - 1, 49),
        (new, 200 << 20, 19, 50),
    ],
)
def test_large_leaves_are_shared_out(monkeypatch, made, nbytes: int, threads: int, pieces: int) -> None:
    """In pieces of 4 to 8 MiB, about four for each; fewer threads write past the cache than through it."""
    copier, shared = Copier(20), []
    monkeypatch.setattr(copier._pool, "share", lambda do, items, helpers: shared.append((len(list(items)), helpers)))
    out = made(nbytes)
    copier.copy([(out, out)])
    assert shared == [(pieces, threads)]


def test_how_large_pieces_are() -> None:
    """Bounded below by what it takes to wake a thread, and above by what the last one lets the others wait."""
    assert [chunk_bytes(mib << 20, 12) >> 20 for mib in (5, 240, 1200)] == [4, 5, 8]


def test_stores_go_past_the_cache_and_are_ordered() -> None:
    """By the instructions that LLVM chooses for this processor; the GIL is free meanwhile."""
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(machine_code.text())
    machine = llvm.Target.from_default_triple().create_target_machine(opt=3)
    lines = [line.split()[0] for line in machine.emit_assembly(module).splitlines() if line.strip()]
    assert [line for line in lines if "movnt" in line or line == "stnp"]
    assert lines.count("sfence") + lines.count("dmb") == 1
    assert not native.native()._copy._flags_ & ctypes._FUNCFLAG_PYTHONAPI


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("n", "size"), [(3000, 1500), (300, 20_000), (3, 2_000_000)])
def test_samples_are_stacked_in_slots(threads: int, n: int, size: int, way: str) -> None:
    """Contiguous or not, by one thread and by several."""
    out = Slots().take(n * size).view(0, np.dtype(np.uint8), (n, size))
    base = np.resize(NOISE, 2 * size + 500)
    for step in (1, 2):
        column = [base[i % 500 : i % 500 + step * size : step] for i in range(n)]
        stack(column, out, where="Batch 0", copier=Copier(threads))
        np.testing.assert_array_equal(out, column)


def test_memory_that_is_too_small_or_closed_is_not_written(way: str) -> None:
    """`read_into` of samples, called by hand: NumPy's error, and no byte anywhere else."""
    rows = [np.full(1 << 19, i, np.uint8) for i in range(1, 5)]
    memory = mapped(10 << 19).reshape(10, -1)
    with pytest.raises(ValueError, match="wrong shape"):
        iter(batched(rows, 4)).read_into(memory[:2])
    closed = memory[:4].view()
    closed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        iter(batched(rows, 4)).read_into(closed)
    assert not memory.any()


class Counting(Copier):
    """Counts who is asked to help."""

    asked: int | None = None

    def run(self, tasks, most=None) -> None:
        """As the copier does."""
        self.asked = most
        super().run(tasks, most=most)


@pytest.mark.parametrize(
    ("size", "step", "threads"),
    [(ROW_BYTES, 1, 2), (100_000, 1, 12), (ROW_BYTES, 2, 2), (100_000, 2, 5), (ROW_BYTES - 1, 1, None)],
)
def test_rows_that_numpy_copies_have_as_many_threads_as_it_can_use(size: int, step: int, threads: int | None) -> None:
    """Rows with strides are NumPy's, and so are small ones, which one thread copies."""
    column = [NOISE[: step * size : step]] * (-(-(6 << 20) // size))
    copier = Counting(20)
    stack(column, mapped(len(column) * size).reshape(-1, size), where="Batch 0", copier=copier)
    assert copier.asked == threads


# ---- how the code is made


def test_many_threads_ask_and_it_is_made_once(monkeypatch, caplog) -> None:
    """And what fails is said once."""
    made, all_here = [], threading.Barrier(8)

    def refuse() -> int:
        made.append(threading.current_thread().name)
        raise OSError("cannot allocate executable memory\nand more of that")

    monkeypatch.setattr(native, "_making", native._Making())
    monkeypatch.setattr(machine_code, "compiled", refuse)

    def ask() -> None:
        all_here.wait(60)
        assert native.native() is None

    askers = [threading.Thread(target=ask) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    native._making.wait()
    assert native.native() is None
    assert made == ["jaxprefetch-native"]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.WARNING,
            f"jaxprefetch: NumPy copies, with the same values, for llvmlite ({llvmlite.__file__}) does not serve: "
            "OSError: cannot allocate executable memory. Install it anew, or remove it.",
        )
    ]


@pytest.mark.parametrize(("missing", "said"), [("llvmlite", 0), ("html", 1), ("llvmlite.binding", 1)])
def test_without_llvmlite_nothing_is_said(monkeypatch, caplog, missing: str, said: int) -> None:
    """It is an extra; one that lacks a part of itself is said."""

    def fail() -> int:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(native, "_making", native._Making())
    monkeypatch.setattr(machine_code, "compiled", fail)
    assert native.native() is None
    native._making.wait()
    assert native.native() is None
    assert len(caplog.records) == said


def test_an_llvmlite_that_is_too_old_is_told_to_who_listens(monkeypatch, caplog) -> None:
    """An older numba needs it, so that it is nobody's fault."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(llvmlite, "__version__", "0.44.0rc1")
    monkeypatch.setattr(native, "_making", native._Making())
    assert native.native() is None
    native._making.wait()
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.INFO,
            "jaxprefetch: NumPy copies, with the same values: llvmlite 0.44.0rc1 is too old, 0.45 or newer is needed.",
        )
    ]


def test_where_memory_may_not_become_code_numpy_copies(monkeypatch) -> None:
    """LLVM does not look, and the process would end."""

    def refuse() -> None:
        raise OSError("cannot allocate executable memory")

    monkeypatch.setattr("llvmlite.binding.check_jit_execution", refuse)
    with pytest.raises(OSError, match="executable"):
        native.Native()


def test_code_that_does_not_copy_is_refused(monkeypatch) -> None:
    """What it has made is tried first."""
    wrong = machine_code.CODE.replace("store <8 x i64> %value", "store <8 x i64> zeroinitializer")
    monkeypatch.setattr(machine_code, "CODE", wrong)
    with pytest.raises(RuntimeError, match="does not copy"):
        native.Native()


def test_arrays_of_another_form_are_refused(monkeypatch) -> None:
    """Before anything reads where their bytes are not."""
    monkeypatch.setattr(machine_code, "HEAD_BYTES", machine_code.HEAD_BYTES + 8)
    with pytest.raises(RuntimeError, match="elsewhere"):
        native.Native()


def test_no_thread_to_be_had_is_no_error(monkeypatch) -> None:
    """As while the interpreter ends."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(native, "_making", native._Making())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert native.native() is None
    native._making.wait()
    assert native.native() is None


def test_a_fork_waits_until_the_code_is_made() -> None:
    """Else the child would find a lock of llvmlite's taken by a thread that it does not have."""
    script = """
import mmap, os, sys, warnings
import numpy as np
from jaxprefetch.host import native
warnings.simplefilter("ignore")  # of Python 3.12, that a process with threads forks
native.native()
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
out, leaf = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8), np.ones(1 << 20, np.uint8)
assert native.copy_past_cache([(out, leaf)]) == [] and out.all()
import llvmlite.binding
llvmlite.binding.parse_assembly("")
"""
    assert run_python(script) == (0, "", "")


def test_a_process_ends_while_threads_are_in_the_code() -> None:
    """It stays where it is until the process is gone, also while it is made."""
    assert run_python("from jaxprefetch.host import native; native.native()") == (0, "", "")
    script = """
import mmap, threading
import numpy as np
from jaxprefetch.host import native
native.native(), native._making.wait()
begun = threading.Event()
out, leaf = np.frombuffer(mmap.mmap(-1, 64 << 20), np.uint8), np.ones(64 << 20, np.uint8)
def go_on():
    while native.copy_past_cache([(out, leaf)]) == []:
        begun.set()
for _ in range(3):
    threading.Thread(target=go_on, daemon=True).start()
begun.wait()
"""
    assert run_python(script) == (0, "", "")
