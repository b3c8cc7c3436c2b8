"""Errors keep their place, type and traceback."""

from __future__ import annotations

import dataclasses
import traceback

import jax
import pytest
from gated import Counted, Loader, batch, number, numbers, refusing, up_to_error

from jaxprefetch import DeviceCache, batched, evaluate, prefetch_to_device, train_loop

by_host_size = pytest.mark.parametrize("host_size", [0, 1, 4])
by_size = pytest.mark.parametrize("size", [1, 2, 3])
BYTES = batch(0)["x"].nbytes


class DiskGone(Exception):
    """An error of the source's own."""


@dataclasses.dataclass(frozen=True)
class Sealed(Exception):
    """Refuses attributes, and so notes and tracebacks that are assigned."""

    code: int


class Stop(BaseException):
    """Not an `Exception`, like `SystemExit`."""


def breaks_after(good, error):
    yield from map(batch, range(good))
    raise error


def notes(error):
    return "\n".join(getattr(error, "__notes__", []))


# ---- errors of the source


@by_host_size
def test_error_that_refuses_notes_arrives_as_it_is(host_size):
    """A source's exception that refuses attributes (a frozen dataclass) is raised itself, each time."""
    error = Sealed(7)
    with prefetch_to_device(breaks_after(1, error), host_size=host_size) as batches:
        next(batches)
        for _ in range(2):
            with pytest.raises(Sealed, match="7") as caught:
                next(batches)
            assert caught.value is error


def trained(source):
    train_loop(lambda state, batch: (state, {"loss": 0.0}), 0, source, num_steps=3, progress=False)


def evaluated(source):
    evaluate(lambda state, batch: batch["x"], 0, source)


def cached(source):
    with DeviceCache(len(batch(0)["x"]), batch(0)) as resident:
        resident.refresh(source)
        for _ in range(3):
            resident.take([0])


def stacked(source):
    list(batched(source, 3))


@pytest.mark.parametrize("call", [trained, evaluated, cached, stacked])
def test_error_that_refuses_notes_arrives_through_any_call(call):
    """The same through everything else that reads a source."""
    error = Sealed(9)
    with pytest.raises(Sealed, match="9") as caught:
        call(breaks_after(1, error))
    assert caught.value is error


def test_put_error_that_refuses_notes_arrives_as_it_is(monkeypatch):
    """The same for an exception that is raised while a batch is put."""
    error = Sealed(8)
    refusing(monkeypatch, 1, error, times=1)
    with prefetch_to_device(Loader(3)) as batches:
        delivered, raised = up_to_error(batches, Sealed, "8")
    assert delivered == [0]
    assert raised is error


@by_size
@by_host_size
@pytest.mark.parametrize("good", [0, 1, 5])
def test_source_error_comes_after_the_batches_before_it(size, host_size, good):
    """All batches made before the error are delivered, then the source's own exception with the batch in a note."""
    error = DiskGone("no such disk")
    with prefetch_to_device(breaks_after(good, error), size, host_size=host_size) as batches:
        delivered, raised = up_to_error(batches, DiskGone, "no such disk")
    assert delivered == list(range(good))
    assert raised is error
    assert f"raised by the source while it made batch {good}" in notes(error)


@by_host_size
def test_source_error_stays_and_its_traceback_does_not_grow(host_size):
    """`next()` and `for` raise the same error each time, with as many frames and notes as at first."""
    error = DiskGone("gone")
    with prefetch_to_device(breaks_after(1, error), host_size=host_size) as batches:
        next(batches)
        frames = []
        for _ in range(4):
            with pytest.raises(DiskGone, match="gone"):
                next(batches)
            frames.append([frame.name for frame in traceback.extract_tb(error.__traceback__)])
        with pytest.raises(DiskGone, match="gone"):
            list(batches)
    assert frames[1] == frames[2] == frames[3]
    assert len(frames[1]) <= len(frames[0])
    assert "breaks_after" in frames[3]
    assert len(error.__notes__) == 1


def test_source_error_is_raised_by_a_loader_that_could_begin_anew():
    """After an error no new pass begins, even where the source can be iterated again."""
    opened = []

    class Breaking:
        def __iter__(self):
            opened.append(True)
            return breaks_after(2, DiskGone("gone"))

    with prefetch_to_device(Breaking()) as batches:
        assert up_to_error(batches, DiskGone, "gone")[0] == [0, 1]
        with pytest.raises(DiskGone, match="gone"):
            next(iter(batches))
    assert len(opened) == 1


@by_host_size
def test_source_is_not_called_again_after_its_error(host_size):
    """An iterator that could go on after an error is left alone: what it would yield has no place any more."""

    class Hiccup(Counted):
        def __next__(self):
            made = super().__next__()
            if number(made) == 2:
                raise DiskGone("for a moment")
            return made

    source = Hiccup()
    with prefetch_to_device(source, host_size=host_size) as batches:
        assert up_to_error(batches, DiskGone, "for a moment")[0] == [0, 1]
        up_to_error(batches, DiskGone, "for a moment")
    assert source.pulled == 3


