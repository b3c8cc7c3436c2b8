"""Data is never executed, states from a disk are checked, no port is opened, raw memory has its one place."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gated import run_python

import jaxprefetch
from jaxprefetch import Checkpoints, prefetch_to_device
from jaxprefetch.host.slots import Slots
from jaxprefetch.host.states import TAG, from_json, to_json

HOUSE = Path(jaxprefetch.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))


def modules_of(path: Path) -> set[str]:
    """The modules that a file imports, by the name of their package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def calls_of(path: Path) -> set[str]:
    """The functions that a file calls by a bare name, and the attributes that it uses."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    bare = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bare | {f".{node.attr}" for node in nodes if isinstance(node, ast.Attribute)}


# ---- nothing is executed, nothing listens


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_no_file_executes_data_or_reaches_out(path: Path) -> None:
    """No module that unpickles, runs programs or opens connections is imported; one text becomes code."""
    banned = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "runpy", "code"}
    banned |= {"socket", "socketserver", "http", "urllib", "ssl", "asyncio", "xmlrpc", "subprocess", "multiprocessing"}
    assert not modules_of(path) & banned
    assert not calls_of(path) & {
        "eval",
        "exec",
        "compile",
        "__import__",
        ".allow_pickle",
        ".listen",
        ".bind",
        ".system",
        *(() if path.name == "machine_code.py" else (".parse_assembly",)),
    }


def test_nothing_listens() -> None:
    """A process that prefetches, queues, caches, fetches and trains has no socket that waits for connections."""
    script = """
import os
import numpy as np
from jaxprefetch import DeviceCache, DeviceQueue, fetch_to_host, prefetch_to_device, train_loop

def listening():
    fds = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    mine = {os.readlink(fd) for fd in fds if os.path.lexists(fd)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in list(open(f"/proc/self/net/{name}"))[1:]]
    return [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine]

rows = np.arange(8.0, dtype=np.float32)
with prefetch_to_device([rows] * 4) as batches, DeviceQueue(2) as queue, DeviceCache(8, rows) as cache:
    queue.put(rows)
    results = [list(fetch_to_host(batches)), queue.get(), cache.take([0])]
    train_loop(lambda s, b: (s, {"loss": b.sum()}), rows, [rows], num_steps=2, progress=False)
    print(listening())
"""
    code, output, errors = run_python(script)
    assert code == 0, errors
    assert output.splitlines()[-1] == "[]"


def test_raw_memory_has_its_place() -> None:
    """One file calls the driver, one native code; another maps memory and cuts it, as the probe of the link does."""
    assert [path.name for path in FILES if "ctypes" in modules_of(path)] == ["pinning.py", "native.py"]
    assert [path.name for path in FILES if calls_of(path) & {".dma_map", ".dma_unmap"}] == ["pinning.py"]
    mapping = [path.name for path in FILES if "mmap" in modules_of(path)]
    assert mapping == ["link.py", "native.py", "slots.py"]  # native.py only looks what is mapped


@pytest.mark.parametrize(("offset", "values"), [(4096, 1), (0, 1025), (-64, 4), (4032, 17), (1 << 40, 1)])
def test_a_view_beyond_its_slot_is_an_error(offset: int, values: int) -> None:
    """Nobody gets at memory that is not the slot's."""
    slot = Slots().take(4096)
    with pytest.raises(IndexError, match=rf"slot of 4096 bytes: no {4 * values} bytes from {offset} on"):
        slot.view(offset, np.dtype(np.float32), (values,))


# ---- states


def test_states_survive_json() -> None:
    """What goes in comes out, with its types and bits."""
    state = {
        "plain": [None, True, 3, -2.5, "text", 1 << 80],
        "floats": [math.inf, -math.inf],
        ("a", 1): (b"\0\xff", np.uint16([[1], [2]]), np.float32(0.1)),
        TAG: {1: {"nested": ()}},
    }
    back = from_json(json.loads(json.dumps(to_json(state))))
    assert repr(back) == repr(state)


