"""Values, layouts and trees that somebody made up to break it: every bit arrives, or an error says why not."""

from __future__ import annotations

import logging
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from gated import run_python
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprefetch import DeviceCache, DeviceQueue, batched, fetch_to_host, prefetch_to_device

ROWS = 8
MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
SPLIT = NamedSharding(MESH, P("data"))

# ---- bits

PATTERNS = {
    "float16": ["<u2", 0x7E01, 0x7C01, 0xFE55, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFBFF],
    "bfloat16": ["<u2", 0x7FC1, 0x7F81, 0xFFAA, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF7F],
    "float32": ["<u4", 0x7FC00001, 0x7F800001, 0xFFABCDEF, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF7FFFFF],
    "float64": [
        "<u8",
        0x7FF8 << 48 | 1,
        0x7FF0 << 48 | 1,
        0xFFF1 << 48 | 9,
        1 << 63,
        1,
        (1 << 63) | 5,
        0x7FF0 << 48,
        7,
    ],
}
"""By type: quiet, signalling and negative NaNs with payloads, -0, denormals, infinite, the lowest, as bits."""


def patterns(name: str) -> np.ndarray:
    """`(ROWS, 8)`: each row has every pattern, at another place."""
    kind, *bits = PATTERNS[name]
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    rolled = [np.roll(np.array(bits, np.uint64), i) for i in range(ROWS)]
    return np.stack(rolled).astype(kind).view(dtype)


