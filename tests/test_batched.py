"""Single samples as batches: stacked as NumPy would, straight into the slot, with errors that name the sample."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from assembling import Sent
from gated import wait
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import DeviceCache, DeviceQueue, batched, prefetch_to_device
from jaxprefetch.host.copying import Copier
from jaxprefetch.host.stacking import stack

by_host_size = pytest.mark.parametrize("host_size", [0, 4])


def samples(n: int, shape: tuple[int, ...] = (2, 3)) -> list[dict[str, Any]]:
    """Images with a label, no two the same."""
    return [{"image": np.full(shape, i + 1, np.float32), "label": np.int32(i)} for i in range(n)]


def stacked(chunk: list[Any]) -> Any:
    """What NumPy makes of them."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *chunk)


def chunks(all_samples: list[Any], size: int) -> list[Any]:
    return [stacked(all_samples[at : at + size]) for at in range(0, len(all_samples), size)]


def assert_same(batches: Any, expected: Any) -> None:
    for out, raw in zip(batches, expected, strict=True):
        assert jax.tree.structure(out) == jax.tree.structure(raw)
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(raw), strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)
            assert a.dtype == b.dtype


# ---- iterated


class Sample(NamedTuple):
    x: Any
    rest: Any


SAMPLES = {
    "arrays": [np.arange(6.0).reshape(2, 3) + i for i in range(7)],
    "arrays with one axis": [np.arange(3, dtype=np.int16) + i for i in range(7)],
    "empty arrays": [np.zeros((3, 0, 2)) for _ in range(7)],
    "arrays without axes": [np.array(i, np.uint8) for i in range(7)],
    "transposed": [(np.arange(6.0).reshape(2, 3) + i).T for i in range(7)],
    "NumPy numbers": [np.float16(i) for i in range(7)],
    "numbers": [Sample(i, [float(i), i > 3, None, 1j * i]) for i in range(7)],
    "bfloat16": [np.ones(4, ml_dtypes.bfloat16) * i for i in range(7)],
    "dicts": samples(7),
    "dates": [{"at": np.datetime64(i, "s")} for i in range(7)],
}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", SAMPLES)
def test_batches_are_stacked_samples(kind, drop_last) -> None:
    """Each pass yields what np.stack makes of the samples, in arrays of its own."""
    source = batched(SAMPLES[kind], 3, drop_last=drop_last)
    expected = chunks(SAMPLES[kind], 3)[: 2 if drop_last else 3]
    for _ in range(2):
        assert_same(source, expected)
    first, second = next(iter(source)), next(iter(source))
    assert not any(map(np.shares_memory, jax.tree.leaves(first), jax.tree.leaves(second)))


def test_arrays_of_other_libraries_and_other_mappings() -> None:
    """Anything with __array__ is a leaf, jax.Array too, and plain mappings become dicts."""

    class Tensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.arange(3)

    made = [collections.UserDict(a=Tensor(), b=jax.numpy.full(2, float(i))) for i in range(4)]
    with jax.transfer_guard("disallow"):
        out = list(batched(made, 4))
    assert_same(
        out, [{"a": np.stack([np.arange(3)] * 4), "b": np.stack([np.full(2, i, np.float32) for i in range(4)])}]
    )


def test_an_iterator_of_samples_gives_one_pass() -> None:
    """Of an iterator `batched` makes an iterator, and leaves the samples after the last batch taken alone."""
    pulled = iter(samples(10))
    batches = batched(pulled, 3)
    assert iter(batches) is batches
    assert_same([next(batches)], chunks(samples(3), 3))
    assert int(next(pulled)["label"]) == 3


@pytest.mark.parametrize(("wrong", "text"), [(0, "0"), (2.5, r"2\.5"), (True, "True")])
def test_batch_size_is_checked(wrong, text) -> None:
    """batch_size is a positive integer."""
    with pytest.raises(ValueError, match=f"batch_size: expected an integer of at least 1, got {text}"):
        batched([], wrong)


