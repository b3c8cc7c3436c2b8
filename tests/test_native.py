"""Copies in native code do what NumPy's do, touch nothing else, and are missed by nobody who has no llvmlite."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxprefetch.host import copying, stacking
from jaxprefetch.host import native as module
from jaxprefetch.host.copying import Copier
from jaxprefetch.host.native import PAST_CACHE_BYTES, ROW_BYTES, native
from jaxprefetch.host.slots import Fresh, Slots
from jaxprefetch.host.stacking import stack

GUARD = 100
NOISE = np.random.default_rng(0).integers(1, 256, 3 * PAST_CACHE_BYTES, np.uint8)


@pytest.fixture(params=["native", "numpy"])
def way(request, monkeypatch) -> str:
    """Who copies."""
    if request.param == "numpy":
        for user in (copying, stacking):
            monkeypatch.setattr(user, "native", lambda: None)
    return request.param


def mapped(nbytes: int) -> np.ndarray:
    """Zeros in memory as slots have it."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, PAST_CACHE_BYTES + 1000))
def test_every_byte_arrives_and_no_other_changes(to: int, start: int, more: int) -> None:
    """Whatever the alignment of either side."""
    memory, leaf = mapped(4 * PAST_CACHE_BYTES), NOISE[start : start + PAST_CACHE_BYTES + more]
    out = memory[GUARD + to : GUARD + to + leaf.size]
    assert native().copy([(out, leaf)]) == []
    np.testing.assert_array_equal(out, leaf)
    assert not memory[: GUARD + to].any()
    assert not memory[GUARD + to + leaf.size :].any()


@pytest.mark.parametrize("size", [1, 63, 64, 65, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 100_001])
@pytest.mark.parametrize("start", [0, 1, 64])
@pytest.mark.parametrize("make", [mapped, lambda nbytes: np.zeros(nbytes, np.uint8)], ids=["mapped", "new"])
def test_every_row_arrives_and_no_other_byte_changes(size: int, start: int, make) -> None:
    """Rows of any size, past the cache and not."""
    count = max(PAST_CACHE_BYTES // size, 3) + 1
    memory, leaves = make(count * size + 2 * GUARD), [NOISE[i % 999 : i % 999 + size] for i in range(count)]
    rows = memory[GUARD + start : GUARD + start + count * size].reshape(count, size)
    assert native().stack(rows, leaves)
    np.testing.assert_array_equal(rows, leaves)
    assert not memory[: GUARD + start].any()
    assert not memory[GUARD + start + count * size :].any()


def test_what_is_no_copy_of_bytes_is_left() -> None:
    """Other shapes, types and strides, small arrays, and memory that the system has just handed out."""
    n = PAST_CACHE_BYTES
    out, leaf = mapped(2 * n), np.zeros(2 * n, np.uint8)
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
        (np.zeros(n, np.uint8), leaf[:n]),
        (Fresh().view(0, np.dtype(np.uint8), (n,)), leaf[:n]),
    ]
    assert [*map(id, native().copy(left))] == [*map(id, left)]
    assert not native().stack(out.reshape(2, -1)[:, ::2], [leaf[: n // 2]] * 2)
    assert not native().stack(out.reshape(2, -1), [leaf[:n], leaf[::2]])
    assert not native().stack(np.empty((2, 3), object), [np.empty(3, object)] * 2)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex128, np.bool_, "datetime64[s]"])
def test_slots_get_what_numpy_would_put_there(threads: int, dtype, way: str) -> None:
    """Leaves of all sizes at once, in their order, by one thread and by several."""
    slot, start, pairs = Slots().take(32 << 20), 0, []
    for shape in [(5,), (3, 70_000), (300_000,), (1,), (700, 1000)]:
        leaf = NOISE[np.arange(np.prod(shape)) % NOISE.size].astype(dtype).reshape(shape)
        pairs.append((slot.view(start, leaf.dtype, shape), leaf))
        start += -(-leaf.nbytes // 64) * 64
    Copier(threads).copy(pairs)
    for out, leaf in pairs:
        np.testing.assert_array_equal(out, leaf)


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


def test_without_llvmlite_numpy_copies(monkeypatch, caplog) -> None:
    """Nothing is said: it is an extra."""
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert module.native.__wrapped__() is None
    assert not caplog.records


def test_an_llvmlite_that_does_not_serve_is_said(monkeypatch, caplog) -> None:
    """What it made is tried before it is used."""

    def refuse(code: str) -> dict[str, int]:
        raise RuntimeError("unknown processor")

    monkeypatch.setattr(module, "_compiled", refuse)
    assert module.native.__wrapped__() is None
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (
            logging.WARNING,
            "jaxprefetch: NumPy copies, for llvmlite is installed and does not serve: unknown processor",
        )
    ]


def test_code_that_does_not_copy_is_refused(monkeypatch) -> None:
    """Such as one that looks for the bytes of an array where they are not."""
    monkeypatch.setattr(
        module,
        "_CODE",
        module._CODE.replace("store LINE", "store volatile LINE").replace(
            "store volatile LINE %value, ptr %target", "store volatile LINE zeroinitializer, ptr %target"
        ),
    )
    with pytest.raises(RuntimeError, match="does not copy"):
        module.Native()


def test_a_process_ends_while_a_thread_is_in_the_code() -> None:
    """It stays where it is until the process is gone, also in a fork."""
    code = """
import itertools, mmap, os, sys, threading, warnings
import numpy as np
from jaxprefetch.host.native import native
copies, begun = native(), threading.Event()
out, leaf = np.frombuffer(mmap.mmap(-1, 64 << 20), np.uint8), np.ones(64 << 20, np.uint8)
def go_on():
    for _ in itertools.count():
        copies.copy([(out, leaf)])
        begun.set()
threads = [threading.Thread(target=go_on, daemon=True) for _ in range(3)]
[thread.start() for thread in threads]
begun.wait()
warnings.simplefilter("ignore")  # of Python 3.12, that a process with threads forks
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
out[:] = 0
assert native().copy([(out, leaf)]) == [] and out.all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
