"""Copies past the cache, where the extra `native` (llvmlite) is installed: NumPy has none.

Synopsis:

    if (copies := native()) is not None:
        left = copies.copy([(slot_view, leaf), ...])    # what it does not copy is left
        copies.stack(rows, samples)                     # False where it cannot

An ordinary store reads the line first that it writes: a third of what the memory of a host has to move for a copy, and
memory is what large batches wait for. And samples are stacked in one call, which lets go of the GIL once, where NumPy
does so for each row, so that many threads wait for each other.

An array is given by the address of its object, behind whose head its bytes are pointed to: `PyArrayObject`, a part of
NumPy's ABI, checked when the code is made. To ask Python for the address of its bytes takes a microsecond for each.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
from collections.abc import Sequence

import numpy as np

logger = logging.getLogger("jaxprefetch")

Pair = tuple[np.ndarray, np.ndarray]
"""Where to, and from where."""

PAST_CACHE_BYTES = 128 << 10
"""Arrays as large as this in mapped memory are written past the cache. That is where slots lie: they have been touched,
and a device reads them. What the system has just handed out is in the cache, for it has cleared it."""

ROW_BYTES = 4 << 10
"""Rows that make such an array have to be as large as this: lines at their ends are stored twice."""

MOST_THREADS = 12
"""More are in each other's way. On 32 cores 8 threads copied 42 GiB/s, 12 threads 52, 16 threads 38, 24 threads 33."""

_LINE = "<8 x i64>"
_CODE = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define internal void @copy_past_cache(ptr %to, ptr %from, i64 %size) {
begin: ; what comes before the first whole line and after the last is copied as usual
  %address = ptrtoint ptr %to to i64
  %beyond = sub i64 0, %address
  %misfit = and i64 %beyond, 63
  %head = call i64 @llvm.umin.i64(i64 %misfit, i64 %size)
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %head, i1 false)
  %rest = sub i64 %size, %head
  %lines = and i64 %rest, -64
  %end = add i64 %head, %lines
  br label %test

test:
  %at = phi i64 [%head, %begin], [%next, %line]
  %more = icmp ult i64 %at, %end
  br i1 %more, label %line, label %tail

line:
  %source = getelementptr i8, ptr %from, i64 %at
  %target = getelementptr i8, ptr %to, i64 %at
  %value = load LINE, ptr %source, align 1
  store LINE %value, ptr %target, align 64, !nontemporal !0
  %next = add i64 %at, 64
  br label %test

tail:
  %last_source = getelementptr i8, ptr %from, i64 %end
  %last_target = getelementptr i8, ptr %to, i64 %end
  %left = sub i64 %size, %end
  call void @llvm.memcpy.p0.p0.i64(ptr %last_target, ptr %last_source, i64 %left, i1 false)
  fence seq_cst ; before anybody is told: stores past the cache know no order
  ret void
}

declare i64 @llvm.umin.i64(i64, i64)

define internal ptr @bytes_of(i64 %array) {
  %field = add i64 %array, HEAD
  %pointer = inttoptr i64 %field to ptr
  %bytes = load ptr, ptr %pointer
  ret ptr %bytes
}

define void @copy(ptr %table, i64 %count) { ; rows of: array to, array from, bytes
  br label %test

test:
  %i = phi i64 [0, %0], [%next, %row]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %row, label %done

row:
  %to_field = getelementptr [3 x i64], ptr %table, i64 %i, i64 0
  %from_field = getelementptr [3 x i64], ptr %table, i64 %i, i64 1
  %size_field = getelementptr [3 x i64], ptr %table, i64 %i, i64 2
  %to = load i64, ptr %to_field
  %from = load i64, ptr %from_field
  %size = load i64, ptr %size_field
  %target = call ptr @bytes_of(i64 %to)
  %source = call ptr @bytes_of(i64 %from)
  call void @copy_past_cache(ptr %target, ptr %source, i64 %size)
  %next = add i64 %i, 1
  br label %test

done:
  ret void
}

