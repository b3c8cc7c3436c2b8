"""`DeviceCache`: examples that stay on the devices, read there at random, and replaced a few at a time.

Synopsis:

    with DeviceCache(50_000, {"image": images, "label": labels}, sharding=sharding) as cache:
        for batch in cache.batches(256, jax.random.key(0), replace=False, epochs=10):
            state, metrics = train_step(state, batch)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

import jax

from jaxprefetch.arguments import check_switch, integer, parse_bytes
from jaxprefetch.device.examples import ResidentLayout
from jaxprefetch.device.placement import Placement
from jaxprefetch.example_spec import ExampleSpec, as_int32, check_slots
from jaxprefetch.host.states import check_state
from jaxprefetch.refresh import Refresh, refresh_of
from jaxprefetch.room import check_room
from jaxprefetch.sampling import CacheBatches, Read
from jaxprefetch.store import Store, rows_of

T = TypeVar("T")


class DeviceCache(Generic[T]):
    """Examples in `capacity` slots on the devices.

    With `NamedSharding(mesh, PartitionSpec("data"))` device d has the slots from `d * capacity / devices` on. Reading
    and replacing are compiled calls in which each device uses its own slots: no copy from the host, no exchange between
    devices. So row r of a batch, which lies on device `r // (rows / devices)`, is an example of that device, and of the
    rows of an insert each device keeps its part. Every number of rows is compiled once.

    Args:
        capacity: slots, over all devices together; a multiple of their number.
        examples: the first examples, `(rows, ...)`, of which there may be fewer than slots; or a tree of
            `jax.ShapeDtypeStruct` that describes one example, to begin empty.
        sharding: as for `prefetch_to_device`; axis 0 of all leaves must be split in the same way, over devices of this
            process.
        max_bytes: the most bytes of examples on any one device (`2 << 30` or `"2GiB"`).

    Raises:
        TypeError, ValueError: an argument is not what it should be, or so many examples do not fit, which is known
            before anything is allocated.
        jax.errors.JaxRuntimeError: the devices have no memory for them after all.

    Blocking: while the calls are compiled, and as `insert` for the first examples.

    Thread safety: one thread at a time, the one that runs the steps: what reads or changes examples raises RuntimeError
        meanwhile, and ValueError after `close()`. Other threads hand it examples through `refresh`.
    """

    def __init__(self, capacity: int, examples: T, *, sharding: Any = None, max_bytes: int | str | None = None):
        capacity, most = integer("capacity", capacity, 1), parse_bytes("max_bytes", max_bytes)
        placement = Placement(sharding)
        spec = ExampleSpec(examples, placement)
        self._layout = layout = ResidentLayout.of(spec.leaves, capacity, placement.context)
        first = rows_of(spec, layout, examples, "examples") if spec.has_rows else None
        check_room(layout, most)
        self._store = Store(spec, layout)
        self._takes = self._refreshes = 0
        self._refresh: Refresh | None = None
        self._closed = False
        self._turn = threading.Lock()  # held by the thread inside a call
        if first is not None:
            self._store.write(*first, self._store.oldest(first[1]))

    @property
    def capacity(self) -> int:
        """Slots."""
        return self._layout.slots

    @property
    def nbytes(self) -> int:
        """Bytes of all slots on the fullest device, filled or not."""
        return max(self._layout.cost.values())

    @property
    def element_spec(self) -> Any:
        """The tree of `jax.ShapeDtypeStruct` of one example."""
        return self._store.spec.element_spec

    @property
    def takes(self) -> int:
        """Batches served so far."""
        return self._takes

    @property
    def refreshes(self) -> int:
        """Of the source of `refresh`: how many of its batches have replaced examples."""
        return self._refreshes

    def __len__(self) -> int:
        """Slots that hold an example."""
        return self._store.ring.filled * self._layout.shards

    def __enter__(self) -> DeviceCache[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def take(self, indices: Any) -> T:
        """The examples in these slots, as a batch of `(rows, ...)`, split over the devices as the cache is.

        Args:
            indices: `(rows,)` integers, rows being a multiple of the devices. From the host: each is checked, and row r
                must name a slot of its own device. A `jax.Array` stays on the devices and cannot be checked without
                waiting: an index that is out of a device's own filled slots counts as the nearest of these.

        Raises:
            IndexError: there is no such slot, or it holds no example; nothing has changed, no take is counted.
            ValueError: row and slot are on different devices, or the cache is empty.
            Exception: what the source of `refresh` raised, if its examples are due now; once.

        Blocking: at first, while it is compiled; with a deterministic `refresh`, for examples that are due and late.
        """
        with self._alone("take"):
            if isinstance(indices, jax.Array):
                places = self._layout.put_numbers(as_int32(indices, self._layout.shards))
            else:
                slots = check_slots(indices, self._layout, self._store.ring.filled, "take").reshape(-1)
                places = self._layout.put_numbers(slots)
            return self._read(lambda resident, filled: resident.take(places))

    def batches(self, batch_size: int, key: Any, *, replace: bool = True, epochs: int | None = None) -> CacheBatches[T]:
        """Batches of random examples, determined by the key; each counts as a take.

        Args:
            batch_size: rows, a multiple of the devices. Each device draws its part from its own slots.
            key: a key of `jax.random`.
            replace: drawn uniformly with replacement, without an end. False: in epochs, each of which goes through the
                slots that are filled when it begins, each once, in a new order; rows that make no whole batch are left
                out of that epoch.
            epochs: how many of them; None: without an end.

        Raises:
            TypeError, ValueError: an argument is not what it should be.

        Blocking: until `key` is computed, for it is read.
        """
        batch_size = integer("batch_size", batch_size, 1)
        check_switch("replace", replace)
        if batch_size % self._layout.shards:
            raise ValueError(
                f"batch_size: expected a multiple of the {self._layout.shards} devices of the cache, got {batch_size}."
            )
        if epochs is not None:
            epochs = integer("epochs", epochs, 0)
            if replace:
                raise ValueError("epochs: drawing with replacement has no epochs. Pass replace=False, or no epochs.")
        return CacheBatches(self._serve, batch_size, self._layout.shards, key, replace=bool(replace), epochs=epochs)

    def insert(self, examples: T, slots: Any = None) -> None:
        """Replaces examples in place: the oldest, or those in named slots. Slots without an example count as oldest.

        The arrays are donated to the call, so there is one copy of the cache at any time; calls that read them and were
        dispatched before still see what was there. Host arrays are copied first, and may change afterwards.

        Args:
            examples: `(rows, ...)`, rows being a multiple of the devices, each of which takes its part.
            slots: `(rows,)` different integers; row r names a slot of its own device that holds an example.

        Raises:
            IndexError, TypeError, ValueError, OverflowError: they are no such examples or slots; nothing has changed.

        Blocking: while host arrays are copied, 64 MiB for each device at a time, and until all of these pieces but the
            last have landed: one piece waits for no step, more of them may. A `jax.Array` is not waited for.
        """
        with self._alone("insert"):
            store = self._store
            leaves, n = store.rows(examples, "insert")
            if slots is None:
                places = store.oldest(n)
            else:
                places = check_slots(slots, self._layout, store.ring.filled, "insert", rows=n) % self._layout.each
            store.write(leaves, n, places)

    def refresh(
        self,
        source: Iterable[T] | None,
        *,
        every_takes: int = 1,
        deterministic: bool = True,
        fresh_buffers: bool = False,
    ) -> None:
        """From now on the oldest examples are replaced by those of `source`, while steps run.

        A thread reads and stages them, the calls that take batches put them, and write them once they have landed.

        Args:
            source: an iterable of rows of examples, `(rows, ...)`, as for `prefetch_to_device`. When it ends, the
                examples stay. `None` ends the refresh.
            every_takes: its next batch is written before each take whose number (`takes`) is a multiple of this, but 0.
            deterministic: always at these takes, which wait if the source is late: the key, the source and the order of
                the calls determine everything. False: no take ever waits; what is late is written at a later take.
            fresh_buffers: as for `prefetch_to_device`.

        Raises:
            TypeError, ValueError: an argument is not what it should be.
            RuntimeError: no thread can be had.

        Blocking: where it ends another refresh, as closing a prefetcher does. The source is not waited for here.
        """
        every_takes = integer("every_takes", every_takes, 1)
        check_switch("deterministic", deterministic)
        with self._alone("refresh"):
            new = None
            if source is not None:
                new = refresh_of(self._store, source, every_takes, bool(deterministic), fresh_buffers=fresh_buffers)
            old, self._refresh = self._refresh, None
            if old is not None:
                old.close()
            self._refresh = new
            if new is not None:
                new.start()

    def get_state(self) -> dict[str, Any]:
        """All examples in host memory, `(capacity, ...)`, their ages, and the counts of takes and refreshes.

        Blocking: until what was dispatched to write them is done, and for the copy.
        """
        with self._alone("get_state"):
            return self._store.get_state() | {"takes": self._takes, "refreshes": self._refreshes}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from there: the same batches follow, if a `refresh` follows whose source is at batch `refreshes`.

        Raises:
            TypeError, ValueError: it is no state of a cache like this one, or a refresh has begun; nothing has changed.

        Blocking: as `insert`.
        """
        with self._alone("set_state"):
            if self._refresh is not None:
                raise ValueError("set_state: a refresh is going on. Set the state first, then call refresh().")
            takes, refreshes, _ = check_state(
                state, "set_state", ("takes", "refreshes", "filled"), ("examples", "by_age")
            )
            self._store.set_state(state)
            self._takes, self._refreshes = takes, refreshes

    def close(self) -> None:
        """Ends the refresh and gives back the memory; batches that were taken stay. Blocking: as a prefetcher's."""
        self._closed = True
        if self._refresh is not None:
            self._refresh.close()
        self._store.resident.delete()

    # ---- one call at a time

    def _alone(self, what: str) -> threading.Lock:
        """What to hold meanwhile: a lock lets an error that refuses attributes pass as it is (`errors.Noted`)."""
        if self._closed:
            raise ValueError(f"{what}: this cache is closed. Make a new one.")
        if self._turn.locked():
            raise RuntimeError(
                f"{what}() was called while another call runs: one thread at a time may use a cache. Threads that make "
                "examples hand them over through refresh(), for instance by a queue.Queue."
            )
        return self._turn

    def _serve(self, what: str, read: Read) -> Any:
        with self._alone(what):
            return self._read(read)

    def _read(self, read: Read) -> T:
        store = self._store
        if not store.ring.filled:
            raise ValueError("The cache holds no example yet. Insert some first, or make it from first examples.")
        self._refresh_if_due()
        batch = store.tree(read(store.resident, store.ring.filled))
        self._takes += 1
        return batch

    def _refresh_if_due(self) -> None:
        refresh = self._refresh
        if refresh is None:
            return
        try:
            rows = refresh.due(self._takes)
            if rows is not None:
                leaves, n = self._store.rows(rows, f"refresh, batch {refresh.number}")
                self._store.write(leaves, n, self._store.oldest(n))
                refresh.applied()
                self._refreshes += 1
        except Exception:
            self._refresh = None
            refresh.close()
            raise
        refresh.prepare()
