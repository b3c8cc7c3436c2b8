"""Whether so many examples fit, before any memory is taken.

Synopsis:

    check_room(layout, max_bytes=2 << 30)
"""

from __future__ import annotations

from jaxprefetch.device.context import Device
from jaxprefetch.device.examples import ResidentLayout
from jaxprefetch.host.memory import available_bytes


def check_room(layout: ResidentLayout, max_bytes: int | None) -> None:
    """Whether every device has room for its slots.

    Raises:
        ValueError: one has not, or they take more than `max_bytes`; says how many would fit.
    """
    need = max(layout.cost.values())
    _check(layout, need, max_bytes, "max_bytes is", "Raise max_bytes")
    for device, nbytes in layout.cost.items():
        free = _free(device, len(layout.cost))
        _check(layout, nbytes, free, f"{device} has free", "Free device memory")


def _check(layout: ResidentLayout, need: int, most: int | None, what: str, cure: str) -> None:
    if most is not None and need > most:
        fit = most * layout.each // need * layout.shards
        raise ValueError(
            f"capacity: {layout.slots:,} examples take {need:,} bytes on a device, {what} {most:,}, in which {fit:,} "
            f"examples would fit. {cure}, or take a smaller capacity."
        )


def _free(device: Device, devices: int) -> int | None:
    """Bytes that are free on a device; CPU devices share the host's memory."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats and "bytes_in_use" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    free = available_bytes() if device.platform == "cpu" else None
    return None if free is None else free // devices
