"""What is in force on a thread: JAX's `default_device` and `enable_x64` are thread-local, so they are carried along.

Synopsis:

    here = Context.current()             # on the caller's thread
    with here.entered():                 # on any thread
        jax.device_put(x)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import jax

if TYPE_CHECKING:
    Device = Any  # jaxlib has no stubs
else:
    Device = jax.Device

T = TypeVar("T")
_config: Any = jax.config
_NOTHING = contextlib.nullcontext()

STANDARD_DTYPES = {"bool", "float16", "float32", "float64", "complex64", "complex128"}
STANDARD_DTYPES |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
"""NumPy's own, which every JAX has."""

NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
"""What becomes of those of 64 bits without `enable_x64`."""


@dataclass(frozen=True)
class Context:
    """The settings that decide where an array goes and with which dtype, of one call."""

    default_device: Any  # a Device, a platform's name or None
    x64: bool
    packings: set[Any] = field(default_factory=set, compare=False, repr=False)  # of small leaves, for this call so far

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


def compiled_as_ever() -> contextlib.AbstractContextManager[Any]:
    """In which a compiled call is just that: `disable_jit` would refuse it, `debug_nans` reject data for its NaNs."""
    if not (_config.jax_disable_jit or _config.jax_debug_nans or _config.jax_debug_infs):
        return _NOTHING
    stack = contextlib.ExitStack()
    for context in (jax.disable_jit, jax.debug_nans, jax.debug_infs):
        stack.enter_context(context(False))
    return stack


def in_clean_thread(call: Callable[[], T]) -> T:
    """What `call` returns on a thread of its own, which contexts of this one (`set_mesh`, `disable_jit`) don't reach.

    Blocking: until it has returned.
    """
    made: list[T] = []
    errors: list[BaseException] = []
    over: SimpleQueue[None] = SimpleQueue()

    def run() -> None:
        try:
            with jax.disable_jit(False):
                made.append(call())
        except BaseException as error:  # re-raised below, on the caller's thread
            errors.append(error)
        finally:
            over.put(None)

    threading.Thread(target=run, name="jaxprefetch-compile", daemon=False).start()
    over.get()  # a `join` that a Ctrl-C strikes may leave the thread's lock taken (seen in Python 3.11)
    if errors:
        raise errors.pop()
    return made[0]
