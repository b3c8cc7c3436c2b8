"""The demo, without what it measures."""

from __future__ import annotations

from typing import Any

import pytest

from jaxprefetch import demo


def test_no_bar_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors that go to a file have no bar among them."""
    replaced: dict[str, Any] = {"make_model": (None, None), "train_step": 0.5, "accuracy": 1.0}
    for name, result in replaced.items():
        monkeypatch.setattr(demo, name, lambda *_, result=result: result)
    run = demo.train("a run", [{}, {}], 2, {}, replicated=None)  # type: ignore[arg-type]
    assert (run.last_loss, run.accuracy) == (0.5, 1.0)
    assert capsys.readouterr().err == ""
