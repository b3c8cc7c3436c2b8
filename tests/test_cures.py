"""A message that names an option says whose it is, and how whoever gave the source to another call sets it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from gated import refusing
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxprefetch
from jaxprefetch import prefetch_to_device
from jaxprefetch.errors import OPTION

SHORT, TEXT = {"x": np.zeros(7, np.float32)}, {"x": "text"}


def split() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


def step(state: Any, batch: Any) -> Any:
    return state, {"loss": 0.0}


def train(batch: Any) -> None:
    jaxprefetch.train_loop(step, 0, [batch], num_steps=2, sharding=split(), progress=False)


def train_on_a_prefetcher(batch: Any) -> None:
    with prefetch_to_device([batch], sharding=split()) as batches:
        jaxprefetch.train_loop(step, 0, batches, num_steps=2, progress=False)


def evaluate(batch: Any) -> None:
    jaxprefetch.evaluate(lambda state, batch: batch["x"], 0, [batch], sharding=split())


def put(batch: Any) -> None:
    with jaxprefetch.DeviceQueue(2, sharding=split()) as queue:
        queue.put(batch)


def cache(batch: Any) -> None:
    with jaxprefetch.DeviceCache(8, batch, sharding=split()):
        pass


def refresh(batch: Any) -> None:
    with jaxprefetch.DeviceCache(8, {"x": np.zeros(8, np.float32)}, sharding=split()) as resident:
        resident.refresh([batch])
        for _ in range(2):
            resident.take(np.arange(8))


def told(call: Callable[[Any], None], batch: Any, kind: type[Exception]) -> tuple[str, str]:
    """The message, and the notes that say how to set an option."""
    with pytest.raises(kind, match=r"leaf x|multiple") as caught:
        call(batch)
    return str(caught.value), "".join(note for note in getattr(caught.value, "__notes__", []) if "as source" in note)


def insert(batch: Any) -> None:
    with jaxprefetch.DeviceCache(8, {"x": np.zeros(8, np.float32)}, sharding=split()) as resident:
        resident.insert(batch)


@pytest.mark.parametrize("call", [train, train_on_a_prefetcher, evaluate, put, cache, insert, refresh])
def test_a_leaf_that_no_device_takes(call) -> None:
    """Whose option keeps it is told to those who can set it, and to all what they can do without."""
    batch = {"x": np.full(8, "text")} if call in (cache, insert) else TEXT
    message, _ = told(call, batch, TypeError)
    if call in (put, cache, insert, refresh):
        assert message.endswith("cannot go to a device. Leave it out.")
    else:
        assert message.endswith(f"{OPTION}keep_on_host=...) hands it on as it is; else leave it out.")


@pytest.mark.parametrize("call", [train, train_on_a_prefetcher, put, refresh])
def test_rows_that_do_not_divide(call) -> None:
    """The same with rows; only `evaluate` pads by itself, and a cache has no short batches."""
    message, _ = told(call, SHORT, ValueError)
    if call in (put, refresh):
        assert message.endswith("need a multiple of 8. Batch to a multiple of 8.")
    else:
        assert f"{OPTION}last_batch='pad') fills a short last batch up" in message
        assert message.endswith("else batch to a multiple of 8.")


@pytest.mark.parametrize("who", ["queue", "refresh", "prefetcher"])
def test_a_device_without_memory(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who can give batches back sooner is told to; a queue has a size, as a prefetcher has."""
    refusing(monkeypatch, 0, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory"), times=99)
    batch = {"x": np.zeros(8, np.float32)}
    with contextlib.ExitStack() as stack:
        if who == "queue":
            queue = stack.enter_context(jaxprefetch.DeviceQueue(2))
            queue.put(batch)
            ask = queue.get
        elif who == "refresh":
            cache = stack.enter_context(jaxprefetch.DeviceCache(8, batch))
            cache.refresh([batch])
            next(cache.batches(8, jax.random.key(0)))
            ask = functools.partial(cache.take, [0])
        else:
            ask = functools.partial(next, stack.enter_context(prefetch_to_device([batch])))
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
            ask()
    note = next(note for note in caught.value.__notes__ if "needs 32 bytes" in note)
    fewer = "ake smaller batches or, where there is one, a smaller size."
    if who == "prefetcher":
        assert note.endswith(f"batches in flight. {OPTION}delete_used=True) needs one less; else t{fewer}")
    else:
        assert note.endswith(f"batches in flight. T{fewer}")


def test_a_sample_that_cannot_be_stacked() -> None:
    """No option keeps a part of a batch on the host while that is stacked."""
    ragged = type("RaggedTensor", (), {"__module__": "tensorflow.python", "__array__": None})
    for samples in ([ragged()] * 2, [np.zeros(3), ragged()]):
        with pytest.raises(TypeError, match=r"Batch 0, sample .*row_lengths\(\)\. Leave it out\.$"):
            next(iter(jaxprefetch.batched(samples, 2)))


def test_what_names_no_option_stays_as_it_is() -> None:
    """An error of the source's own is raised as it was made, with arguments of any kind."""
    error = OSError(2, "else; no")

    def fails() -> Any:
        raise error
        yield

    with jaxprefetch.DeviceCache(8, {"x": np.zeros(8, np.float32)}) as resident:
        resident.refresh(fails())
        with pytest.raises(OSError, match="else; no") as caught:
            for _ in range(2):
                resident.take([0])
    assert caught.value is error
    assert error.args == (2, "else; no")


@pytest.mark.parametrize("notes", [["mine"], ("mine",), "mine", None], ids=str)
def test_notes_and_arguments_of_any_kind_stay_as_they_are(notes: Any) -> None:
    """Where there is no option to name, an exception of the user's is not written to at all."""

    class Odd(Exception):
        args: ClassVar[Any] = {"code": 3}

    class Fails:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise error

    error = Odd()
    error.__notes__ = notes
    for call in (put, lambda batch: next(iter(jaxprefetch.batched([batch] * 2, 2)))):
        with pytest.raises(Odd) as caught:
            call({"x": Fails()})
        assert caught.value is error
        assert error.args == {"code": 3}
        assert error.__notes__[:1] == ["mine"] if isinstance(notes, list) else error.__notes__ is notes


def test_who_gave_a_bare_source_is_told_where_options_are_set() -> None:
    """A note of the call through which the user came, and of that only."""
    pass_it = "jaxprefetch: pass {} a prefetch_to_device(...), with that and all other options{}, as source"
    assert told(train, SHORT, ValueError)[1] == pass_it.format("train_loop", "")
    assert told(train, TEXT, TypeError)[1] == pass_it.format("train_loop", "")
    assert told(evaluate, TEXT, TypeError)[1] == pass_it.format("evaluate", " and last_batch='pad'")
    for call in (train_on_a_prefetcher, put, refresh):
        assert not told(call, TEXT, TypeError)[1]


def test_what_is_raised_beside_the_source_has_no_such_note() -> None:
    """An evaluation in the loop has sources of its own, and tells by itself where their options are set."""
    with pytest.raises(TypeError, match="leaf x") as caught:
        jaxprefetch.train_loop(
            step, 0, [{"x": 0}], num_steps=1, eval_fn=lambda state: evaluate(TEXT), eval_every_steps=1, progress=False
        )
    assert [note for note in caught.value.__notes__ if "as source" in note] == [
        "jaxprefetch: pass evaluate a prefetch_to_device(...), with that and all other options and last_batch='pad', "
        "as source"
    ]


def test_other_errors_have_no_such_note() -> None:
    """What names no option is left as it is."""

    def fails(state: Any, batch: Any) -> Any:
        raise ValueError("leaf x of my own")

    def call(batch: Any) -> None:
        jaxprefetch.train_loop(fails, 0, [batch], num_steps=1, progress=False)

    assert told(call, SHORT, ValueError) == ("leaf x of my own", "")
