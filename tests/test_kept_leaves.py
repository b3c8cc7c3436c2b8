"""Leaves that stay on the host do not change either, whatever kind of buffer the source fills again."""

from __future__ import annotations

import array
import copy
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxprefetch import prefetch_to_device

X = np.arange(8, dtype=np.float32)


class Tensor:
    """An array as PyTorch's are: deepcopy refuses one that a gradient goes through, `detach().clone()` is a copy."""

    def __init__(self, buffer: np.ndarray):
        self.buffer = buffer

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.buffer

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("only leaf tensors can be deepcopied")

    def detach(self) -> Tensor:
        return Tensor(self.buffer)

    def clone(self) -> Tensor:
        return Tensor(self.buffer.copy())


class Frame:
    """An array of some library, over a buffer."""

    def __init__(self, buffer: np.ndarray):
        self.buffer = buffer

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.buffer


class Image:
    """One that shows its memory in the older way."""

    def __init__(self, buffer: np.ndarray):
        self.buffer = buffer

    @property
    def __array_interface__(self) -> Any:
        return self.buffer.__array_interface__


class Handle(Frame):
    """One that cannot be copied as what it is."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot be pickled")


def over(make: Callable[[np.ndarray], Any]) -> Callable[[], tuple[Any, Any]]:
    """A leaf over a buffer, and the buffer."""

    def leaf_and_buffer() -> tuple[Any, Any]:
        buffer = aligned(4)
        return make(buffer), buffer

    return leaf_and_buffer


def aligned(size: int) -> np.ndarray:
    """Bytes that XLA's CPU client would alias."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def itself(leaf: Any) -> Callable[[], tuple[Any, Any]]:
    """A leaf that is its own buffer."""
    return lambda: (copy.copy(leaf),) * 2


BUFFERS = {
    "array": over(lambda buffer: buffer),
    "view": over(lambda buffer: buffer[::-1]),
    "record": over(lambda buffer: buffer.view([("a", "u1", 4)])[0]),
    "memoryview": over(memoryview),
    "read-only memoryview": over(lambda buffer: memoryview(buffer).toreadonly()),
    "strided memoryview": over(lambda buffer: memoryview(buffer)[::2]),
    "memoryview with axes": over(lambda buffer: memoryview(buffer.reshape(2, 2).view(">u2"))),
    "bytearray": itself(bytearray(4)),
    "array.array": itself(array.array("B", bytes(4))),
    "ctypes array": itself((ctypes.c_uint8 * 4)()),
    "Tensor": over(Tensor),
    "Frame": over(Frame),
    "Image": over(Image),
    "Handle": over(Handle),
}


def refilled(leaf: Any, buffer: Any, times: int = 3) -> Iterator[dict[str, Any]]:
    """The same leaf in each batch, all bytes in its buffer being the batch's number."""
    for number in (*range(times), 99):
        for i in range(4):
            buffer[i] = number
        if number < times:
            yield {"x": X, "kept": leaf}


@pytest.mark.parametrize("host_size", [0, 4])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_kept_buffer_is_the_batch_s_own(kind: str, host_size: int) -> None:
    """A kept leaf over memory that the source fills again keeps its bytes, its type and its form."""
    leaf, buffer = BUFFERS[kind]()
    with prefetch_to_device(refilled(leaf, buffer), keep_on_host="kept", host_size=host_size) as batches:
        kept = [batch["kept"] for batch in batches]
    assert len(kept) == 3
    for number, own in enumerate(kept):
        assert set(np.asarray(own).tobytes()) == {number}
        assert type(own) is (np.ndarray if kind == "Handle" else type(leaf))
        if isinstance(leaf, memoryview):
            assert (own.shape, own.format, own.readonly) == (leaf.shape, leaf.format, leaf.readonly)


class Thing:
    """An object that is no array."""


@pytest.mark.parametrize("fresh", [None, True])
@pytest.mark.parametrize("leaf", ["text", b"bytes", 3, np.float32(2), Thing(), np.ndarray, "jax.Array"])
def test_what_is_no_buffer_is_kept_as_it_is(leaf: Any, fresh: bool | None) -> None:
    """Strings, objects, classes, NumPy scalars and JAX arrays are handed on as they are."""
    leaf = jax.device_put(X) if leaf == "jax.Array" else leaf
    source = [{"x": X, "kept": leaf, "too": leaf}]
    with prefetch_to_device(source, keep_on_host=["kept", "too"], fresh_buffers=fresh) as batches:
        out = next(batches)
    assert out["kept"] is leaf
    assert out["too"] is leaf


# ---- the promise of fresh buffers


@pytest.mark.parametrize("kind", BUFFERS)
def test_fresh_kept_buffers_are_handed_on(kind: str) -> None:
    """Where the source promises fresh buffers, a kept leaf is the source's own."""
    leaf, _ = BUFFERS[kind]()
    with prefetch_to_device([{"x": X, "kept": leaf}], keep_on_host="kept", fresh_buffers=True) as batches:
        assert next(batches)["kept"] is leaf


SHARING = {
    "the same": lambda base: base,
    "a view": lambda base: base[8:16],
    "memoryview": memoryview,
    "ctypes array": lambda base: (ctypes.c_uint8 * 64).from_buffer(base),
}


@pytest.mark.parametrize("kept", ["a", "z"])
@pytest.mark.parametrize("kind", SHARING)
def test_fresh_kept_buffers_are_no_memory_of_other_leaves(kind: str, kept: str) -> None:
    """A kept leaf that shares memory with another leaf of its batch does not when it is delivered."""
    base = aligned(64)
    batch = {"m": base, kept: SHARING[kind](base)}
    with prefetch_to_device([batch], keep_on_host=kept, fresh_buffers=True) as batches:
        out = next(batches)
    assert type(out[kept]) is type(batch[kept])
    start, end = out["m"].unsafe_buffer_pointer(), out["m"].unsafe_buffer_pointer() + out["m"].nbytes
    low, high = np.lib.array_utils.byte_bounds(np.asarray(out[kept]))
    assert high <= start or end <= low
    np.testing.assert_array_equal(np.asarray(out[kept]), np.asarray(batch[kept]))


def test_fresh_kept_leaves_are_apart_from_each_other() -> None:
    """Two kept leaves over one memory become two."""
    base = aligned(64)
    with prefetch_to_device([(base, base[8:])], keep_on_host=["0", "1"], fresh_buffers=True) as batches:
        first, second = next(batches)
    assert first is base
    assert not np.shares_memory(first, second)
