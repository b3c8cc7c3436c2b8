"""What is said when a batch does not fit on its devices.

Synopsis:

    raise no_room(window, 3)
"""

from __future__ import annotations

from jaxprefetch.device.window import Window
from jaxprefetch.errors import OPTION


def is_out_of_memory(error: Exception) -> bool:
    """Whether a put failed because the device has no memory left."""
    return "RESOURCE_EXHAUSTED" in str(error)


def no_room(window: Window, batch: int) -> ValueError:
    """The error for a batch that can never fit within `max_bytes`."""
    need, held = window.shortage()
    return ValueError(
        f"Batch {batch} needs {need:,} bytes on a device, {held:,} are held by the batch that the loop uses, and "
        f"max_bytes is {window.max_bytes:,}. Two batches must fit, with "
        f"{OPTION}delete_used=True) one: raise max_bytes, or take smaller batches."
    )


def refusal(window: Window, batch: int, error: Exception) -> str:
    """The note for the error with which a put has failed."""
    if not is_out_of_memory(error):
        return f"jaxprefetch: raised when batch {batch} was put on its devices"
    need, held = window.shortage()
    return (
        f"jaxprefetch: batch {batch} needs {need:,} bytes on a device beside the {held:,} of batches in "
        f"flight. {OPTION}delete_used=True) needs one less; else take smaller batches or, where there is one, a "
        "smaller size."
    )