@by_host_size
def test_error_of_iter_itself(host_size):
    """A source that cannot be opened raises at batch 0."""

    class Closed:
        def __iter__(self):
            raise DiskGone("not mounted")

    with prefetch_to_device(Closed(), host_size=host_size) as batches:
        _, error = up_to_error(batches, DiskGone, "not mounted")
    assert "batch 0" in notes(error)


@by_host_size
def test_stop_iteration_inside_a_generator_is_an_error(host_size):
    """A `StopIteration` that escapes in a generator is an error, as in a `for` loop, and not an end."""

    def source():
        yield batch(0)
        next(iter([]))

    with prefetch_to_device(source(), host_size=host_size) as batches:
        assert up_to_error(batches, RuntimeError, "generator raised StopIteration")[0] == [0]


@by_host_size
def test_stop_iteration_in_staging_is_an_error(host_size):
    """A `StopIteration` that escapes from a leaf's `__array__` is an error: the pass does not end without saying so."""

    class Lazy:
        def __array__(self, dtype=None, copy=None):
            return next(iter([]))

    with prefetch_to_device([batch(0), {"x": Lazy()}, batch(2)], host_size=host_size) as batches:
        assert up_to_error(batches, RuntimeError, "StopIteration")[0] == [0]


@pytest.mark.parametrize("kind", [Stop, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_base_exception_of_the_source_reaches_the_loop(kind):
    """Whatever ends the source on its thread ends the loop in its place, also what is no `Exception`."""
    error = kind("ends")
    with prefetch_to_device(breaks_after(2, error)) as batches:
        delivered, raised = up_to_error(batches, kind, "ends")
    assert delivered == [0, 1]
    assert raised is error


def test_element_spec_raises_the_error_of_the_first_batch():
    """`element_spec` of a source that breaks at once raises the source's error; asking again does not lengthen it."""
    error = DiskGone("gone")
    with prefetch_to_device(breaks_after(0, error)) as batches:
        frames = []
        for _ in range(3):
            with pytest.raises(DiskGone, match="gone"):
                _ = batches.element_spec
            frames.append(len(traceback.extract_tb(error.__traceback__)))
        with pytest.raises(DiskGone, match="gone"):
            next(batches)
    assert frames[0] == frames[1] == frames[2]


# ---- errors of staging and of the put


@by_size
@by_host_size
def test_staging_error_comes_at_its_batch(size, host_size):
    """A leaf that cannot go to a device is told with batch and path, after all batches before it."""
    source = [batch(0), batch(1), batch(2) | {"y": object()}, batch(3)]
    with prefetch_to_device(source, size, host_size=host_size) as batches:
        delivered, _ = up_to_error(batches, TypeError, "Batch 2, leaf y: object cannot go to a device.*keep_on_host")
        assert delivered == [0, 1]
        up_to_error(batches, TypeError, "Batch 2, leaf y")


def out_of_memory():
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16 bytes.")


@by_size
@by_host_size
@pytest.mark.parametrize("delete_used", [False, True], ids=["keep", "delete_used"])
@pytest.mark.parametrize("at", range(4))
def test_out_of_memory_once_is_tried_again(size, host_size, delete_used, at, monkeypatch):
    """A put that fails for want of memory is repeated once when its batch is needed; no batch is lost or doubled."""
    attempts = refusing(monkeypatch, at, out_of_memory(), times=1)
    with prefetch_to_device(Loader(6), size, host_size=host_size, delete_used=delete_used) as batches:
        assert numbers(batches) == list(range(6))
    assert sorted(attempts) == sorted([*range(6), at])


@by_size
@by_host_size
@pytest.mark.parametrize("at", range(4))
def test_out_of_memory_twice_is_an_error_with_the_figures(size, host_size, at, monkeypatch):
    """The second failure of one batch is raised in its place, with the bytes it needs, those held, and the cure."""
    error = out_of_memory()
    attempts = refusing(monkeypatch, at, error, times=2)
    with prefetch_to_device(Loader(6), size, host_size=host_size) as batches:
        delivered, raised = up_to_error(batches, jax.errors.JaxRuntimeError, "RESOURCE_EXHAUSTED")
        up_to_error(batches, jax.errors.JaxRuntimeError, "RESOURCE_EXHAUSTED")
    assert delivered == list(range(at))
    assert raised is error
    held = BYTES if at else 0
    assert f"batch {at} needs {BYTES} bytes on a device beside the {held} of batches in flight" in notes(error)
    assert "take smaller batches" in notes(error)
    assert attempts.count(at) == 2


@by_size
@by_host_size
@pytest.mark.parametrize("at", range(4))
def test_other_put_error_comes_at_its_batch(size, host_size, at, monkeypatch):
    """Another error of a put is not repeated; it is raised after the batches before, with a note."""
    attempts = refusing(monkeypatch, at, DiskGone("device gone"), times=9)
    with prefetch_to_device(Loader(6), size, host_size=host_size) as batches:
        delivered, error = up_to_error(batches, DiskGone, "device gone")
        up_to_error(batches, DiskGone, "device gone")
    assert delivered == list(range(at))
    assert f"raised when batch {at} was put on its devices" in notes(error)
    assert attempts.count(at) == 1
