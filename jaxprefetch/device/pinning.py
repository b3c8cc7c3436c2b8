"""Host memory that the driver knows: a GPU copies from it by itself, at the speed of the link.

Synopsis:

    pinning = Pinning.of(devices)              # None where host memory is not registered (CPU)
    unregister = pinning.register(address, nbytes)

`dma_map` is a call of the client that JAX does not document (jaxlib 0.10.2 and later), so it is looked for here and
nowhere else; without it the memory stays pageable, and JAX copies it once more, on one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jaxlib.version
import numpy as np

from jaxprefetch.device.context import Device

GPU_PLATFORMS = ("gpu", "cuda", "rocm")
MOST_ADDRESSES = 4096
"""Of pinned arrays that are remembered: more than any ring of buffers has."""

_SENDS_ANY_PINNED = jaxlib.version.__version_info__ >= (0, 11, 0)  # before, only what the client itself has registered
_HOST_MEMORY, _MEMORY_TYPE = 1, 2  # CU_MEMORYTYPE_HOST, CU_POINTER_ATTRIBUTE_MEMORY_TYPE


class Pinning:
    """Registers host memory for all devices of one client."""

    def __init__(self, client: Any):
        self._client = client
        self._driver = _find_driver()
        self._pinned: set[int] = set()  # addresses of arrays found pinned; should one have changed, JAX makes the copy

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Pinning | None:
        """For these devices; None where they read host memory as it is, or belong to several clients or to none."""
        if not devices or any(device.platform not in GPU_PLATFORMS for device in devices):
            return None
        client = getattr(devices[0], "client", None)
        if client is None or any(device.client is not client for device in devices):
            return None
        return cls(client)

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        """Registers memory; returns what undoes it, once nothing is copied from there any more.

        Raises:
            RuntimeError: the memory cannot be registered; says why.
        """
        if not hasattr(self._client, "dma_map"):
            raise RuntimeError("this jaxlib has no dma_map; 0.10.2 and later have it")
        undo = functools.partial(self._client.dma_unmap, address)
        try:
            self._client.dma_map(address, nbytes)
            return undo
        except Exception as error:  # its type differs between versions
            raise RuntimeError(str(error)) from error
        except BaseException:  # a Ctrl-C, before it was registered or after
            with contextlib.suppress(Exception):
                undo()
            raise

    def is_sent_directly(self, leaf: np.ndarray) -> bool:
        """Whether JAX sends this array without a copy between: it is pinned, and contiguous as JAX understands it."""
        return (
            _SENDS_ANY_PINNED
            and leaf.dtype.isnative
            and leaf.flags.c_contiguous
            and (1 not in leaf.shape or leaf.strides == _default_strides(leaf))
            and self._is_pinned(leaf.__array_interface__["data"][0])
        )

    def _is_pinned(self, address: int) -> bool:
        if self._driver is None or address in self._pinned:
            return True  # where it cannot be told, the source's promise counts
        kind = ctypes.c_uint(0)
        status = self._driver.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
        if status != 0 or kind.value != _HOST_MEMORY:
            return False
        if len(self._pinned) >= MOST_ADDRESSES:
            self._pinned.clear()
        self._pinned.add(address)
        return True


def _default_strides(leaf: np.ndarray) -> tuple[int, ...]:
    strides, step = [], leaf.itemsize
    for n in reversed(leaf.shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _find_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # another vendor's
        return None
