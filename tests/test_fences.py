"""Fences: one computation for the devices of each platform."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from jaxprefetch.device import completion
from jaxprefetch.device.fences import Fences


@pytest.mark.parametrize("n", [1, 2, 8])
def test_a_fence_is_done_when_waited_for(n) -> None:
    """A fence on any number of devices covers its step and those before it, and is done once waited for."""
    fences = Fences()
    fences.dispatch(3, tuple(jax.devices()[:n]))
    assert not fences.is_done(2)
    assert fences.wait(1) == 3
    assert fences.is_done(3)
    fences.forget(3)
    assert not fences.is_done(3)


def test_no_devices_have_nothing_to_wait_for() -> None:
    """A fence over no devices, for batches without device leaves, is done at once."""
    fences = Fences()
    fences.dispatch(0, ())
    assert fences.is_done(0)
    assert fences.wait(0) == 0


def test_platforms_have_a_fence_each(monkeypatch) -> None:
    """Devices of two platforms, where a source has arrays of its own beside the batches, get one computation each."""
    compiled = []

    def compile_fence(devices):
        compiled.append([device.platform for device in devices])
        return lambda: jax.numpy.asarray(np.zeros(1, np.int32))

    monkeypatch.setattr(completion, "_compiled_fence", compile_fence)
    devices = [types.SimpleNamespace(platform=platform) for platform in ("gpu", "cpu", "gpu")]
    fences = Fences()
    fences.dispatch(0, devices)
    assert compiled == [["gpu", "gpu"], ["cpu"]]
    fences.wait(0)
    assert fences.is_done(0)