@pytest.mark.parametrize("wrong", [3, "text", {"x": 1}, None])
def test_samples_are_checked(wrong) -> None:
    """What does not give samples when it is iterated is refused at once."""
    with pytest.raises(TypeError, match="samples: expected an iterable of samples, got"):
        batched(wrong, 4)


@pytest.mark.parametrize("wrong", [lambda: 1, list])
def test_what_makes_samples_has_to_be_called(wrong) -> None:
    """A function or a class is refused with that cure."""
    with pytest.raises(TypeError, match=r"samples: .* Call it, and pass what it returns\.$"):
        batched(wrong, 4)


def test_what_was_got_is_told_in_one_line() -> None:
    """Arrays, and arguments that were swapped, are shortened to their type and how they begin."""
    images = np.zeros((50, 50))
    for call, told in (
        (
            lambda: batched(4, [{"x": images}] * 30),
            r"batch_size: .* got list \[{'x': array\(\[\[0\., 0\., .* \.\.\.\.$",
        ),
        (lambda: DeviceCache({"x": images}, 64), r"capacity: .* got dict {'x': array\(\[\[0\., 0\., .* \.\.\.\.$"),
        (
            lambda: batched({"image": images}, 4),
            r"got dict {'image': array\(\[\[0\., .* Zip columns to samples, .* slices",
        ),
        (
            lambda: batched([], np.zeros((2, 2))),
            r"batch_size: .* got ndarray array\(\[\[0\., 0\.\], \[0\., 0\.\]\]\)\.$",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=told) as caught:
            call()
        assert "\n" not in str(caught.value)


# ---- prefetched


@by_host_size
@pytest.mark.parametrize("last_batch", ["error", "pad", "drop"])
@pytest.mark.parametrize("sharding", [None, "split"])
@pytest.mark.parametrize("n", [0, 24, 56, 64])
def test_batches_are_written_where_they_are_sent_from(monkeypatch, n, sharding, last_batch, host_size) -> None:
    """Through prefetch_to_device the same batches arrive, pass after pass, and none is copied on the host again."""
    sent = Sent(monkeypatch)
    split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    source, expected = batched(samples(n), 32), chunks(samples(n), 32)
    if last_batch == "drop":
        expected = [raw for raw in expected if len(raw["label"]) == len(expected[0]["label"])]
    copied: list[Any] = []
    copy = Copier.copy
    monkeypatch.setattr(Copier, "copy", lambda self, pairs: (copied.extend(pairs), copy(self, pairs))[1])
    options = {"sharding": split if sharding else None, "last_batch": last_batch, "host_size": host_size}
    with prefetch_to_device(source, **options) as batches:
        for _ in range(3):
            count = 0
            for out, raw in zip(batches, expected, strict=True):
                mask, real = out.pop("mask", None), len(raw["label"])
                assert_same([jax.tree.map(lambda leaf, n=real: leaf[:n], jax.device_get(out))], [raw])
                assert mask is None or int(mask.sum()) == real
                count += 1
            assert count == len(expected)
    assert all(out.dtype == bool for out, _ in copied)  # the mask
    assert bool(copied) == (last_batch == "pad" and n > 0)
    assert len(sent.addresses) >= 3 * len(expected)


@by_host_size
def test_batches_of_changing_lengths(monkeypatch, host_size) -> None:
    """Samples sorted by length make batches of each length, from slots that are used again."""
    sent = Sent(monkeypatch)
    lengths = np.repeat(np.random.default_rng(0).choice([300, 400, 500], 100), 8)
    raw = [{"tokens": np.full(n, i, np.int32)} for i, n in enumerate(lengths)]
    with prefetch_to_device(batched(raw, 8), host_size=host_size) as batches:
        assert_same(batches, chunks(raw, 8))
        assert sent.slots.mapped_bytes <= 3 * 8 * 20480


@by_host_size
@pytest.mark.parametrize("x64", [False, True])
def test_python_numbers_follow_x64(monkeypatch, x64, host_size) -> None:
    """Python's numbers arrive with 32 bits, or 64 where JAX has them; one that does not fit is an error."""
    Sent(monkeypatch)
    raw = [{"i": i, "f": i / 3} for i in range(7)]
    with jax.enable_x64(x64):
        with prefetch_to_device(batched(raw, 3), host_size=host_size) as batches:
            taken = list(batches)
        assert taken[0]["i"].dtype == (np.int64 if x64 else np.int32)
        np.testing.assert_array_equal(np.concatenate([np.asarray(out["i"]) for out in taken]), np.arange(7))
        if not x64:
            with (
                prefetch_to_device(batched([*raw, {"i": 1 << 40, "f": 0.0}], 8)) as batches,
                pytest.raises(OverflowError, match="Batch 0, leaf i: 1099511627776 does not fit int32"),
            ):
                next(batches)


def test_batches_of_batches() -> None:
    """Batches can be grouped to microbatches, split along axis 1; a last group may be smaller."""
    split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec(None, "data"))
    source = batched(batched(samples(56), 8), 4)
    with prefetch_to_device(source, sharding=split, batch_axis=1) as batches:
        assert_same(batches, chunks(chunks(samples(56), 8), 4))


