"""The source: any iterable, and what a `for` loop over it would give.

Synopsis:

    source = Source(loader)
    iterator = source.open()         # a pass
    close_iterator(iterator)         # gives back what the pass holds
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol

from jaxprefetch.errors import typed
from jaxprefetch.host import forks
from jaxprefetch.host.loaders import worker_shutdown

logger = logging.getLogger("jaxprefetch")

AFTER_END = -1
"""Stands for the number of batches pulled where the end of the pass is told."""


class WritesBatches(Protocol):
    """What an iterator, or a source that cannot be iterated, may have: it writes its batches into memory it is given.

    `__next__`, which iterators have besides, is not called then. StopIteration, from either, is the end, too. It is
    gone through once: several passes need a source whose `__iter__` makes a new one for each.

    Blocking: both may take their time: they are called by the thread that reads, with `host_size=0` by the loop's. What
        they raise arrives at the batch that it was raised for.
    """

    @property
    def element_spec(self) -> Any:
        """The pytree of the next batch if it is a whole one: anything with a shape and a dtype for each leaf.

        Of this process's rows, on the host. It is read before each batch, and may change from batch to batch.
        """

    def read_into(self, out: Any, /) -> int:
        """Writes the next batch.

        After an interrupt (with `host_size=0` a Ctrl-C strikes in here) it is called again for the same batch.

        Args:
            out: the same tree of writable, C-contiguous NumPy arrays, with whatever was there before. Not to be used
                any more after the return.

        Returns:
            How far along axis 0 it has written, up to the length of the first leaf (the first that is split by rows, if
            there are some): less for a short batch, 0 at the end. Leaves of another length are sent whole.
        """
        ...


class MakesReaders(Protocol):
    """A source of several passes, each of which is read from an object of its own; that needs no `__next__`."""

    def __iter__(self) -> WritesBatches: ...


class Source:
    """A source of batches and whether it can be gone through again.

    Raises:
        TypeError: it cannot be iterated, or iterating it does not give batches; it has `read_into` without describing
            its batches.
    """

    def __init__(self, source: Any):
        if isinstance(source, (Mapping, str, bytes)):
            raise TypeError(
                f"source: iterating a {type(source).__name__} does not give batches. "
                "Pass an iterable of batches; a single one goes into a list."
            )
        ways = ("__iter__", "__next__", "__getitem__", "read_into")
        if isinstance(source, type) or not any(hasattr(source, name) for name in ways):
            cure = " Call it, and pass what it returns." if callable(source) else ""
            raise TypeError(f"source: expected an iterable of batches, got {typed(source)}.{cure}")
        is_iterator = hasattr(source, "__next__") or (writes_batches(source) and not hasattr(source, "__iter__"))
        if is_iterator:
            check_describes(source)
        forks.watch()
        self._source = source
        self._said = False  # that its read_into is not called
        self.reiterable = not is_iterator

    def open(self) -> Any:
        """The iterator of one pass, or what writes its batches.

        Raises:
            TypeError: it is no iterator; it has `read_into` without describing its batches.
        """
        if hasattr(self._source, "__iter__"):
            return self._made(self._source.__iter__())  # iter() would want a __next__ of what only writes
        return iter(self._source) if self.reiterable else self._source

    def hand_over(self, iterator: Any) -> None:
        """This iterator, which `open` has given, is the caller's from now on, who closes it. By whoever pulls."""

    def has_places(self, iterator: Any) -> bool:
        """Whether it has a state of its own behind each batch of this iterator."""
        return False

    def close(self) -> None:
        """Closes what was opened and not handed over. By whoever pulls, if somebody does."""

    def place(self, iterator: Any) -> Any:
        """Its own state behind what was pulled from this iterator."""

    def place_after(self) -> Any:
        """Its own state from which the next pass begins; None as above."""

    def _made(self, iterator: Any) -> Any:
        """What the source's `__iter__` has made, if a pass can be read from it."""
        check_describes(iterator)
        kind = type(self._source).__name__
        if self.reiterable and iterator is self._source:
            raise TypeError(
                f"source: __iter__ of a {kind} returns the object itself, which would be spent after a pass. Let it "
                "make a new one for each pass, or leave __iter__ out."
            )
        if not (hasattr(iterator, "__next__") or writes_batches(iterator)):
            raise TypeError(
                f"source: __iter__ of a {kind} returned a {type(iterator).__name__}, expected an iterator of batches. "
                "Return iter(...) of it, or yield them."
            )
        if writes_batches(self._source) and not (writes_batches(iterator) or self._said):
            self._said = True
            logger.warning(
                "jaxprefetch: a %s has read_into, but its __iter__ returns a %s that has none, so it is iterated. Let "
                "__iter__ make an object with read_into and element_spec, or leave it out.",
                kind,
                type(iterator).__name__,
            )
        return iterator


def writes_batches(iterator: Any) -> bool:
    """Whether it writes its batches into memory that it is given."""
    return callable(getattr(iterator, "read_into", None))


def check_describes(iterator: Any) -> None:
    """What writes its batches has an `element_spec` that is no method; it is not read here, for that may take long.

    Raises:
        TypeError: it has none, or a method.
    """
    if not writes_batches(iterator):
        return
    what = f"source: a {type(iterator).__name__} has read_into,"
    cure = "Give it a property of shapes and dtypes, such as {'x': jax.ShapeDtypeStruct((256, 32), np.float32)}."
    spec = inspect.getattr_static(iterator, "element_spec", _MISSING)
    if spec is _MISSING and not hasattr(type(iterator), "__getattr__"):
        raise TypeError(f"{what} but no element_spec to say what its batches are. {cure}")
    if isinstance(spec, _METHODS):
        raise TypeError(f"{what} and its element_spec is a method where a value is expected. {cure}")


_MISSING = object()
_METHODS = FunctionType, MethodType, BuiltinFunctionType, staticmethod, classmethod


def close_iterator(iterator: Any) -> None:
    """Calls `close()` where the iterator has one, or what stands for it."""
    close = getattr(iterator, "close", None) or worker_shutdown(iterator)
    if callable(close):
        close()


def close_for_good(iterator: Any) -> None:
    """The same, where nobody is there to hear what that raises: it is logged."""
    try:
        close_iterator(iterator)
    except Exception:
        logger.exception("jaxprefetch: closing the source's iterator %r failed", type(iterator).__name__)


def closable_from_outside(iterator: Any) -> bool:
    """Whether `close()` may be called while another thread is inside `next()`: generators refuse that."""
    return not inspect.isgenerator(origin(iterator)) and callable(getattr(iterator, "close", None))


def is_dead(iterator: Any) -> bool:
    """Whether it is a generator, or pulls from one, that an error has ended: asked again it would tell of an end."""
    worker = origin(iterator)
    return inspect.isgenerator(worker) and inspect.getgeneratorstate(worker) == inspect.GEN_CLOSED


def origin(iterator: Any) -> Any:
    """What does the work in the end where an iterator only passes it on."""
    return getattr(iterator, "pulls_from", iterator)
