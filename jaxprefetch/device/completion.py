"""What has happened on the devices: which arrays have landed, which steps are over.

Synopsis:

    fence = completion.dispatch_fence(devices)        # after the step
    jax.block_until_ready(fence)                      # the step is over

A fence is a tiny compiled op on this process's devices. It reads a small resident array, never a batch: an input still
in transfer would make the compute stream wait for the copy. Its result belongs to us alone, so it may be polled;
arrays that the consumer can delete may not (`Array.is_ready()` after `delete()` ends the process before jaxlib 0.11.2).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxprefetch.device.context import Device, compiled_as_ever, in_clean_thread
from jaxprefetch.device.pinning import GPU_PLATFORMS

MARKER_BYTES = 64

_is_deleted = operator.methodcaller("is_deleted")


def memory_in_compute_order(devices: Sequence[Device]) -> bool:
    """Whether memory freed and allocated again is ordered by the compute stream, so that landing releases a batch.

    References: `kComputeSynchronized` in XLA's `pjrt/se/local_device_state.h`: GPU clients only.
    """
    return bool(devices) and all(device.platform in GPU_PLATFORMS for device in devices)


def released_by(devices: Sequence[Device]) -> Literal["landing", "fence"]:
    """Which fact releases a batch on these devices."""
    return "landing" if memory_in_compute_order(devices) else "fence"


def dispatch_fence(devices: Sequence[Device]) -> list[jax.Array]:
    """Dispatches a fence behind all that was enqueued on `devices` so far: an array for each platform among them."""
    runs = [_compiled_fence(group) for group in _by_platform(devices)]
    with compiled_as_ever():
        return [run() for run in runs]


def prepare_fence(devices: Sequence[Device]) -> None:
    """Compiles the fence ahead, so that the first one costs no more than the rest."""
    for group in _by_platform(devices):
        _compiled_fence(group)


def put_marker(devices: Sequence[Device]) -> list[jax.Array]:
    """Puts a few bytes on every device: once they have landed, so have the copies queued before."""
    groups = [_sharding(group, PartitionSpec()) for group in _by_platform(devices)]
    return [jax.device_put(np.zeros(MARKER_BYTES, np.uint8), sharding) for sharding in groups]


def _by_platform(devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    """One computation runs on devices of one platform; a source can have arrays of its own on others."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.platform, []).append(device)
    return [tuple(group) for group in groups.values()]


def have_landed(arrays: Sequence[Any]) -> bool:
    """Whether all arrays are on their devices. Only for arrays that no one else can delete."""
    return all(array.is_ready() for array in arrays)


def wait_landed(arrays: Sequence[jax.Array]) -> bool:
    """Waits until all arrays have landed; False when the consumer has deleted or donated one of them.

    Raises:
        jax.errors.JaxRuntimeError: the transfer, or the computation that makes an array, has failed.

    Blocking: until the copies are done; the GIL is free meanwhile.
    """
    try:
        for array in arrays:
            array.block_until_ready()
    except RuntimeError:
        if not any(map(_is_deleted, arrays)):
            raise
        return False
    return not any(map(_is_deleted, arrays))


@functools.cache
def _compiled_fence(devices: tuple[Device, ...]) -> Callable[[], jax.Array]:
    def compiled() -> Callable[[], jax.Array]:
        resident = jax.device_put(np.zeros(len(devices), np.int32), _sharding(devices, PartitionSpec("fence")))
        return functools.partial(jax.jit(lambda x: x + np.int32(1)).lower(resident).compile(), resident)

    return in_clean_thread(compiled)


def _sharding(devices: tuple[Device, ...], spec: PartitionSpec) -> jax.sharding.Sharding:
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(Mesh(np.array(devices), ("fence",)), spec)
