"""Examples that stay on the devices in slots, and the compiled calls that read and replace them there.

Synopsis:

    resident = Resident(layout)                        # allocates `layout.cost`, and never any more for examples
    resident.write(rows, places)                       # in place: the arrays are donated to the call
    batch = resident.take(indices)                     # leaf by leaf

Axis 0 is split over the devices, and each device reads and writes its own slots only: nothing is exchanged between them
and nothing crosses the link. So the rows of a batch that are on a device come from that device's slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxprefetch.device.context import compiled_as_ever, in_clean_thread
from jaxprefetch.device.examples import WHOLE, ResidentLayout, spec_of


class Resident:
    """The arrays. Used by one thread at a time.

    Raises:
        jax.errors.JaxRuntimeError: the devices have no memory for them.
    """

    def __init__(self, layout: ResidentLayout):
        self.layout = layout
        self.arrays = _run(_zeros(layout))
        self._filled = layout.put_scalar(np.int32(0))

    def delete(self) -> None:
        """Gives back the memory."""
        for array in self.arrays:
            array.delete()

    def set_filled(self, each: int) -> None:
        """So many slots of each device hold an example; reading never goes beyond."""
        self._filled = self.layout.put_scalar(np.int32(each))

    def write(self, rows: Sequence[jax.Array], places: jax.Array) -> None:
        """Replaces the examples in these places, counted on each device from its first slot, each named once."""
        self.arrays = _run(_write(self.layout, len(places)), self.arrays, list(rows), places)

    def take(self, slots: jax.Array) -> list[jax.Array]:
        """The examples in these slots; those of other devices, or without an example, count as the nearest that has."""
        return _run(_take(self.layout, len(slots)), self.arrays, slots, self._filled)

    def draw(self, n: int, key: jax.Array, implementation: str, count: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """Rows drawn with replacement by the key and the count; and the count after it."""
        return _run(_draw(self.layout, n, implementation), self.arrays, key, count, self._filled)

    def shuffle(self, key: jax.Array, implementation: str, epoch: jax.Array, filled: jax.Array) -> jax.Array:
        """The places of each device in random order, those without an example last."""
        return _run(_shuffle(self.layout, implementation), key, epoch, filled)

    def deal(self, n: int, order: jax.Array, start: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """The next rows in this order, and where the ones after them begin."""
        return _run(_deal(self.layout, n), self.arrays, order, start)


def _run(call: Callable[..., Any], *arguments: Any) -> Any:
    with compiled_as_ever():
        return call(*arguments)


# ---- the calls, compiled once for all caches of one layout


@functools.lru_cache(maxsize=256)
def _zeros(layout: ResidentLayout) -> Any:
    shapes = [(layout.slots, *leaf.shape) for leaf in layout.leaves]
    shardings = [leaf.target.sharding for leaf in layout.leaves] if layout.axis.committed else None

    def jaxprefetch_allocate() -> list[jax.Array]:
        return [jnp.zeros(shape, leaf.dtype) for shape, leaf in zip(shapes, layout.leaves, strict=True)]

    return _compiled(layout, jax.jit(jaxprefetch_allocate, out_shardings=shardings))


@functools.lru_cache(maxsize=256)
def _write(layout: ResidentLayout, n: int) -> Any:
    def jaxprefetch_write(arrays: list[jax.Array], rows: list[jax.Array], places: jax.Array) -> list[jax.Array]:
        return [_replace(layout, array, new, places) for array, new in zip(arrays, rows, strict=True)]

    call = _local(layout, jaxprefetch_write, (layout.specs, layout.specs, spec_of(layout.axis)), layout.specs)
    return _compiled(
        layout, jax.jit(call, donate_argnums=0), layout.rows(layout.slots), layout.rows(n), layout.numbers(n)
    )


@functools.lru_cache(maxsize=256)
def _take(layout: ResidentLayout, n: int) -> Any:
    def jaxprefetch_take(arrays: list[jax.Array], slots: jax.Array, filled: jax.Array) -> list[jax.Array]:
        first = layout.place() * np.int32(layout.each)
        return _gather(arrays, jnp.clip(slots - first, np.int32(0), filled - np.int32(1)))

    call = _local(layout, jaxprefetch_take, (layout.specs, spec_of(layout.axis), WHOLE), layout.specs)
    return _compiled(layout, jax.jit(call), layout.rows(layout.slots), layout.numbers(n), layout.scalar(np.int32))


@functools.lru_cache(maxsize=256)
def _draw(layout: ResidentLayout, n: int, implementation: str) -> Any:
    def jaxprefetch_draw(arrays: list[jax.Array], key: jax.Array, count: jax.Array, filled: jax.Array) -> Any:
        own = _own_key(layout, key, implementation, count)
        places = jax.random.randint(own, (n // layout.shards,), np.int32(0), filled, jnp.int32)
        return _gather(arrays, places), count + np.uint32(1)

    specs = layout.specs, WHOLE, WHOLE, WHOLE
    call = _local(layout, jaxprefetch_draw, specs, (layout.specs, WHOLE))
    return _compiled(
        layout,
        jax.jit(call),
        layout.rows(layout.slots),
        layout.scalar(shape=key_shape(implementation)),
        layout.scalar(),
        layout.scalar(np.int32),
    )


@functools.lru_cache(maxsize=256)
def _shuffle(layout: ResidentLayout, implementation: str) -> Any:
    def jaxprefetch_shuffle(key: jax.Array, epoch: jax.Array, filled: jax.Array) -> jax.Array:
        bits = jax.random.bits(_own_key(layout, key, implementation, epoch), (layout.each,), jnp.uint32)
        has = jnp.arange(layout.each, dtype=jnp.int32) < filled
        last = jnp.uint32(np.iinfo(np.uint32).max)  # the sort is stable, so all that have one come before the others
        return jnp.argsort(jnp.where(has, bits, last), stable=True).astype(jnp.int32)

    call = _local(layout, jaxprefetch_shuffle, (WHOLE, WHOLE, WHOLE), spec_of(layout.axis))
    key = layout.scalar(shape=key_shape(implementation))
    return _compiled(layout, jax.jit(call), key, layout.scalar(), layout.scalar(np.int32))


@functools.lru_cache(maxsize=256)
def _deal(layout: ResidentLayout, n: int) -> Any:
    each = n // layout.shards

    def jaxprefetch_deal(arrays: list[jax.Array], order: jax.Array, start: jax.Array) -> Any:
        places = jax.lax.dynamic_slice(order, (start,), (each,))
        return _gather(arrays, places), start + np.int32(each)

    call = _local(layout, jaxprefetch_deal, (layout.specs, spec_of(layout.axis), WHOLE), (layout.specs, WHOLE))
    order = layout.numbers(layout.slots)
    return _compiled(layout, jax.jit(call), layout.rows(layout.slots), order, layout.scalar(np.int32))


def _replace(layout: ResidentLayout, array: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        return array.at[places].set(new, mode="promise_in_bounds", unique_indices=True)

    # XLA's CPU client scatters by way of float32, where a NaN loses its payload (seen in jaxlib 0.10.2, not in 0.12).
    if array.dtype != jnp.bfloat16 or any(d.platform != "cpu" for d in layout.axis.sharding.device_set):
        return put(array, new)
    as_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
    return jax.lax.bitcast_convert_type(put(as_bits(array), as_bits(new)), jnp.bfloat16)


def _gather(arrays: list[jax.Array], places: jax.Array) -> list[jax.Array]:
    return [array.at[places].get(mode="promise_in_bounds") for array in arrays]


def _own_key(layout: ResidentLayout, key: jax.Array, implementation: str, count: jax.Array) -> jax.Array:
    """Each device draws by itself, from the same key."""
    whole = jax.random.wrap_key_data(key, impl=implementation)
    return jax.random.fold_in(jax.random.fold_in(whole, count), layout.place())


@functools.lru_cache(maxsize=64)
def key_shape(implementation: str) -> tuple[int, ...]:
    """Of a key's data."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation))).shape


def _local(layout: ResidentLayout, call: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """The call as each device makes it, on what it has of the arguments."""
    sharding = layout.axis.sharding
    if not isinstance(sharding, NamedSharding):
        return call
    return jax.shard_map(call, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _compiled(layout: ResidentLayout, call: Any, *arguments: Any) -> Any:
    def compiled() -> Any:
        with layout.context.entered():
            return call.lower(*arguments).compile()

    return in_clean_thread(compiled)
