"""Loaders that need no package beside NumPy and JAX, and what is said of some of them."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
from gated import LIMIT_S, batch, number, numbers, reader_threads

from jaxprefetch import prefetch_to_device
from jaxprefetch.host import forks
from jaxprefetch.host.leaves import as_host


class Slices:
    """Consecutive rows of an array, anew in each pass."""

    def __init__(self, array, rows):
        self.array, self.rows = array, rows

    def __iter__(self):
        for at in range(0, len(self.array), self.rows):
            yield {"x": self.array[at : at + self.rows]}


# ---- files, generators, arrays of JAX's


def test_slices_of_a_memory_map_arrive_pass_by_pass(tmp_path):
    """Slices of a memory map are not read before they are staged, and the pages are the file's."""
    values = np.arange(64, dtype=np.float32).reshape(16, 4)
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert np.shares_memory(as_host(mapped[:4], ""), mapped)
    with prefetch_to_device(Slices(mapped, 4)) as batches:
        for _ in range(2):
            np.testing.assert_array_equal(np.concatenate([np.asarray(b["x"]) for b in batches]), values)


def test_arrays_of_an_npz_file_arrive(tmp_path):
    """An .npz file is a mapping: as a batch it becomes a dict, as a source it is refused."""
    np.savez(tmp_path / "x.npz", x=np.arange(4.0, dtype=np.float32), y=np.arange(4, dtype=np.int8))
    with np.load(tmp_path / "x.npz") as arrays:
        with prefetch_to_device([arrays]) as batches:
            (out,) = batches
        with pytest.raises(TypeError, match="iterating a NpzFile does not give batches"):
            prefetch_to_device(arrays)
    assert {name: str(leaf.dtype) for name, leaf in out.items()} == {"x": "float32", "y": "int8"}
    np.testing.assert_array_equal(np.asarray(out["x"]), np.arange(4))


def test_a_generator_that_fills_the_same_array_is_safe():
    """What was delivered does not change when the generator goes on."""

    def filled():
        x = np.empty(4, np.float32)
        for i in range(6):
            x[:] = i
            yield {"x": x}

    with prefetch_to_device(filled()) as batches:
        assert numbers(list(batches)) == list(range(6))


def test_a_stream_of_jax_arrays_is_passed_on():
    """Arrays that JAX has made in the source are handed out themselves, on their devices."""
    device = jax.devices()[3]
    made = [{"x": jax.device_put(batch(i)["x"], device)} for i in range(3)]
    with prefetch_to_device(iter(made)) as batches:
        delivered = list(batches)
    assert all(out["x"] is b["x"] for out, b in zip(delivered, made, strict=True))
    assert numbers(delivered) == [0, 1, 2]


# ---- what is said


def forked(number):
    """A batch that comes with a process forked for it, which is gone at once."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return batch(number)


def said(caplog):
    return [record for record in caplog.records if "the source forks processes" in record.getMessage()]


@pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")  # JAX's own
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12 and later
@pytest.mark.parametrize("host_size", [0, 4])
def test_a_source_that_forks_is_said_once_with_the_cure(host_size, monkeypatch, caplog):
    """Forks of the source, on whichever thread it runs, are warned of once for the process."""
    monkeypatch.setattr(forks, "_said", [])
    with prefetch_to_device(map(forked, range(3)), host_size=host_size) as batches:
        assert numbers(batches) == [0, 1, 2]
    assert len(said(caplog)) == 1
    assert 'multiprocessing_context="forkserver"' in caplog.text


@pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_other_forks_are_no_concern(monkeypatch, caplog):
    """A fork of the loop's own, between batches, is not the source's."""
    monkeypatch.setattr(forks, "_said", [])
    with prefetch_to_device([batch(0), batch(1)]) as batches:
        assert number(next(batches)) == 0
        forked(0)
        assert number(next(batches)) == 1
    assert not said(caplog)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ({"a": {"x": [1.0] * 16}}, "a/x is"),
        ([1] * 20, "it is"),
        ({"x": [[0] * 16]}, "x/0 is"),
        ({"x": [np.int64(1)] * 16}, "x is"),
    ],
)
def test_lists_of_numbers_are_said_with_the_cure(made, name, caplog):
    """A list of many numbers becomes as many arrays, which is said once, unless it stays on the host."""
    with prefetch_to_device([made] * 3) as batches:
        assert jax.tree.structure(list(batches)) == jax.tree.structure([made] * 3)
    assert caplog.text.count(f"{name} a list of") == 1
    assert "numbers, each of which" in caplog.text
    caplog.clear()
    keep = {"a/x is": "a", "x/0 is": "x", "x is": "x"}.get(name)
    if keep:
        assert list(prefetch_to_device([made], keep_on_host=keep)) == [made]
    assert len(list(prefetch_to_device([[1] * 15]))) == 1
    assert "numbers, each of which" not in caplog.text


@pytest.mark.parametrize("sample", [{"f": np.ones(4), "y": np.int64(1)}, np.ones(4), [1.0, 2.0]])
def test_a_list_of_samples_is_said_with_the_cure(sample, caplog):
    """What was to be stacked is sent part by part, which is said once; parts that differ, or few, are a batch."""
    assert len(list(prefetch_to_device([[sample] * 16] * 3))) == 3
    assert caplog.text.count("batch 0 is a list of 16 trees alike") == 1
    assert "pass batched(samples, 16)" in caplog.text
    caplog.clear()
    others = [sample] * 15, [*[sample] * 15, np.ones(3)], (sample,) * 16, {"x": [sample] * 16}
    assert [len(list(prefetch_to_device([other]))) for other in others] == [1] * 4
    assert not caplog.text


def test_threads_and_iterators_of_a_pass_are_gone_after_it():
    """Each of several passes has one reader, which has ended with its iterator when the next one begins."""
    opened = []

    class Source:
        def __iter__(self):
            assert all(not iterator.gi_running and iterator.gi_frame is None for iterator in opened)
            opened.append(batch(i) for i in range(3))
            return opened[-1]

    with prefetch_to_device(Source()) as batches:
        for _ in range(3):
            assert numbers(batches) == [0, 1, 2]
            for thread in reader_threads():
                thread.join(LIMIT_S)
                assert not thread.is_alive()
    assert len(opened) == 3
