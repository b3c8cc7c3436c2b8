"""How fast the link from host to device is, measured once a device.

Synopsis:

    link_speed(device, room=1 << 30)     # bytes per second; None on a CPU
"""

from __future__ import annotations

import mmap
import time

import jax
import numpy as np

from jaxprefetch.device.completion import memory_in_compute_order
from jaxprefetch.device.context import Device
from jaxprefetch.device.pinning import Pinning

PROBE_BYTES = 16 << 20
"""From this size a copy from pinned memory reaches the speed of the link (49 of 49 GiB/s on an H200)."""

_measured: dict[Device, float | None] = {}  # None: there is none to be had; measuring twice at once does no harm


def link_speed(device: Device, room: int) -> float | None:
    """Bytes per second from pinned host memory to `device`; None where there is no link to speak of.

    Args:
        device: any device of this process.
        room: bytes of device memory that the probe may take for a moment; too few give no figure.

    Blocking: some milliseconds at the first call for a device.
    """
    if not memory_in_compute_order([device]) or room < PROBE_BYTES:
        return None
    if device not in _measured:
        try:
            _measured[device] = _measure(device)
        except (OSError, MemoryError, jax.errors.JaxRuntimeError):  # no memory now: a figure is not worth an error
            return None
    return _measured[device]


def _measure(device: Device) -> float | None:
    memory = mmap.mmap(-1, PROBE_BYTES)
    data = np.frombuffer(memory, np.uint8)
    data[:: mmap.PAGESIZE] = 1  # touched, so that the pages are there
    pinning = Pinning.of([device])
    if pinning is None:
        return None
    try:
        unregister = pinning.register(data.__array_interface__["data"][0], PROBE_BYTES)
    except RuntimeError:  # no such call, or no right to pin memory: a pageable copy says nothing about the link
        return None
    try:
        return PROBE_BYTES / min(_time_put(data, device) for _ in range(5))
    finally:
        unregister()


def _time_put(data: np.ndarray, device: Device) -> float:
    start = time.perf_counter()
    jax.device_put(data, device).block_until_ready()
    return time.perf_counter() - start