DAMAGED = [
    {TAG: "array", "dtype": "<i4", "shape": [3], "value": "AAAA"},  # too few bytes
    {TAG: "array", "dtype": "<i4", "shape": [-1], "value": "AAAAAA=="},
    {TAG: "array", "dtype": "<i4", "shape": [1 << 62, 1 << 62], "value": "AAAAAA=="},
    {TAG: "array", "dtype": "<i4", "shape": "1", "value": "AAAAAA=="},
    {TAG: "array", "dtype": "O", "shape": [1], "value": "AAAAAAAAAAA="},  # an address
    {TAG: "array", "dtype": ["<i4"], "shape": [1], "value": "AAAAAA=="},
    {TAG: "array", "dtype": "no", "shape": [1], "value": "AAAAAA=="},
    {TAG: "array", "shape": [1], "value": "AAAAAA=="},
    {TAG: "bytes", "value": "not base 64"},
    {TAG: "bytes", "value": 3},
    {TAG: "bytes"},
    {TAG: "float", "value": "1e5"},
    {TAG: "float", "value": ["nan"]},
    {TAG: "dict", "value": [[[], 1]]},
    {TAG: "dict", "value": [["a"]]},
    {TAG: "dict", "value": 3},
    {TAG: "tuple", "value": "ab"},
    {TAG: "number", "dtype": "<f4", "shape": [], "value": ""},
    {TAG: "os.system", "value": "true"},
    {TAG: ["array"], "value": ""},
    {TAG: None},
]


@pytest.mark.parametrize("value", DAMAGED, ids=str)
def test_damaged_states_are_told(value: Any) -> None:
    """Whatever is wrong in a state from a disk is a `ValueError` that says where, and what to do."""
    for state, where in (({"a": [0, value]}, "state/a/1"), ({TAG: "tuple", "value": [value]}, "state/0")):
        with pytest.raises(ValueError, match=rf"damaged at {where}: expected .*, got .*Take an earlier one"):
            from_json(state)


class Source:
    """Three batches, with a state that JSON cannot hold as it is."""

    def __iter__(self) -> Iterator[Any]:
        return (np.full(4, i, np.float32) for i in range(3))


def saved(folder: Path) -> Path:
    """A checkpoint at step 1; returns the file with the state of the input."""
    with Checkpoints(folder) as checkpoints, prefetch_to_device(Source(), resume="replay") as batches:
        next(batches)
        checkpoints.save(1, {"w": np.zeros(3)}, batches)
    (path,) = (folder / "1" / "input").glob("metadata")
    return path


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda text: text[:-9], "."),
        (lambda text: "", "."),
        (lambda text: "[]", "input's state of 0 processes|expected a list"),
        (lambda text: '{"processes": 3}', "Checkpoint 1: expected a list of the input's states at input/processes"),
        (lambda text: '{"processes": [7]}', "set_state: expected what get_state"),
        (lambda text: text.replace('"taken": 1', '"taken": -1'), "set_state: taken: expected an integer from 0"),
        (lambda text: text.replace('"taken": 1', '"taken": "1"'), "set_state: taken: .* got str '1'"),
        (lambda text: text.replace('"taken": 1', '"taken": 1e400'), "set_state: taken: .* got float inf"),
        (lambda text: text.replace('"taken": 1,', ""), "set_state: expected what get_state"),
        (lambda text: text.replace('"taken": 1', '"taken": 1, "more": 2'), "set_state: expected what get_state"),
    ],
    ids=["cut off", "empty", "a list", "a number", "no state", "negative", "text", "infinite", "missing", "extra"],
)
def test_a_damaged_checkpoint_is_told_and_changes_nothing(damage: Any, match: str, tmp_path: Path) -> None:
    """The error says what is wrong; the prefetcher begins where it would have."""
    path = saved(tmp_path)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with Checkpoints(tmp_path) as checkpoints, prefetch_to_device(Source(), resume="replay") as batches:
        with pytest.raises(ValueError, match=match) as caught:
            checkpoints.restore({"w": np.ones(3)}, batches)
        told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert "heckpoint 1" in told or "set_state" in told
        assert [int(batch[0]) for batch in batches] == [0, 1, 2]
