"""`prefetch_to_device`: any iterator becomes batches that are already on their devices.

Synopsis:

    with prefetch_to_device(loader, size=2, sharding=sharding, max_bytes="2GiB") as batches:
        for batch in batches:
            state, metrics = train_step(state, batch)
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from jaxprefetch.arguments import integer, parse_bytes
from jaxprefetch.device.completion import memory_in_compute_order
from jaxprefetch.device.feed import Feed
from jaxprefetch.device.placement import Placement
from jaxprefetch.device.window import Window
from jaxprefetch.host.batching import MODES, Mode
from jaxprefetch.host.pipeline import Inline, Pipeline, SourceTimes
from jaxprefetch.host.reader import Reader
from jaxprefetch.host.source import Source
from jaxprefetch.layout import KeepOnHost, StagingOptions
from jaxprefetch.staging import Stager
from jaxprefetch.statistics import PrefetchStatistics, snapshot

logger = logging.getLogger("jaxprefetch")
T = TypeVar("T")


def prefetch_to_device(
    source: Iterable[T],
    size: int = 2,
    *,
    sharding: Any = None,
    max_bytes: int | str | None = None,
    host_size: int = 4,
    max_host_bytes: int | str | None = None,
    keep_on_host: KeepOnHost = None,
    last_batch: Mode = "error",
    mask_key: str = "mask",
    batch_axis: int = 0,
    delete_used: bool = False,
    fresh_buffers: bool | None = None,
) -> DevicePrefetcher[T]:
    """Batches of `source`, already on their devices, with the copy hidden behind the step before.

    A thread pulls batches and copies them to host memory of our own, so nothing delivered changes later. `next()` puts
    the batch after the one it returns, before it returns it: a device does not start a copy into new memory before the
    steps that are queued have ended, so a copy that is put after the step is dispatched would not overlap with it.

    Args:
        source: any iterable of batches (pytrees). Each pass yields what a `for` loop over it yields. The thread alone
            touches it from the first `next()` on, and closes its iterator.
        size: batches ahead of the loop, counting the one that is returned. 2 hides the copy; 3 helps when sizes or
            step times vary and the copy takes more than 0.7 of a step; with 1 the host still works ahead, but on a GPU
            the copy cannot overlap with a step.
        sharding: `None` (the default device in force now; arrays stay uncommitted, as `jax.device_put(x)` leaves them),
            a `jax.Device`, any `jax.sharding.Sharding`, a `PartitionSpec` under the mesh in force now, or a pytree
            prefix of these. For leaves of lower rank, axes that they do not have are left out of the spec. In a
            multi-process run each process yields its own rows, `(local_batch, ...)`, of a global array.
        max_bytes: the most bytes of batches on any one device (`2 << 30` or `"2GiB"`). Counted from the put until
            released. At least two batches must fit, one with `delete_used`.
        host_size: batches pulled and not yet put. 0 pulls on the calling thread, without a thread: the first `next()`
            pulls `size` batches, each later one pulls one, and blocks as long as that takes.
        max_host_bytes: the most bytes of host memory for batches that have not landed; one always gets through.
        keep_on_host: leaves that are delivered as they are: paths (`"meta/name"`, also of whole subtrees) or a function
            `(path, leaf) -> bool`. Strings and other objects need it.
        last_batch: `"error"` refuses a batch whose rows do not divide over the devices and delivers all others.
            `"drop"` leaves out a last batch with fewer rows than batch 0. `"pad"` gives every batch the rows of batch
            0, rounded up to the devices and filled with zeros, and a boolean mask of the real ones: at `mask_key` of a
            dict batch, else the batch becomes `(batch, mask)`.
        mask_key: where `"pad"` puts the mask in dict batches.
        batch_axis: the axis of rows.
        delete_used: batch k is deleted when batch k+1 is asked for: one batch of device memory less. Loops that look
            back must not use it. Arrays that the source made itself are never deleted.
        fresh_buffers: True promises that the source never writes to a leaf again, nor yields its memory twice: leaves
            are then sent, and kept ones handed on, without a copy. None promises nothing.

    Returns:
        An iterator and context manager. Leaves are `jax.Array`; 64-bit types follow JAX's x64 setting as it is now;
        Python numbers stay weakly typed; arrays that the source made itself are passed, or moved where they must be.
        Iterating again after the end begins a new pass, if the source is no iterator; after a `break` it goes on where
        the loop stopped.

    Raises:
        TypeError, ValueError: an argument is not what it should be. Errors of the source, and of a batch that cannot be
            placed, come from `next()` in the place of that batch.

    Thread safety: one thread at a time may call `next()`; `close()` and `statistics()` are for any thread.

    References: `kComputeSynchronized` in XLA's `pjrt/se/local_device_state.h`.
    """
    size, host_size = integer("size", size, 1), integer("host_size", host_size, 0)
    batch_axis = integer("batch_axis", batch_axis, 0)
    if last_batch not in MODES:
        raise ValueError(f"last_batch: expected one of {', '.join(map(repr, MODES))}, got {last_batch!r}.")
    options = StagingOptions(keep_on_host, last_batch, mask_key, batch_axis, fresh_buffers)
    placement = Placement(sharding)
    return DevicePrefetcher(
        Source(source),
        Stager(placement, options),
        functools.partial(Window, size, delete_used=bool(delete_used), max_bytes=parse_bytes("max_bytes", max_bytes)),
        placement,
        host_size=host_size,
        max_host_bytes=parse_bytes("max_host_bytes", max_host_bytes),
    )


class DevicePrefetcher(Generic[T]):
    """What `prefetch_to_device` returns: an iterator of batches on their devices, and a context manager.

    `iter()` in the middle of a pass continues it; after the end it begins a new pass if the source can be iterated
    again. After an error, and after the end until `iter()`, `next()` raises the same again.
    """

    def __init__(
        self,
        source: Source,
        stager: Stager,
        window: Callable[..., Window],
        placement: Placement,
        *,
        host_size: int,
        max_host_bytes: int | None,
    ):
        self._source = source
        self._stager = stager
        self._host_size = host_size
        self._max_host_bytes = max_host_bytes
        self._context = placement.context.entered
        released_by = "landing" if memory_in_compute_order(placement.devices) else "fence"
        self._feed = Feed(window(released_by=released_by, inline=host_size == 0))
        self._readers: list[Reader | Inline] = []  # the current one, if any; shared with the finaliser
        self._past, self._times = SourceTimes(), SourceTimes()  # of passes that are over, of the last one
        self._over = False  # the current pass has ended
        self._said_spent = False
        self._turn = threading.Lock()  # held by the thread inside next(); never waited for
        weakref.finalize(self, _cancel, self._readers).atexit = False

    def __iter__(self) -> Iterator[T]:
        if self._feed.closed:
            raise ValueError("This prefetcher is closed. Make a new one to iterate again.")
        if self._over:
            if self._feed.error is not None:
                self._feed.raise_end()
            if self._source.reiterable:
                self._end_pass()
                self._over = False
            elif not self._said_spent:
                self._said_spent = True
                logger.warning(
                    "jaxprefetch: the source was an iterator and is spent, so this pass is empty. "
                    "Pass an iterable (a list, a loader) to go through it again."
                )
        return self

    def __next__(self) -> T:
        if not self._take_turn():
            raise StopIteration
        try:
            if self._feed.closed:
                raise StopIteration
            if self._over:
                self._feed.raise_end()
            self._begin_pass()
            return self._next()
        finally:
            self._give_turn()

    def __enter__(self) -> DevicePrefetcher[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start_prefetch(self) -> None:
        """Starts the thread that pulls and stages, as the first `next()` would. Never blocks."""
        if self._turn.acquire(blocking=False):  # else a next() runs, which has done so
            try:
                self._begin_pass()
            finally:
                self._give_turn()

    @property
    def element_spec(self) -> Any:
        """The tree of `jax.ShapeDtypeStruct` (global shapes, shardings) of the first batch.

        Leaves kept on the host that are no arrays of numbers show their type. Blocking: for the first batch.

        Raises:
            ValueError: there is no first batch: the source is empty, or the prefetcher was closed before.
            Exception: what the source, or staging, raised instead of it.
        """
        if self._stager.element_spec is None and self._take_turn():
            try:
                self._begin_pass()
                self._feed.peek()
            finally:
                self._give_turn()
        if self._stager.element_spec is not None:
            return self._stager.element_spec
        if self._feed.error is not None:
            self._feed.raise_end()
        why = "the prefetcher is closed" if self._feed.closed else "the source is empty"
        raise ValueError(f"element_spec: {why}, so there is no first batch to tell it from.")

    def close(self) -> None:
        """Ends the pass for good and frees what was not handed out; the batch in the loop's hands stays alive.

        Blocking: about a second at most, for a reader that is inside the source; it is then left behind, which is
        logged, and closes the source when it wakes.

        Thread safety: any thread, any number of times. A `next()` that waits elsewhere ends with `StopIteration`.
        """
        self._feed.closed = True
        self._end_pass()
        if self._turn.acquire(blocking=False):
            self._give_turn()

    def statistics(self) -> PrefetchStatistics:
        """Counts, bytes and waits so far, and what the loop is bound by. Never blocks."""
        return snapshot(self._feed, self._past.plus(self._times), inline=not self._host_size)

    # ---- one pass

    def _take_turn(self) -> bool:
        """True when this thread alone may go on; False when the prefetcher is closed just now."""
        if self._turn.acquire(blocking=False):
            return True
        if self._feed.closed:
            return False
        raise RuntimeError(
            "next() was called while another call of it runs: one thread at a time may take batches. "
            "Take them in one thread and hand them on."
        )

    def _give_turn(self) -> None:
        """Whoever has the turn last frees what a closed prefetcher still holds."""
        self._turn.release()
        if self._feed.closed and self._turn.acquire(blocking=False):  # closed by now, perhaps just before the release
            try:
                self._end_pass()
                self._feed.clear()
            finally:
                self._turn.release()

    def _begin_pass(self) -> None:
        """Starts the reader where there is none; needs the turn."""
        for reader in self._readers:
            reader.start()  # nothing, unless a thread could not be had before
        if self._readers or self._over or self._feed.closed:
            return
        self._stager.begin_pass()
        pipeline = Pipeline(self._source, self._stager.stage, self._context)
        if self._host_size:
            reader = Reader(pipeline, host_size=self._host_size, max_host_bytes=self._max_host_bytes)
        else:
            reader = Inline(pipeline)
        self._past, self._times = self._past.plus(self._times), pipeline.times
        self._feed.begin_pass(reader)
        self._readers.append(reader)
        if self._feed.closed:  # by another thread meanwhile
            self._end_pass()
        reader.start()

    def _end_pass(self) -> None:
        with contextlib.suppress(IndexError):  # there is none, or another thread ends it
            self._readers.pop().close()

    def _next(self) -> T:
        try:
            return self._feed.next()
        except StopIteration:
            self._over = True
            raise
        except BaseException as error:
            self._over = error is self._feed.error
            raise


def _cancel(readers: list[Reader | Inline]) -> None:
    """The prefetcher was dropped: its thread stops by itself and closes the source."""
    for reader in readers:
        reader.cancel()