def bits_of(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def one(batches: Any) -> Any:
    with batches:
        return next(batches)


class Writes:
    """Writes one batch into the memory that it is given."""

    def __init__(self, batch: np.ndarray):
        self._batch, self._left = batch, 1
        self.element_spec = jax.ShapeDtypeStruct(batch.shape, batch.dtype)

    def read_into(self, out: np.ndarray) -> int:
        self._left -= 1
        if self._left < 0:
            return 0
        out.view(np.uint8)[...] = self._batch.view(np.uint8)
        return len(out)


def through_queue(batch: np.ndarray) -> Any:
    with DeviceQueue(1) as queue:
        queue.put(batch)
        return queue.get()


def through_cache(batch: np.ndarray) -> Any:
    with DeviceCache(ROWS, batch) as cache:
        return cache.take(np.arange(ROWS))


WAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "whole": lambda batch: one(prefetch_to_device([batch])),
    "split": lambda batch: one(prefetch_to_device([batch], sharding=SPLIT)),
    "inner axis split": lambda batch: one(prefetch_to_device([batch], sharding=NamedSharding(MESH, P(None, "data")))),
    "strided": lambda batch: one(prefetch_to_device([np.repeat(batch, 2, axis=1)[:, ::2]])),
    "Fortran order": lambda batch: one(prefetch_to_device([np.asfortranarray(batch)])),
    "read-only": lambda batch: one(prefetch_to_device([np.frombuffer(batch.tobytes(), batch.dtype).reshape(8, 8)])),
    "padded": lambda batch: one(prefetch_to_device([batch], last_batch="pad"))[0],
    "on_device": lambda batch: one(prefetch_to_device([batch], on_device=lambda x: x)),
    "no thread": lambda batch: one(prefetch_to_device([batch], host_size=0)),
    "fresh buffers": lambda batch: one(prefetch_to_device([batch], fresh_buffers=True)),
    "written": lambda batch: one(prefetch_to_device(Writes(batch))),
    "stacked": lambda batch: one(prefetch_to_device(batched(list(batch), ROWS))),
    "queue": through_queue,
    "cache": through_cache,
    "back": lambda batch: next(fetch_to_host([jax.device_put(batch)])),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_bit_of_a_float_arrives(name: str, way: str) -> None:
    """NaN payloads, signalling NaNs, negative zero and denormals are the same bits, whichever way a batch goes."""
    with jax.enable_x64(True):
        batch = patterns(name)
        assert bits_of(WAYS[way](batch)) == batch.tobytes()


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_big_endian_bits_arrive(name: str) -> None:
    """Bytes in the other order are turned around, and nothing else."""
    batch = patterns(name)
    with jax.enable_x64(True):
        assert bits_of(WAYS["whole"](batch.astype(batch.dtype.newbyteorder(">")))) == batch.tobytes()


# ---- layouts


def far_apart(folder: Path) -> np.ndarray:
    """Eight values that lie a GiB apart in a file without content."""
    mapped = np.memmap(folder / "sparse", np.uint8, "w+", shape=((7 << 30) + 4,))
    out = np.lib.stride_tricks.as_strided(mapped.view(np.ndarray)[:4].view(np.int32), (ROWS,), (1 << 30,))
    out[...] = np.arange(ROWS)
    return out


LAYOUTS: dict[str, Callable[[Path], np.ndarray]] = {
    "a GiB apart": far_apart,
    "a GiB apart, backwards": lambda folder: far_apart(folder)[::-1],
    "one value everywhere": lambda folder: np.broadcast_to(np.int8(3), (ROWS, 3, 1 << 10)),
    "no values among rows": lambda folder: np.zeros((ROWS, 0, 1 << 40), np.int8),
    "no rows of very many values": lambda folder: np.zeros((0, 1 << 40), np.int8),
    "32 axes": lambda folder: np.arange(ROWS, dtype=np.int16).reshape(ROWS, *[1] * 31),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strange_layouts_arrive(layout: str, tmp_path: Path) -> None:
    """Strides of a GiB or of nothing, and shapes whose product would not fit, are values like all others."""
    leaf = LAYOUTS[layout](tmp_path)
    out = WAYS["whole"](leaf)
    assert (out.shape, out.dtype) == (leaf.shape, leaf.dtype)
    np.testing.assert_array_equal(np.asarray(out), leaf)


def test_a_file_that_is_too_short_is_an_error_at_its_batch(tmp_path: Path) -> None:
    """NumPy refuses to map more than there is; that error arrives in the place of its batch."""
    np.save(tmp_path / "whole.npy", np.arange(ROWS))
    content = (tmp_path / "whole.npy").read_bytes()
    (tmp_path / "short.npy").write_bytes(content[:-1])
    names = ["whole.npy", "short.npy", "whole.npy"]
    with prefetch_to_device(np.load(tmp_path / name, mmap_mode="r").astype(np.int32) for name in names) as batches:
        np.testing.assert_array_equal(np.asarray(next(batches)), np.arange(ROWS))
        with pytest.raises(ValueError, match="mmap length is greater than file size") as caught:
            next(batches)
    assert "batch 1" in "".join(caught.value.__notes__)


def test_a_mapped_file_that_shrinks_ends_the_process(tmp_path: Path) -> None:
    """A known limit: the system answers a read beyond the new end with SIGBUS, which nobody can catch for a library."""
    script = f"""
    import numpy as np
    from jaxprefetch import prefetch_to_device
    mapped = np.memmap({str(tmp_path / "x")!r}, np.uint8, "w+", shape=(1 << 20,))
    open({str(tmp_path / "x")!r}, "r+b").truncate(1 << 12)
    next(prefetch_to_device([mapped]))
    """
    code, _, errors = run_python(textwrap.dedent(script))
    assert code == -signal.SIGBUS, errors


@pytest.mark.large
@pytest.mark.parametrize("nbytes", [(2 << 30) + 3, (5 << 30) + 5], ids=["2 GiB", "5 GiB"])
def test_large_leaves_arrive(nbytes: int) -> None:
    """Leaves beyond the range of 32-bit offsets arrive, to the last byte."""
    edges = {edge + i for edge in (1 << 31, 1 << 32) for i in (-1, 0, 1) if edge + 1 < nbytes}
    places = sorted({0, 1, nbytes // 2, nbytes - 2, nbytes - 1} | edges)
    leaf = np.zeros(nbytes, np.uint8)  # pages that nobody has written take no memory
    leaf[places] = np.arange(1, len(places) + 1)
    out = np.asarray(one(prefetch_to_device([leaf], 1)))
    assert out.shape == (nbytes,)
    np.testing.assert_array_equal(out[places], leaf[places])
    assert np.count_nonzero(out) == len(places)


# ---- trees


@pytest.mark.parametrize("sharding", [None, SPLIT], ids=["whole", "split"])
def test_ten_thousand_leaves_arrive(sharding: Any) -> None:
    """A batch of very many leaves keeps each of them in its place."""
    batch = {f"group {i}": {f"{j}": np.full(ROWS, 100 * i + j, np.int32) for j in range(100)} for i in range(100)}
    with prefetch_to_device([batch] * (1 if sharding else 2), sharding=sharding) as batches:
        for out in batches:
            assert jax.tree.structure(out) == jax.tree.structure(batch)
            got = np.array([np.asarray(leaf)[-1] for leaf in jax.tree.leaves(out)])
            np.testing.assert_array_equal(got, [leaf[-1] for leaf in jax.tree.leaves(batch)])


NAMES = [
    "",
    " ",
    "/",
    "a/b",
    "..",
    "[0]",
    "{0}",
    "{x!r}",
    "%s %d",
    "'\"\\",
    "\n",
    "\0",
    "ß",
    "名前",
    "\U0001f600",
    "\ud800",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_leaves_may_have_any_name(name: str, caplog: Any) -> None:
    """Any text names a leaf: in batches, in keep_on_host, for the mask, in warnings and in errors."""
    x = np.arange(ROWS, dtype=np.float32)
    source = [
        {name: x, "kept": {name: "text"}},
        {name: x[:4], "kept": {name: "text"}},
        {name: object(), "kept": {name: "text"}},
    ]
    with caplog.at_level(logging.WARNING), prefetch_to_device(source, keep_on_host=f"kept/{name}") as batches:
        for expected in source[:2]:
            out = next(batches)
            assert out["kept"] == {name: "text"}
            np.testing.assert_array_equal(np.asarray(out[name]), expected[name])
        with pytest.raises(TypeError, match="object cannot go to a device") as caught:
            next(batches)
    assert f"Batch 2, leaf {name or 'batch'}" in str(caught.value) or name == ""
    assert [record.getMessage() for record in caplog.records if name in record.getMessage()]
    padded = one(prefetch_to_device([{"x": x}], last_batch="pad", mask_key=name))
    assert bool(padded[name].all())
