"""The speed of the link: from registered memory, measured once a device, asked for again where memory was short."""

from __future__ import annotations

import types

import jax
import pytest

from jaxprefetch.device import link
from jaxprefetch.device.link import PROBE_BYTES, link_speed


class Client:
    """A client that says what is registered, and may refuse to."""

    def __init__(self, error: Exception | None = None):
        self.registered: dict[int, int] = {}
        self.calls = 0
        self._error = error

    def dma_map(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if self._error:
            raise self._error
        self.registered[address] = nbytes

    def dma_unmap(self, address: int) -> None:
        del self.registered[address]


class Gpu:
    platform = "gpu"

    def __init__(self, client: object):
        self.client = client


@pytest.fixture(autouse=True)
def _time_put(monkeypatch):
    """Puts take a millisecond, and are only made from registered memory."""

    def time_put(data, device):
        assert device.client.registered == {data.ctypes.data: data.nbytes}
        return 1e-3

    monkeypatch.setattr(link, "_time_put", time_put)


def test_the_speed_is_measured_once() -> None:
    """The figure comes from registered memory, which is then unregistered, and is not measured again."""
    gpu = Gpu(Client())
    for _ in range(2):
        assert link_speed(gpu, PROBE_BYTES) == PROBE_BYTES / 1e-3
    assert gpu.client.calls == 1
    assert not gpu.client.registered


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), MemoryError("now")], ids=["device", "host"]
)
def test_a_shortage_of_memory_is_not_for_good(error, monkeypatch) -> None:
    """Without memory for the probe there is no figure, and the next call measures."""

    def fails(data, device):
        raise error

    gpu = Gpu(Client())
    with monkeypatch.context() as short:
        short.setattr(link, "_time_put", fails)
        assert link_speed(gpu, PROBE_BYTES) is None
    assert not gpu.client.registered
    assert link_speed(gpu, PROBE_BYTES) == PROBE_BYTES / 1e-3


@pytest.mark.parametrize(
    "client", [Client(ValueError("no right")), types.SimpleNamespace()], ids=["refuses", "knows none"]
)
def test_memory_that_cannot_be_registered_gives_no_figure(client) -> None:
    """A client that registers nothing is asked once."""
    gpu = Gpu(client)
    for _ in range(2):
        assert link_speed(gpu, PROBE_BYTES) is None
    assert getattr(client, "calls", 1) == 1


def test_little_room_or_no_link_gives_no_figure() -> None:
    """With less room than the probe takes, and on a CPU, nothing is measured."""
    gpu = Gpu(Client())
    assert link_speed(gpu, PROBE_BYTES - 1) is None
    assert link_speed(jax.devices()[0], PROBE_BYTES) is None
    assert not gpu.client.calls


def test_registration_is_the_pinnings_alone(monkeypatch) -> None:
    """Memory of the probe is registered by `Pinning`, as all is."""
    registered = []

    class Recorded(link.Pinning):
        def register(self, address, nbytes):
            registered.append(nbytes)
            return super().register(address, nbytes)

    monkeypatch.setattr(link, "Pinning", Recorded)
    assert link_speed(Gpu(Client()), PROBE_BYTES) == PROBE_BYTES / 1e-3
    assert registered == [PROBE_BYTES]
