"""The coordination service's client: found where JAX has it, and without it the public way is gone."""

from __future__ import annotations

import types

import pytest
from jax._src import distributed

from jaxprefetch.processes.service import NEEDED, Service


def test_no_service_without_processes():
    """A program that has not called `jax.distributed.initialize` has none."""
    assert Service.find() is None


@pytest.mark.parametrize("missing", [None, *NEEDED])
def test_a_client_that_lacks_something(missing, monkeypatch):
    """A client of another JAX is taken only if it has all that is needed."""
    client = types.SimpleNamespace(**{name: lambda: None for name in NEEDED if name != missing})
    monkeypatch.setattr(distributed.global_state, "client", client)
    assert (Service.find() is None) == (missing is not None)


def test_no_such_module(monkeypatch):
    """A JAX that keeps its client elsewhere has none for us."""
    monkeypatch.delattr(distributed, "global_state")
    assert Service.find() is None