@by_host_size
def test_closing_closes_the_samples(host_size) -> None:
    """The generator of samples is closed with the prefetcher, also where batches of batches pull from it."""

    def generator() -> Any:
        yield from samples(100)

    for grouped in (False, True):
        pulled = generator()
        source = batched(pulled, 4)
        with prefetch_to_device(batched(source, 2) if grouped else source, host_size=host_size) as batches:
            next(batches)
        assert inspect.getgeneratorstate(pulled) == inspect.GEN_CLOSED


def test_samples_that_are_waited_for_can_be_woken(caplog) -> None:
    """Where the iterator of samples can be closed from outside, close() wakes a reader that waits in it."""

    class Stuck:
        inside, closed = threading.Event(), threading.Event()

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.inside.set()
            wait(self.closed)
            raise StopIteration

        def close(self) -> None:
            self.closed.set()

    source = Stuck()
    batches = prefetch_to_device(batched(source, 4))
    batches.start_prefetch()
    wait(source.inside)
    batches.close()
    assert not caplog.records


# ---- bad input


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "shape": (
        {"image": np.zeros((3, 3), np.float32), "label": np.int32(0)},
        ValueError,
        r"Batch 1, sample 2, leaf image: its shape is \(3, 3\), where sample 0 has \(2, 3\)\. .* crop or pad them",
    ),
    "rank": (
        {"image": np.zeros((2, 3), np.float32), "label": np.zeros(1, np.int32)},
        ValueError,
        r"Batch 1, sample 2, leaf label: its shape is \(1,\), where sample 0 has \(\)",
    ),
    "dtype": (
        {"image": np.zeros((2, 3)), "label": np.int32(0)},
        ValueError,
        "Batch 1, sample 2, leaf image: its dtype is float64, where sample 0 has float32. Convert it",
    ),
    "number": (
        {"image": np.zeros((2, 3), np.float32), "label": 7},
        ValueError,
        "Batch 1, sample 2, leaf label: its dtype is int64, where sample 0 has int32",
    ),
    "key": (
        {"image": np.zeros((2, 3), np.float32)},
        ValueError,
        "Batch 1, sample 2: expected image, label, got image: label is missing. Give all samples of a batch the",
    ),
    "None": (
        {"image": np.zeros((2, 3), np.float32), "label": None},
        ValueError,
        "expected image, label, got image: label is missing; sample 2 has None, which counts as missing, at label",
    ),
    "list": (
        [np.zeros((2, 3), np.float32), np.int32(0)],
        ValueError,
        "Batch 1, sample 2: expected image, label, got 0, 1: image, label are missing, 0, 1 are too many. Give",
    ),
    "string": (
        {"image": np.zeros((2, 3), np.float32), "label": "cat"},
        TypeError,
        "Batch 1, sample 2, leaf label: str cannot be stacked to an array of numbers. Leave it out",
    ),
    "strings": (
        {"image": np.zeros((2, 3), np.float32), "label": np.array("cat")},
        TypeError,
        "Batch 1, sample 2, leaf label: ndarray of dtype <U3 cannot be stacked",
    ),
    "object": (
        {"image": np.zeros((2, 3), np.float32), "label": object()},
        TypeError,
        "Batch 1, sample 2, leaf label: object cannot be stacked",
    ),
    "masked": (
        {"image": np.ma.zeros((2, 3), np.float32), "label": np.int32(0)},
        TypeError,
        "Batch 1, sample 2, leaf image: masked arrays have no place",
    ),
}


