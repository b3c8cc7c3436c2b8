"""The public names: there, listed, and imported only when they are asked for."""

from __future__ import annotations

import pytest
from gated import run_python

import jaxprefetch


def test_every_public_name_is_there_and_listed():
    """`__all__` has what can be imported, and `dir()` shows it."""
    for name in jaxprefetch.__all__:
        assert getattr(jaxprefetch, name).__module__.startswith("jaxprefetch."), name
    assert set(jaxprefetch._WHERE) == set(jaxprefetch.__all__) <= set(dir(jaxprefetch))


def test_unknown_names_are_an_attribute_error():
    """A misspelt name is no import error."""
    with pytest.raises(AttributeError, match="module 'jaxprefetch' has no attribute 'prefetch_to_devices'"):
        _ = jaxprefetch.prefetch_to_devices


def test_importing_brings_nothing_else():
    """Adapter, loop, cache and queue, and the packages of others that they need, come when they are asked for."""
    code, out, errors = run_python(
        "import sys, jaxprefetch\n"
        "late = {'jaxprefetch.' + name for name in jaxprefetch._WHERE.values()}\n"
        "print(sorted((late | {'flax', 'orbax', 'tqdm', 'grain'}) & set(sys.modules)))\n"
        "jaxprefetch.train_loop, jaxprefetch.Checkpoints\n"
        "print(sorted({'flax', 'orbax', 'tqdm', 'jaxprefetch.loop'} & set(sys.modules)))\n"
    )
    assert (code, errors) == (0, "")
    assert out.splitlines() == ["[]", "['jaxprefetch.loop']"]
