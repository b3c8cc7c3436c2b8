"""The ways to feed a training loop that are compared, each by its real library.

method = peers.ours("pinned", size=2)
with method.open(host, place) as batches:                # host["pinned"] and host["pageable"]: pinned.HostBatches
    for batch in batches:
        state, loss = step(state, batch)
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
import sources
from budget import Budget
from pinned import Batch, HostBatches

Opened = AbstractContextManager[Iterable]


class Unavailable(Exception):
    """A method that cannot be measured here; says why."""


@dataclass(frozen=True)
class Method:
    """One way to bring batches to the devices.

    Attributes:
        name: what tables call it.
        memory: "pinned" or "pageable": where the source's arrays lie.
        opener: `(batches, place)` to a context that yields device batches.
        is_ours: a failure of ours fails the benchmark; one of a peer is written down.
        package: the package that it needs.
        base: the method of which the share is taken.
        ahead: batches that it may have copied before they are asked for, so that a few steps would tell nothing.
        measure: for a method with a loop of its own, `(budget, pace_ms)` to a sample, instead of an opener.
    """

    name: str
    memory: str = "pageable"
    opener: Callable[[HostBatches, object], Opened] | None = None
    is_ours: bool = False
    package: str = "jax"
    base: str = "resident"
    ahead: int = 0
    measure: Callable[[Budget, float | None], dict] | None = None

    def open(self, host: dict[str, HostBatches], place) -> Opened:
        """Starts on the batches of the memory that the method wants.

        Args:
            host: the batches, by "pinned" and "pageable".
            place: the devices.
        """
        return self.opener(host[self.memory], place)


def resident() -> Method:
    """Two batches that lie on the devices from the start: what a loop reaches when input costs nothing."""

    @contextlib.contextmanager
    def opener(host: HostBatches, place):
        batches = [jax.device_put(batch, place.sharding) for batch in host.batches[:2]]
        jax.block_until_ready(batches)
        yield itertools.cycle(batches)

    return Method("resident", opener=opener)


def resident_one() -> Method:
    """One batch that lies on the devices: the memory that any loop needs."""

    @contextlib.contextmanager
    def opener(host: HostBatches, place):
        yield itertools.repeat(jax.device_put(host.batches[0], place.sharding))

    return Method("resident", opener=opener)


def plain(memory: str = "pageable") -> Method:
    """`jax.device_put` in the loop."""

    @contextlib.contextmanager
    def opener(host: HostBatches, place):
        yield (jax.device_put(batch, place.sharding) for batch in host.forever())

    return Method(f"device_put in the loop, {memory}", memory, opener)


def double_buffer(memory: str = "pageable") -> Method:
    """A generator that puts the next batch before it yields one, in the manner of dm-haiku's ImageNet example.

    References: `double_buffer` in `examples/imagenet/dataset.py` of github.com/google-deepmind/dm-haiku; that one puts
    with `device_put_sharded`, which JAX no longer has.
    """

    def batches(host: HostBatches, place) -> Iterator:
        ahead = None
        for batch in host.forever():
            current, ahead = ahead, jax.device_put(batch, place.sharding)
            if current is not None:
                yield current

    @contextlib.contextmanager
    def opener(host: HostBatches, place):
        yield batches(host, place)

    return Method(f"double buffer, {memory}", memory, opener)


def flax(memory: str = "pageable") -> Method:
    """`flax.jax_utils.prefetch_to_device` with its recommended size of two."""

    @contextlib.contextmanager
    def opener(host: HostBatches, place):
        from flax import jax_utils

        by_device = host.by_device(len(place.devices)).forever()  # as pmap takes them
        yield jax_utils.prefetch_to_device(by_device, 2, devices=list(place.devices))

    return Method(f"flax prefetch_to_device(2), {memory}", memory, opener, package="flax")


def grain(memory: str = "pageable") -> Method:
    """`grain.experimental.device_put` with its default buffers."""

    @contextlib.contextmanager
    def opener(host: HostBatches, place):
        import grain

        one_epoch = grain.MapDataset.source(_Endless(host.batches)).to_iter_dataset()
        iterator = iter(grain.experimental.device_put(one_epoch, place.sharding))
        try:
            yield iterator
        finally:
            iterator.close()

    return Method(f"grain device_put, {memory}", memory, opener, package="grain", ahead=10)


def datarax(memory: str = "pageable") -> Method:
    """`datarax`'s two stages with their default buffers: four batches on the host, two on the device."""

    @contextlib.contextmanager
    def opener(host: HostBatches, place):
        from datarax.control.prefetcher import DevicePrefetcher, Prefetcher

        on_host = Prefetcher(buffer_size=4).prefetch(host.forever())
        iterator = DevicePrefetcher(buffer_size=2, device=place.sharding).prefetch(on_host)
        try:
            yield iterator
        finally:
            iterator.close()
            on_host.close()

    return Method(f"datarax DevicePrefetcher, {memory}", memory, opener, package="datarax")