@pytest.mark.parametrize("host_size", [None, 0, 4])
@pytest.mark.parametrize("case", BAD)
def test_samples_that_cannot_be_stacked(monkeypatch, case, host_size) -> None:
    """The error names batch, sample and leaf, what was expected and got, iterated or prefetched, after batch 0."""
    sent = Sent(monkeypatch)
    bad, kind, match = BAD[case]
    source = batched([*samples(6), bad, *samples(9)], 4)
    if host_size is None:
        batches = iter(source)
        next(batches)
        with pytest.raises(kind, match=match):
            next(batches)
        return
    with prefetch_to_device(source, host_size=host_size) as batches:
        assert_same([next(batches)], chunks(samples(4), 4))
        for _ in range(2):
            with pytest.raises(kind, match=match):
                next(batches)
        assert sent.free()


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [(1 << 63, ValueError, "its dtype is uint64, where sample 0 has int64"), (-1 << 70, TypeError, "int of dtype obj")],
)
def test_an_integer_beyond_64_bits(number, kind, told) -> None:
    """Of Python's numbers, too, the one that is no int64 is named."""
    with pytest.raises(kind, match=f"Batch 0, sample 2, leaf n: {told}"):
        next(iter(batched([{"n": 1}, {"n": -1 << 63}, {"n": number}], 3)))


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (
            [{"x": 1, "y": None, "z": None}, {"x": 1, "y": 2, "z": None}],
            "y is too many; sample 0 has None, .*, at y. Giv",
        ),
        ([[1], (1,)], r"its structure is PyTreeDef\(\(\*,\)\), where sample 0 has PyTreeDef\(\[\*\]\). Give"),
    ],
)
def test_samples_whose_structures_differ(samples, told) -> None:
    """None is told where one of the two has it, and structures where the names are the same."""
    with pytest.raises(ValueError, match=f"^Batch 0, sample 1: .*{told}"):
        next(iter(batched(samples, 2)))


@pytest.mark.parametrize("nothing", [{}, {"label": None}, None, ()])
@pytest.mark.parametrize("prefetched", [False, True])
def test_samples_without_a_leaf(nothing, prefetched) -> None:
    """They are told as such: nobody has described batches."""
    source = batched([nothing] * 4, 2)
    with contextlib.closing(prefetch_to_device(source)) if prefetched else contextlib.nullcontext(iter(source)) as it:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^Batch 0, sample 0: it has no leaf \(None counts as none\)\. Yield"):
                next(it)


@dataclasses.dataclass
class Unregistered:
    """No node for JAX."""

    x: np.ndarray


def test_a_dataclass_that_jax_does_not_know() -> None:
    """As a sample or a batch it is a leaf that has no place on a device; the error says how it becomes a tree."""
    cure = r"A dataclass becomes a tree of its fields by jax\.tree_util\.register_dataclass\(Unregistered\)\. "
    sample = Unregistered(np.zeros(3))
    with pytest.raises(TypeError, match=f"^Batch 0, sample 0: Unregistered cannot be stacked .*{cure}Leave it out"):
        next(iter(batched([sample] * 2, 2)))
    with prefetch_to_device([sample]) as batches:
        told = f"^Batch 0, leaf batch: Unregistered cannot go to a device. {cure}prefetch_to_device"
        with pytest.raises(TypeError, match=told):
            next(batches)
    with pytest.raises(TypeError, match=f"cannot go to a device. {cure}Leave it out"):
        DeviceQueue(2).put(sample)