define void @stack(i64 %to, ptr %arrays, i64 %count, i64 %size, i1 %past_cache) { ; arrays of one size, one by one
  %rows = call ptr @bytes_of(i64 %to)
  br label %test

test:
  %i = phi i64 [0, %0], [%next, %after]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %row, label %done

row:
  %field = getelementptr i64, ptr %arrays, i64 %i
  %from = load i64, ptr %field
  %source = call ptr @bytes_of(i64 %from)
  %offset = mul i64 %i, %size
  %target = getelementptr i8, ptr %rows, i64 %offset
  br i1 %past_cache, label %past, label %plain

past:
  call void @copy_past_cache(ptr %target, ptr %source, i64 %size)
  br label %after

plain:
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %size, i1 false)
  br label %after

after:
  %next = add i64 %i, 1
  br label %test

done:
  ret void
}

!0 = !{i32 1}
"""


class Native:
    """The compiled code. Thread safety: all of it for any thread.

    Raises:
        Exception: LLVM has no code for this processor, or what it made does not copy.
    """

    def __init__(self) -> None:
        addresses = _compiled(_CODE.replace("LINE", _LINE).replace("HEAD", str(object.__basicsize__)))
        size, table = ctypes.c_size_t, ctypes.c_void_p
        self._copy = ctypes.CFUNCTYPE(None, table, size)(addresses["copy"])
        self._stack = ctypes.CFUNCTYPE(None, size, table, size, size, ctypes.c_bool)(addresses["stack"])
        self._check()

    def copy(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Copies each second array into the first where that pays and is a copy of bytes; returns the other pairs.

        Blocking: until it is done, without the GIL.
        """
        left: list[Pair] = []
        table: list[int] = []
        for pair in pairs:
            out, leaf = pair
            if (size := out.nbytes) >= PAST_CACHE_BYTES and _is_copy_of_bytes(out, leaf) and _is_mapped(out):
                table += id(out), id(leaf), size
            else:
                left.append(pair)
        if table:
            self._copy(_table(table), len(table) // 3)
        return left

    def stack(self, rows: np.ndarray, leaves: Sequence[np.ndarray]) -> bool:
        """Copies leaf i to row i, all of one shape and dtype; False where these are no copies of bytes.

        Blocking: until it is done, without the GIL.
        """
        if rows.dtype.hasobject or not (rows.flags.c_contiguous and all([leaf.flags.c_contiguous for leaf in leaves])):
            return False
        size = rows[:1].nbytes
        past_cache = size >= ROW_BYTES and rows.nbytes >= PAST_CACHE_BYTES and _is_mapped(rows)
        self._stack(id(rows), _table([*map(id, leaves)]), len(leaves), size, past_cache)
        return True

    def _check(self) -> None:
        leaves = [np.arange(start, start + 5 * 64 + 3, dtype=np.uint8)[start:] for start in range(3)]
        outs = [np.zeros(70 + len(leaf), np.uint8)[70:] for leaf in leaves]
        table = [value for out, leaf in zip(outs, leaves, strict=True) for value in (id(out), id(leaf), leaf.size)]
        self._copy(_table(table), len(leaves))
        if not all(map(np.array_equal, outs, leaves)):
            raise RuntimeError("what LLVM has compiled does not copy")


@functools.cache
def native() -> Native | None:
    """The compiled code, made at the first call; None where llvmlite is not installed. Says once what it lacks."""
    try:
        return Native()
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("llvmlite"):
            raise
    except Exception as error:
        logger.warning("jaxprefetch: NumPy copies, for llvmlite is installed and does not serve: %s", error)
    return None


def _is_copy_of_bytes(out: np.ndarray, leaf: np.ndarray) -> bool:
    return (
        out.shape == leaf.shape
        and out.dtype == leaf.dtype
        and not out.dtype.hasobject
        and out.flags.c_contiguous
        and leaf.flags.c_contiguous
    )


def _is_mapped(array: np.ndarray) -> bool:
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap) or (isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap))


def _table(values: Sequence[int]) -> ctypes.Array[ctypes.c_size_t]:
    return (ctypes.c_size_t * len(values))(*values)


def _compiled(code: str) -> dict[str, int]:
    """Where the functions of this code are. It stays for good: a thread may be in it when the interpreter goes away."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(code)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    addresses = {name: engine.get_function_address(name) for name in ("copy", "stack")}
    module.detach()
    engine.detach()
    return addresses
