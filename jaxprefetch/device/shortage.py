"""What is said when a batch does not fit on its devices.

Synopsis:

    raise no_room(window, 3, on_device=False)
"""

from __future__ import annotations

from jaxprefetch.device.window import Window
from jaxprefetch.errors import OPTION


def is_out_of_memory(error: Exception) -> bool:
    """Whether a put failed because the device has no memory left."""
    return "RESOURCE_EXHAUSTED" in str(error)


def no_room(window: Window, batch: int, *, on_device: bool) -> ValueError:
    """The error for a batch that can never fit within `max_bytes`."""
    need, held = _figures(window, on_device)
    return ValueError(
        f"Batch {batch} needs {need}, {held:,} are held by the batch that the loop uses, and "
        f"max_bytes is {window.max_bytes:,}. Two batches must fit, with "
        f"{OPTION}delete_used=True) one: raise max_bytes, or take smaller batches."
    )


def refusal(window: Window, batch: int, error: Exception, *, on_device: bool) -> str:
    """The note for the error with which a put has failed."""
    if not is_out_of_memory(error):
        return f"jaxprefetch: raised when batch {batch} was put on its devices"
    need, held = _figures(window, on_device)
    return (
        f"jaxprefetch: batch {batch} needs {need} beside the {held:,} of batches in "
        f"flight. {OPTION}delete_used=True) needs one less; else take smaller batches or, where there is one, a "
        "smaller size."
    )


def _figures(window: Window, on_device: bool) -> tuple[str, int]:
    """What the next batch needs, in words, and the bytes that are held."""
    need, held, out = window.shortage()
    made = f" ({out:,} of them are for what on_device makes)" if on_device and out else ""
    return f"{need:,} bytes on a device{made}", held
