"""Wrong calls and wrong batches: the error, what it tells, and the state afterwards; `bad_input.md` is made of this.

JAXPREFETCH_WRITE=1 pytest tests/test_bad_input.py       # writes bad_input.md anew
"""

from __future__ import annotations

import builtins
import contextlib
import os
import queue as queue_module
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bad_input
import jax
import numpy as np
import pytest
from bad_input import Row, rows_of
from gated import on_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprefetch

DOCUMENT = Path(__file__).with_name("bad_input.md")
ROWS = 24
GOOD = {"x": np.arange(ROWS, dtype=np.float32)}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax")

CALLS, BATCHES, OBJECTS = (rows_of(table) for table in (bad_input.CALLS, bad_input.BATCHES, bad_input.OBJECTS))
by_call = {"ids": lambda row: row.call}


class CountedSource:
    """Four batches, any number of times; counts what was pulled."""

    pulled = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            self.pulled += 1
            yield GOOD


class Writes:
    """Returns what it is told to."""

    def __init__(self, spec: Any, returns: Any):
        self.element_spec, self._returns = spec, returns

    def read_into(self, out: Any) -> Any:
        return self._returns


def with_mesh(source: Any, **options: Any) -> Any:
    """A prefetcher made under a mesh of one axis, `data`."""
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()), ("data",))):
        return jaxprefetch.prefetch_to_device(source, **options)


class Reader:
    """Writes nothing, and describes its batches as it is told to, or not at all."""

    def __init__(self, spec: Any):
        if spec is not None:
            self.element_spec = spec

    def read_into(self, out: Any) -> int:
        return 0


class Passes:
    """What its `__iter__` returns."""

    def __init__(self, made: Any):
        self._made = self if made == "itself" else made

    def __iter__(self) -> Any:
        return self._made


class Following:
    """An iterator of jaxprefetch's, and how many results come before the wrong one."""

    def __init__(self, results: Any, good: int):
        self.results, self.good = results, good


def step(state: Any, batch: Any) -> Any:
    return state, {"loss": jax.numpy.float32(0)}