def test_a_string_in_the_first_sample() -> None:
    """Leaves that no array has are refused where the batch is described, too; a bare sample has no leaf to name."""
    with (
        prefetch_to_device(batched(["a", "b"], 2)) as batches,
        pytest.raises(TypeError, match="Batch 0, sample 0: str cannot be stacked"),
    ):
        next(batches)


@by_host_size
def test_an_error_of_the_samples_is_their_own(host_size) -> None:
    """What the source of samples raises arrives after the batches before it, and the samples of its batch are lost."""

    def breaking() -> Any:
        yield from samples(10)
        raise OSError("disk gone")

    with prefetch_to_device(batched(breaking(), 4), host_size=host_size) as batches:
        assert_same([next(batches), next(batches)], chunks(samples(8), 4))
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone") as caught:
                next(batches)
    assert caught.value.__notes__ == ["jaxprefetch: raised by the source while it made batch 2"]


def test_an_interrupt_among_the_samples_loses_none() -> None:
    """After a Ctrl-C in the source of samples, what was pulled of the batch is kept, and no sample is skipped."""

    class Interrupted:
        def __init__(self) -> None:
            self.left, self.interrupts = (
                iter(samples(12)),
                [False, True, False, False, False, True, True] + [False] * 20,
            )

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            if self.interrupts.pop(0):
                raise KeyboardInterrupt
            return next(self.left)

    with prefetch_to_device(batched(Interrupted(), 4), host_size=0, size=1) as batches:
        taken, interrupts = [], 0
        while True:
            try:
                taken.append(next(batches))
            except KeyboardInterrupt:
                interrupts += 1
            except StopIteration:
                break
    assert_same(taken, chunks(samples(12), 4))
    assert interrupts == 3


def test_an_interrupted_generator_of_samples_does_not_look_ended() -> None:
    """A generator that a Ctrl-C has ended is an error from then on, not a short pass."""

    def generator() -> Any:
        yield from samples(6)
        raise KeyboardInterrupt

    with prefetch_to_device(batched(generator(), 4), host_size=0, size=1) as batches:
        next(batches)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                next(batches)


# ---- stacking


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("n", "size"), [(300, 20_000), (100, 150_001), (3, 5_000_000), (5000, 1_000)])
def test_large_batches_are_stacked_by_several_threads(threads, n, size) -> None:
    """Every byte of every sample arrives, whoever copies it, also into a view that is not contiguous."""
    base = np.random.default_rng(0).integers(0, 255, size + 256, np.uint8)
    column = [base[i % 256 : i % 256 + size] for i in range(n)]
    for out in (np.empty((n, size), np.uint8), np.empty((n, 2 * size), np.uint8)[:, ::2]):
        stack(column, out, where="Batch 0", copier=Copier(threads))
        np.testing.assert_array_equal(out, np.stack(column))


@pytest.mark.parametrize("refilled", [True, False])
def test_a_buffer_that_is_filled_again_is_said(refilled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Every row would be the last sample: said once, where all arrays of all samples are the same objects."""

    def samples() -> Iterator[Any]:
        buffer, mean = np.empty(3), np.zeros(2)
        for i in range(6):
            buffer[:] = i
            yield {"x": buffer if refilled else buffer.copy(), "mean": mean, "i": i}

    out = list(batched(samples(), 3))
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        ["jaxprefetch: all 3 samples of batch 0 are the same arrays, so its rows are equal. A source that fills one "
         "buffer again and again has to yield copies."] if refilled else []
    )  # fmt: skip
    assert [batch["x"][0, 0] for batch in out] == ([2, 5] if refilled else [0, 3])
