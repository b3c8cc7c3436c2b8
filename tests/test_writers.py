"""Writers: what they write, and what remains when a run is resumed."""

from __future__ import annotations

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from gated import Loader

import jaxprefetch
from jaxprefetch.loop import train_loop
from jaxprefetch.writers import CSVWriter, JSONLWriter, TensorBoardWriter


def test_jsonl(tmp_path):
    """A line for each call, valid JSON also for what is no finite number."""
    path = tmp_path / "log.jsonl"
    write = JSONLWriter(path)
    write(1, {"loss": 0.5, "ok": True, "x": np.arange(2), "y": np.float32([0.5])})
    write(2, {"loss": float("nan"), "a": float("inf"), "b": -float("inf")})
    lines = path.read_text().splitlines()
    write.close()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 1, "loss": 0.5, "ok": True, "x": [0, 1], "y": [0.5]},
        {"step": 2, "loss": "NaN", "a": "Infinity", "b": "-Infinity"},
    ]


@pytest.mark.parametrize("kind", [JSONLWriter, CSVWriter])
def test_a_resumed_run_replaces_the_steps_that_it_does_again(kind, tmp_path):
    """Steps from the first one written on are taken out of the file, and a line that a kill has cut."""
    path = tmp_path / "log"
    write = kind(path)
    for step in (1, 2, 3, 4):
        write(step, {"loss": step / 2})
    write.close()
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:3])
    write = kind(path)
    write(3, {"loss": 30.5})
    write(4, {"loss": 40.5})
    write.close()
    if kind is CSVWriter:
        assert path.read_text().split() == ["step,loss", "1,0.5", "2,1.0", "3,30.5", "4,40.5"]
    else:
        assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [0.5, 1.0, 30.5, 40.5]


@pytest.mark.parametrize("kind", [JSONLWriter, CSVWriter])
def test_a_new_run_that_replaces_a_former_ones_log_says_so(kind, tmp_path, caplog):
    """One warning, with what was lost; none where earlier steps stay, or for a file that is new."""
    path = tmp_path / "log"

    def write(*steps):
        caplog.clear()
        writer = kind(path)
        for step in steps:
            writer(step, {"loss": step / 2})
        writer.close()
        return [record.getMessage() for record in caplog.records]

    assert write(10, 20, 30) == []
    assert write(20, 30, 40) == []
    assert write(10, 20) == [
        f"jaxprefetch: {path}: the log of a former run, 4 rows from step 10 on, is replaced by this run's, from "
        "step 10 on. Give each run a file of its own to keep both."
    ]


@pytest.mark.parametrize("row", ['{"loss": 1}', "[1]", "1", "text", "", '{"step": null}', '{"step": "first"}'])
def test_lines_that_are_no_log_are_left_as_they_are(row, tmp_path):
    """The error shows the row and says what to do."""
    path = tmp_path / "data.jsonl"
    path.write_text(content := f'{{"step": 1}}\n{row}\n')
    with pytest.raises(
        ValueError, match=r"data.jsonl: expected a log with a step in each row, got .*: pass the path of a new"
    ):
        JSONLWriter(path)(5, {"loss": 1.0})
    assert path.read_text() == content


@pytest.mark.parametrize("table", ["loss,x\n1,2\n", "step,x\nfirst,2\n", "x,step\n1\n"])
def test_a_table_without_steps_is_left_as_it_is(table, tmp_path):
    """The error shows the row and says what to do."""
    path = tmp_path / "data.csv"
    path.write_text(table)
    with pytest.raises(
        ValueError, match=r"data.csv: expected a log with a step in each row, got .*: pass the path of a new"
    ):
        CSVWriter(path)(5, {"loss": 1.0})
    assert path.read_text() == table


def test_a_finished_run_that_is_started_again_leaves_its_log_as_it_is(tmp_path):
    """No step is done, so nothing is evaluated and no hook is called."""
    path, seen = tmp_path / "log.jsonl", []
    for _ in range(2):
        write = JSONLWriter(path)
        _, summary = train_loop(
            lambda state, batch: (state + 1, {"loss": batch["x"].sum()}),
            jnp.zeros(()),
            [{"x": jnp.ones(4)}] * 3,
            num_steps=3,
            checkpoints=tmp_path / "run",
            resume="replay",
            hooks=write,
            eval_fn=lambda state: {"state": state},
        )
        write.close()
        seen.append((summary.steps, [json.loads(line) for line in path.read_text().splitlines()]))
    assert seen[0] == seen[1]
    assert [line["step"] for line in seen[0][1]] == [1, 2, 3, 3]


def test_the_module_is_there_by_its_name():
    """`jaxprefetch.writers` needs no import of its own."""
    assert jaxprefetch.writers.JSONLWriter is JSONLWriter
    assert "writers" in dir(jaxprefetch)


def test_csv_is_widened_by_new_metrics(tmp_path):
    """A metric that comes later, of an evaluation, is a new column; arrays have none."""
    path = tmp_path / "log.csv"
    write = CSVWriter(path)
    write(1, {"loss": 0.5, "x": np.arange(3)})
    write(1, {"eval/loss": 0.25})
    write(2, {"loss": 0.125})
    write.close()
    assert path.read_text().split() == ["step,loss,eval/loss", "1,0.5,", "1,,0.25", "2,0.125,"]


def test_tensorboard(tmp_path):
    """Scalars arrive in the event file, with their steps."""
    write = TensorBoardWriter(tmp_path)
    for step in (1, 2):
        write(step, {"loss": step / 2, "x": np.arange(3)})
    write.flush()
    write.close()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert content.count(b"loss") == 2


def test_missing_tensorboardx_names_the_extra(monkeypatch, tmp_path):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ModuleNotFoundError, match=r'TensorBoardWriter needs tensorboardX.*"jaxprefetch\[tensorboard\]"'
    ):
        TensorBoardWriter(tmp_path)


def test_writers_are_flushed_at_the_end(tmp_path):
    """The loop has its hooks write down what they hold back."""
    flushed = []

    class Hook:
        def __call__(self, step, metrics):
            assert not flushed

        def flush(self):
            flushed.append(True)

    train_loop(lambda s, b: (s, {"loss": 1.0}), jnp.zeros(1), Loader(3), num_steps=3, hooks=[Hook()], progress=False)
    assert flushed == [True]