def given(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """What the rows' calls speak of."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    source, deleted = CountedSource(), jax.numpy.zeros(3)
    deleted.delete()
    prefetch = jaxprefetch.prefetch_to_device
    names = {name: getattr(jaxprefetch, name) for name in jaxprefetch.__all__}
    return names | {
        **{"jax": jax, "np": np, "P": P, "NamedSharding": NamedSharding, "mesh": mesh, "key": jax.random.key(0)},
        **{"source": source, "good": GOOD, "rows": GOOD["x"], "deleted": deleted, "step": step, "folder": folder},
        "split": NamedSharding(mesh, P("data")),
        "spec": {"x": jax.ShapeDtypeStruct((ROWS,), np.float32)},
        "with_mesh": with_mesh,
        "Reader": Reader,
        "source_of": lambda made: Following(prefetch(Passes(made)), 0),
        "first": lambda bad, **options: Following(prefetch([bad], **options), 0),
        "after_two": lambda bad, **options: Following(prefetch([GOOD, GOOD, bad, GOOD], **options), 2),
        "writes": lambda spec, returns: Following(prefetch(Writes(spec, returns)), 0),
        "stacks": lambda samples: Following(prefetch(jaxprefetch.batched(samples, 2)), 0),
        "fetches": lambda outputs: Following(jaxprefetch.fetch_to_host(outputs), 2),
    }


def kind_of(row: Row) -> type[Exception]:
    return queue_module.Empty if row.error == "queue.Empty" else getattr(builtins, row.error)


def check_message(row: Row, error: BaseException) -> None:
    assert type(error) is kind_of(row), repr(error)
    told = "\n".join([str(error), *getattr(error, "__notes__", [])])
    for part in row.parts:
        assert part in told, told


def failing(row: Row, call: Callable[[], Any]) -> BaseException:
    with pytest.raises(kind_of(row), match=r"^.") as caught:  # the message has its own check
        call()
    check_message(row, caught.value)
    return caught.value


@pytest.mark.parametrize("row", CALLS, **by_call)
def test_a_wrong_call_is_refused_before_anything_is_pulled(row: Row, tmp_path: Path) -> None:
    """Nothing is made: no batch was pulled, no thread runs, nothing lies on a device."""
    with contextlib.ExitStack() as stack:
        names = given(tmp_path, stack)
        failing(row, lambda: eval(row.call, names))
        assert names["source"].pulled == 0
    assert on_devices(ROWS) == 0


@pytest.mark.parametrize("row", BATCHES, **by_call)
def test_a_wrong_batch_is_refused_in_its_place(row: Row, tmp_path: Path) -> None:
    """Those before it are delivered, the error stays the same however often it is asked for, and nothing is left."""
    with contextlib.ExitStack() as stack:
        following = eval(row.call, given(tmp_path, stack))
        results = stack.enter_context(following.results)
        for _ in range(following.good):
            next(results)
        first = failing(row, lambda: next(results))
        assert failing(row, lambda: next(results)) is first
    assert next(results, None) is None
    following = results = first = None
    assert on_devices(ROWS) == 0


def queue_goes_on(queue: Any) -> None:
    while len(queue):
        queue.get()
    queue.put(GOOD)
    np.testing.assert_array_equal(np.asarray(queue.get()["x"]), GOOD["x"])


def cache_goes_on(cache: Any) -> None:
    assert (cache.takes, cache.refreshes, len(cache)) == (0, 0, ROWS)
    np.testing.assert_array_equal(np.asarray(cache.take(np.arange(ROWS))["x"]), GOOD["x"])


def batches_go_on(batches: Any) -> None:
    assert [len(batch["x"]) for batch in batches] == [ROWS] * 4


def checkpoints_go_on(checkpoints: Any) -> None:
    assert checkpoints.latest_step is None
    checkpoints.save(1, GOOD)
    checkpoints.wait()
    np.testing.assert_array_equal(checkpoints.restore(GOOD)[0]["x"], GOOD["x"])


OBJECTS_OF = {
    "queue": (lambda names: jaxprefetch.DeviceQueue(2), queue_goes_on),
    "cache": (lambda names: jaxprefetch.DeviceCache(ROWS, GOOD), cache_goes_on),
    "batches": (lambda names: jaxprefetch.prefetch_to_device(names["source"], resume="replay"), batches_go_on),
    "checkpoints": (lambda names: jaxprefetch.Checkpoints(names["folder"]), checkpoints_go_on),
}


@pytest.mark.parametrize("row", OBJECTS, **by_call)
def test_a_refused_call_changes_nothing(row: Row, tmp_path: Path) -> None:
    """The queue, cache, prefetcher or checkpoints go on as if the call had not been made."""
    name = row.call.partition(".")[0]
    make, goes_on = OBJECTS_OF[name]
    with contextlib.ExitStack() as stack:
        names = given(tmp_path, stack)
        names[name] = it = stack.enter_context(make(names))
        failing(row, lambda: eval(row.call, names))
        goes_on(it)


# ---- the document

HEAD = """# Wrong input

Made by `JAXPREFETCH_WRITE=1 pytest tests/test_bad_input.py` of the rows in `bad_input.py`, each of which the test suite
runs: the exact type of the error, what its message (with the notes) tells, and the state afterwards. Where nothing is
said of what to do, the expectation says it.

In the calls `good` is a batch of 24 rows and `source` an iterable of such batches; `after_two(batch)` takes the third
batch from `prefetch_to_device([good, good, batch, good])`, `first(batch)` the first from one of that batch;
`Reader(spec)` has `read_into` and this `element_spec`, if it is not None; `source_of(made)` prefetches an object whose
`__iter__` returns this, or itself; `writes(spec, n)` prefetches a source with this `element_spec` whose `read_into`
returns n; `stacks(samples)` prefetches `batched(samples, 2)`; `fetches(outputs)` takes the third result of
`fetch_to_host(outputs)`.
"""

SECTIONS = {
    "Calls that are refused": ("nothing has been made, pulled or started", CALLS),
    "Batches that are refused": (
        "what came before is delivered, every later `next()` raises the same error, nothing is left after `close()`",
        BATCHES,
    ),
    "Calls on something that goes on": ("nothing has changed, and the next right call works", OBJECTS),
}


def document() -> str:
    lines = [HEAD]
    for title, (after, rows) in SECTIONS.items():
        lines += [f"## {title}", "", f"Afterwards {after}.", ""]
        lines += ["| call | error | where | got | expected | what to do |", "|---|---|---|---|---|---|"]
        for row in rows:
            cells = [f"`{row.call}`", f"`{row.error}`", row.where.rstrip(":"), row.got, row.expected, row.cure]
            cells = [cell.replace("|", "\\|") if cell != "=" else "" for cell in cells]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def test_the_document_is_up_to_date() -> None:
    """`bad_input.md` says what the rows say, of which there are enough."""
    if os.environ.get("JAXPREFETCH_WRITE"):
        DOCUMENT.write_text(document())
    assert DOCUMENT.read_text() == document()
    assert len(CALLS + BATCHES + OBJECTS) >= 60