def ours(
    how: str, size: int = 2, *, delete_used: bool = False, max_bytes: int | None = None, native: bool = True
) -> Method:
    """`jaxprefetch.prefetch_to_device`.

    Args:
        how: what the source gives. "pageable": ordinary arrays. "pinned": arrays that are pinned already and never
            written again, which are sent as they are. "read_into": it writes its batches into our slots. "batched":
            samples, which `jaxprefetch.batched` stacks in our slots.
        size, delete_used, max_bytes: as `prefetch_to_device` takes them.
        native: False: as if the extra `native` were not installed.
    """

    @contextlib.contextmanager
    def opener(host: HostBatches, place):
        import jaxprefetch

        batches = jaxprefetch.prefetch_to_device(
            _source(how, host),
            size,
            sharding=place.sharding,
            max_bytes=max_bytes,
            delete_used=delete_used,
            fresh_buffers=True if how == "pinned" else None,
        )
        with contextlib.nullcontext() if native else copies_by_numpy(), batches:
            yield batches

    name = f"jaxprefetch, {how}, size {size}" + (", delete_used" if delete_used else "")
    name += ", max_bytes" if max_bytes else ""
    name += "" if native else ", NumPy copies"
    return Method(name, "pinned" if how == "pinned" else "pageable", opener, is_ours=True)


@contextlib.contextmanager
def copies_by_numpy() -> Iterator[None]:
    """As if the extra `native` were not installed."""
    from jaxprefetch.host import native

    there = native.native
    native.native = lambda: None
    try:
        yield
    finally:
        native.native = there


def calls_alone() -> Method:
    """The put and the unpacking of each batch as `jaxprefetch` asks JAX for them, one ahead, and nothing else.

    What its time on the host cannot be less than: nothing is staged, waited for or bounded. The batches lie in its
    pinned memory from the start, packed if it would pack them.
    """

    @contextlib.contextmanager
    def opener(host: HostBatches, place):
        from jaxprefetch.device.handout import HandOut
        from jaxprefetch.device.placement import Placement
        from jaxprefetch.layout import StagingOptions
        from jaxprefetch.staging import stager

        placement = Placement(place.sharding)
        stages, handout = stager(placement, StagingOptions(), None), HandOut(None, placement.context)
        staged = [stages.stage(batch, number, lambda nbytes: None) for number, batch in enumerate(host.batches)]

        def batches() -> Iterator:
            ahead = None
            for batch in itertools.cycle(staged):
                due, ahead = ahead, (batch, batch.plan.put(batch.leaves))
                if due is not None:
                    delivery = handout.delivery(due[0].plan, due[0].leaves)
                    leaves = delivery.leaves(due[1], delivery.dispatch(due[1])) if delivery.call else due[1]
                    yield jax.tree_util.tree_unflatten(delivery.treedef, leaves)

        yield batches()

    return Method("jaxprefetch's calls of JAX alone", opener=opener)


def batched() -> Callable:
    """Returns `jaxprefetch.batched`; sources with `read_into` came with it.

    Raises:
        Unavailable: this version has none.
    """
    try:
        from jaxprefetch import batched
    except ImportError:
        raise Unavailable("not in this version") from None
    return batched


def _source(how: str, host: HostBatches) -> Iterable[Batch] | sources.ReadsInto:
    if how == "read_into":
        batched()
        return sources.ReadsInto(host)
    if how == "batched":
        return batched()(sources.samples(host), sources.rows(host))
    return host.forever()


class _Endless:
    """A random-access source of very many batches, as Grain reads it: the same few in turn."""

    def __init__(self, batches: list[Batch]):
        self._batches = batches

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index % len(self._batches)]
