"""What is in force on a thread: JAX's `default_device` and `enable_x64` are thread-local, so they are carried along.

Synopsis:

    here = Context.current()             # on the caller's thread
    with here.entered():                 # on any thread
        jax.device_put(x)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    Device = Any  # jaxlib has no stubs
else:
    Device = jax.Device

_config: Any = jax.config
_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Context:
    """The settings that decide where an array goes and with which dtype."""

    default_device: Any  # a Device, a platform's name or None
    x64: bool

    @classmethod
    def current(cls) -> Context:
        """This thread's."""
        return cls(_config.jax_default_device, _config.jax_enable_x64)

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """The same settings, on whatever thread this is entered."""
        if _config.jax_enable_x64 == self.x64 and _config.jax_default_device is self.default_device:
            return _NOTHING
        stack = contextlib.ExitStack()
        stack.enter_context(jax.default_device(self.default_device))
        stack.enter_context(jax.enable_x64(self.x64))
        return stack


class SourceContext:
    """The settings that a source runs in: at first those of the call, then what the source has left behind.

    A generator may hold `enable_x64` or `default_device` across its yields; whoever called it must not see that.
    """

    def __init__(self, first: Context):
        self._now = first

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The source's settings inside, the caller's own again afterwards."""
        with jax.default_device(self._now.default_device), jax.enable_x64(self._now.x64):
            try:
                yield
            finally:
                self._now = Context.current()


def default_device() -> Device:
    """The device on which `jax.device_put(x)` would put now, on this thread."""
    device = _config.jax_default_device
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` is in force here."""
    return bool(_config.jax_disable_jit)
