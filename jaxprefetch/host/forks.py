"""Says it once when a source forks processes: JAX's threads do not go along, and what they hold stays held for ever.

Synopsis:

    watch()      # from now on

What runs at a fork looks up the stack whether a source of ours is being asked for something: pulling costs nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import sys

logger = logging.getLogger("jaxprefetch")

_ASKING = "jaxprefetch.host.pipeline", "jaxprefetch.host.resume"
"""The modules that run code of the source."""

_said: list[bool] = []  # filled at the first fork of a source


@functools.cache
def watch() -> None:
    """Registers, once, what runs before each fork of this process."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork)


def _before_fork() -> None:
    frame = None if _said else sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") not in _ASKING:
        frame = frame.f_back
    if frame is None:
        return
    _said.append(True)
    logger.warning(
        "jaxprefetch: the source forks processes while JAX's threads run in this one, and the new processes may hang. "
        'Start them in another way, for PyTorch DataLoader(..., multiprocessing_context="forkserver"), or before JAX '
        "is used: persistent_workers=True and iter(loader) as the first thing."
    )
