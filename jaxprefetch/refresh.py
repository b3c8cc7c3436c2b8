"""New examples for a cache, read in the background and ready on the devices when they are due.

Synopsis:

    refresh = refresh_of(store, source, 4, deterministic=True, fresh_buffers=False)
    refresh.start()
    rows = refresh.due(takes)            # what is to replace the oldest examples before this take, or None
    refresh.applied()
    refresh.prepare()                    # puts the next ones, before the step is dispatched

A put has to come before the step behind which it is to hide, and what is written must have landed: a call that reads an
array on its way would hold up all that is queued behind it. So the rows that are applied at one take were put at least
one take earlier, on the same thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Protocol

import jax

from jaxprefetch.arguments import check_switch
from jaxprefetch.device.window import Window
from jaxprefetch.errors import WithoutOptions
from jaxprefetch.host.memory import default_host_bytes
from jaxprefetch.host.resume import ResumableSource
from jaxprefetch.layout import StagingOptions
from jaxprefetch.prefetcher import DevicePrefetcher
from jaxprefetch.reading import Reading
from jaxprefetch.shapes import Shapes
from jaxprefetch.staging import stager
from jaxprefetch.store import Store

_NONE = object()


class Prefetcher(Protocol):
    """An iterator of batches on their devices, which a thread stages ahead."""

    def __next__(self) -> Any: ...
    def next_is_staged(self) -> bool: ...
    def start_prefetch(self) -> None: ...
    def close(self) -> None: ...


class Refresh:
    """Says what is to be replaced before which take.

    Args:
        batches: rows of examples, on their devices.
        every_takes: how many takes there are from one to the next.
        deterministic: waits for rows that are due; else they come when they are there.

    Attributes:
        number: of the batch that is due next, counted from 0 as the source's own errors do.
    """

    def __init__(self, batches: Prefetcher, every_takes: int, deterministic: bool):
        self._batches = batches
        self._every = every_takes
        self._deterministic = deterministic
        self.number = 0
        self._put: Any = _NONE  # rows on their way or landed, not applied
        self._is_due = False
        self._end: BaseException | None = None  # StopIteration, or what the source raised

    def start(self) -> None:
        """Starts the reading. Does not wait for it."""
        self._batches.start_prefetch()

    @WithoutOptions()
    def due(self, takes: int) -> Any:
        """What is to be written before this take; None where that is nothing. Asked again it says the same.

        Blocking: with `deterministic`, for the source, and until the rows have landed.

        Raises:
            Exception: what the source raised, when its rows are due.
        """
        self._is_due = self._is_due or (takes > 0 and takes % self._every == 0)
        if not self._is_due:
            return None
        if self._put is _NONE:
            self._advance(wait=self._deterministic)
        if self._end is not None and self._put is _NONE:
            if isinstance(self._end, StopIteration):
                return None
            raise self._end
        if self._put is _NONE or not (self._deterministic or _have_landed(self._put)):
            return None
        return jax.block_until_ready(self._put)

    def applied(self) -> None:
        """They have been written."""
        self._put, self._is_due, self.number = _NONE, False, self.number + 1

    def prepare(self) -> None:
        """Puts the next rows if they are staged."""
        if self._put is _NONE:
            self._advance(wait=False)

    def close(self) -> None:
        """Ends the reading; what was read ahead is lost."""
        self._put = _NONE
        self._batches.close()

    def _advance(self, *, wait: bool) -> None:
        if self._end is None and (wait or self._batches.next_is_staged()):
            try:
                self._put = next(self._batches)
            except StopIteration as end:
                self._end = end
            except Exception as error:
                self._end = error


def refresh_of(
    store: Store, source: Iterable[Any], every_takes: int, deterministic: bool, *, fresh_buffers: bool
) -> Refresh:
    """A refresh of this store's examples by rows that `source` yields; nothing is read before `start()`.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """
    check_switch("fresh_buffers", fresh_buffers, or_none=True)
    placement, host_bytes = store.spec.placement, default_host_bytes()
    options, any_shape = StagingOptions(fresh_buffers=fresh_buffers), Shapes(None)  # the calls that write are our own
    batches: DevicePrefetcher[Any] = DevicePrefetcher(
        ResumableSource(source, None),
        stager(placement, options, host_bytes, any_shape),
        functools.partial(Window, 1),  # what is due is put a take ahead by the refresh itself
        placement,
        Reading(host_size=2, max_host_bytes=host_bytes),
    )
    return Refresh(batches, every_takes, deterministic)


def _have_landed(rows: Any) -> bool:
    """Whether a read of these would not wait; arrays that the source made itself may be dead, which shows at the read.

    They are asked only while they live: `is_ready()` after `delete()` ends the process (seen in jaxlib < 0.11.2).
    """
    return all(leaf.is_deleted() or leaf.is_ready() for leaf in jax.tree.leaves(rows))
