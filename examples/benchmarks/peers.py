"""The ways to feed a training loop that are compared, each by its real library.

method = peers.ours("pinned", size=2)
with method.open(host_batches.forever(), place) as batches:
    for batch in batches:
        state, loss = step(state, batch)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
from pinned import Batch, HostBatches

Source = Iterator[Batch]
Opened = AbstractContextManager[Iterator]


@dataclass(frozen=True)
class Method:
    """One way to bring batches to the devices.

    Attributes:
        name: what tables call it.
        memory: "pinned" or "pageable": where the source's arrays lie.
        opener: `(source, place)` to a context that yields device batches.
        by_device: whether it wants `(devices, rows, ...)` leaves, as pmap does.
        is_ours: a failure of ours fails the benchmark; one of a peer is written down.
        package: the package that it needs.
    """

    name: str
    memory: str
    opener: Callable[..., Opened]
    by_device: bool = False
    is_ours: bool = False
    package: str = "jax"

    def open(self, host: dict[str, HostBatches], place) -> Opened:
        """Starts on the batches of the memory that the method wants.

        Args:
            host: the batches, by "pinned" and "pageable".
            place: the devices.
        """
        batches = host[self.memory]
        if self.by_device:
            batches = batches.by_device(len(place.devices))
        return self.opener(batches.forever(), place)


def resident() -> Method:
    """Two batches that lie on the devices from the start: what a loop reaches when input costs nothing."""

    @contextlib.contextmanager
    def opener(source: Source, place):
        batches = [jax.device_put(batch, place.sharding) for batch in itertools.islice(source, 2)]
        jax.block_until_ready(batches)
        yield itertools.cycle(batches)

    return Method("resident", "pageable", opener)


def resident_one() -> Method:
    """One batch that lies on the devices: the memory that any loop needs."""

    @contextlib.contextmanager
    def opener(source: Source, place):
        yield itertools.repeat(jax.device_put(next(source), place.sharding))

    return Method("resident", "pageable", opener)


def plain(memory: str) -> Method:
    """`jax.device_put` in the loop."""

    @contextlib.contextmanager
    def opener(source: Source, place):
        yield (jax.device_put(batch, place.sharding) for batch in source)

    return Method(f"device_put in the loop, {memory}", memory, opener)


def flax(memory: str) -> Method:
    """`flax.jax_utils.prefetch_to_device` with its recommended size of two."""

    @contextlib.contextmanager
    def opener(source: Source, place):
        from flax import jax_utils

        yield jax_utils.prefetch_to_device(source, 2, devices=list(place.devices))

    return Method(f"flax prefetch_to_device(2), {memory}", memory, opener, by_device=True, package="flax")


def grain(memory: str) -> Method:
    """`grain.experimental.device_put` with its default buffers."""

    @contextlib.contextmanager
    def opener(source: Source, place):
        import grain

        one_epoch = grain.MapDataset.source(_Endless(source)).to_iter_dataset()
        iterator = iter(grain.experimental.device_put(one_epoch, place.sharding))
        try:
            yield iterator
        finally:
            iterator.close()

    return Method(f"grain device_put, {memory}", memory, opener, package="grain")


def ours(memory: str, size: int = 2, *, delete_used: bool = False, max_bytes: int | None = None) -> Method:
    """`jaxprefetch.prefetch_to_device`; pinned arrays are sent as they are, since the source never writes again."""

    def opener(source: Source, place):
        import jaxprefetch

        return jaxprefetch.prefetch_to_device(
            source,
            size,
            sharding=place.sharding,
            max_bytes=max_bytes,
            delete_used=delete_used,
            fresh_buffers=True if memory == "pinned" else None,
        )

    name = f"jaxprefetch, {memory}, size {size}" + (", delete_used" if delete_used else "")
    return Method(name + (", max_bytes" if max_bytes else ""), memory, opener, is_ours=True)


class _Endless:
    """A random-access source of very many batches, as Grain reads it: the batches of `source` in turn."""

    def __init__(self, source: Source):
        self._batches = list(itertools.islice(source, 4))

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index % len(self._batches)]
