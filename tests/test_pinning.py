"""Registration with the driver, on clients that refuse it, and which arrays go without a copy."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from jaxprefetch.device import pinning
from jaxprefetch.device.pinning import Pinning


class Client:
    """A client that registers memory, or refuses to."""

    def __init__(self, error: Exception | None = None):
        self.mapped: dict[int, int] = {}
        self._error = error

    def dma_map(self, address: int, nbytes: int) -> None:
        if self._error:
            raise self._error
        self.mapped[address] = nbytes

    def dma_unmap(self, address: int) -> None:
        del self.mapped[address]


def device(platform: str, client: Client | None = None):
    return types.SimpleNamespace(platform=platform, client=client or Client())


def test_memory_is_registered_until_it_is_undone() -> None:
    """`register` returns what unregisters the same memory."""
    client = Client()
    undo = Pinning(client).register(4096, 100)
    assert client.mapped == {4096: 100}
    undo()
    assert not client.mapped


@pytest.mark.parametrize("error", [RuntimeError("UNIMPLEMENTED"), ValueError("no"), MemoryError("locked")])
def test_a_client_that_refuses_is_a_runtime_error(error) -> None:
    """Whatever a client raises arrives as one kind of error, with its text."""
    with pytest.raises(RuntimeError, match=str(error)) as caught:
        Pinning(Client(error)).register(4096, 100)
    assert caught.value.__cause__ is error


def test_an_interrupted_registration_is_undone() -> None:
    """A Ctrl-C before or after the driver has registered memory leaves none registered."""

    class Interrupted(Client):
        def dma_map(self, address: int, nbytes: int) -> None:
            if nbytes:
                super().dma_map(address, nbytes)
            raise KeyboardInterrupt("now")

    client = Interrupted()
    for nbytes in (0, 100):
        with pytest.raises(KeyboardInterrupt, match="now"):
            Pinning(client).register(4096, nbytes)
        assert not client.mapped


def test_a_client_without_the_call_is_a_runtime_error() -> None:
    """An old jaxlib is told by its version."""
    with pytest.raises(RuntimeError, match="this jaxlib has no dma_map; 0\\.10\\.2 and later have it"):
        Pinning(object()).register(4096, 100)


def test_only_gpus_have_their_memory_registered() -> None:
    """There is nothing to register for CPUs, nor for a mixture."""
    assert Pinning.of(jax.devices()) is None
    assert Pinning.of([]) is None
    assert Pinning.of([device("gpu"), device("cpu")]) is None
    client = Client()
    assert Pinning.of([device("gpu", client), device("gpu", client)]) is not None


def test_devices_of_several_clients_have_nothing_registered() -> None:
    """Memory that one client has registered is not known to another, so it is left as it is."""
    assert Pinning.of([device("gpu"), device("gpu")]) is None
    assert jax.devices()[0].client is jax.devices()[-1].client


def test_devices_that_show_no_client_have_nothing_registered() -> None:
    """A JAX whose devices have no `client` sends from pageable memory."""
    assert Pinning.of([types.SimpleNamespace(platform="gpu")]) is None


@pytest.mark.parametrize(
    ("leaf", "sent"),
    [
        (np.zeros((4, 8), np.float32), True),
        (np.zeros((4, 8), np.float32)[:2], True),
        (np.zeros((4, 8), np.float32)[:, :4], False),
        (np.zeros((4, 8), np.float32).T, False),
        (np.zeros((8,), np.float32)[:, None], True),
        (np.zeros((8, 4), np.float32)[:1, :2], False),
        (np.zeros((4, 8), ">f4"), False),
    ],
)
def test_arrays_go_without_a_copy_if_jax_takes_them_as_they_are(leaf, sent, monkeypatch) -> None:
    """Pinned arrays in native order with default strides, also where an axis is 1, are sent from where they lie."""
    monkeypatch.setattr(pinning, "_SENDS_ANY_PINNED", True)
    someone = Pinning(Client())
    monkeypatch.setattr(someone, "_driver", None)
    default = leaf.strides == np.zeros(leaf.shape, leaf.dtype).strides
    assert someone.is_sent_directly(leaf) == (sent and default)


def test_pageable_arrays_are_copied(monkeypatch) -> None:
    """An array that the driver does not know is not sent from where it lies, nor any array by an old jaxlib."""

    def attribute(kind, which, address):
        kind._obj.value = 1 if address.value == pinned.ctypes.data else 0  # 1 is host memory that the driver knows
        return 0 if which == 2 else 1  # 2 asks for the kind of memory

    pinned, pageable = np.zeros(8), np.zeros(8)
    someone = Pinning(Client())
    monkeypatch.setattr(pinning, "_SENDS_ANY_PINNED", True)
    monkeypatch.setattr(someone, "_driver", types.SimpleNamespace(cuPointerGetAttribute=attribute))
    assert someone.is_sent_directly(pinned)
    assert not someone.is_sent_directly(pageable)
    monkeypatch.setattr(pinning, "_SENDS_ANY_PINNED", False)
    assert not someone.is_sent_directly(pinned)
