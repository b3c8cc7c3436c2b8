"""The code that copies past the cache, as LLVM's text, and what llvmlite makes of it.

Synopsis:

    address = compiled()            # of `copy`

An array is given by the address of its object, behind whose head its bytes are pointed to: `PyArrayObject`, a part of
NumPy's ABI, which whoever uses this looks at first. To ask Python for the address of its bytes takes a microsecond.
"""

from __future__ import annotations

import platform

OLDEST = 0, 45
"""Version of llvmlite that this is written for."""

HEAD_BYTES = object.__basicsize__
"""Of an object; those of an array go on with the address of its bytes."""

CODE = """
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
  %value = load <8 x i64>, ptr %source, align 1
  store <8 x i64> %value, ptr %target, align 64, !nontemporal !0
  %next = add i64 %at, 64
  br label %test

tail:
  %last_source = getelementptr i8, ptr %from, i64 %end
  %last_target = getelementptr i8, ptr %to, i64 %end
  %left = sub i64 %size, %end
  call void @llvm.memcpy.p0.p0.i64(ptr %last_target, ptr %last_source, i64 %left, i1 false)
  ret void
}

declare i64 @llvm.umin.i64(i64, i64)

define internal ptr @bytes_of(i64 %array) {
  %field = add i64 %array, HEAD
  %pointer = inttoptr i64 %field to ptr
  %bytes = load ptr, ptr %pointer
  ret ptr %bytes
}

define void @copy(ptr %table, i64 %count) { ; rows of: array to, which of its bytes, array from, bytes
  br label %test

test:
  %i = phi i64 [0, %0], [%next, %row]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %row, label %done

row:
  %to_field = getelementptr [4 x i64], ptr %table, i64 %i, i64 0
  %offset_field = getelementptr [4 x i64], ptr %table, i64 %i, i64 1
  %from_field = getelementptr [4 x i64], ptr %table, i64 %i, i64 2
  %size_field = getelementptr [4 x i64], ptr %table, i64 %i, i64 3
  %to = load i64, ptr %to_field
  %offset = load i64, ptr %offset_field
  %from = load i64, ptr %from_field
  %size = load i64, ptr %size_field
  %first = call ptr @bytes_of(i64 %to)
  %target = getelementptr i8, ptr %first, i64 %offset
  %source = call ptr @bytes_of(i64 %from)
  call void @copy_past_cache(ptr %target, ptr %source, i64 %size)
  %next = add i64 %i, 1
  br label %test

done:
  FENCE
  ret void
}

!0 = !{i32 1}
"""


FENCES = {"x86_64": "call void @llvm.x86.sse.sfence()"}
"""What comes before anybody is told, by processor: stores past the cache know no order. LLVM's own fence is not said to
order them; on ARM, where they are plain stores with a hint, it does."""


def text() -> str:
    """The code for this process."""
    fence = FENCES.get(platform.machine(), "fence seq_cst")
    declared = f"{fence.replace('call', 'declare')}\n" if fence.startswith("call") else ""
    return declared + CODE.replace("FENCE", fence).replace("HEAD", str(HEAD_BYTES))


class TooOld(Exception):
    """An llvmlite that somebody else needs."""


def compiled() -> int:
    """Where `copy` is. It stays for good: a thread may be in it when the interpreter goes away.

    Raises:
        TooOld: llvmlite does not know the language of this text yet.
        Exception: llvmlite is not installed or broken, or this system or processor allows no such code.
    """
    import llvmlite

    version = llvmlite.__version__
    if [*map(int, version.split(".")[:2])] < [*OLDEST]:
        raise TooOld(f"llvmlite {version} is too old, {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    import llvmlite.binding as llvm

    llvm.check_jit_execution()  # where memory may not become code: an error here, and the end of the process later
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text())
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address = engine.get_function_address("copy")
    engine.detach()
    return address
