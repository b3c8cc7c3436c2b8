"""One batch across the border into the runtime, with as few crossings as JAX has.

Synopsis:

    transfer = Transfer(context, loose=(), placed=(0,), shardings=(sharding,))
    arrays = transfer.put(leaves)

The first batch goes through the public `jax.device_put`. Its arrays then serve as templates: JAX's own batched put
takes their avals and prepared shards, for a tenth of the host time (3 against 35 microseconds a leaf on a CPU, jax
0.10.2). That call is private, so it is looked for here and nowhere else; without it every batch goes the public way.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxprefetch.device.context import NARROW, Context, Device
from jaxprefetch.device.placement import Target


def _find_batched_put() -> tuple[Callable[..., jax.Array], Callable[[], Any]] | None:
    try:
        from jax._src.lib import guard_lib
        from jaxlib import xla_client

        guard_lib.thread_local_state().explicit_device_put  # noqa: B018 (it is there)
        return xla_client.batched_device_put, guard_lib.thread_local_state
    except (ImportError, AttributeError):  # another JAX
        return None


_batched_put = _find_batched_put()


@dataclass(frozen=True, slots=True)
class _Template:
    """What the batched put wants to know of a leaf besides its bytes."""

    aval: Any
    sharding: Sharding
    devices: list[Device]
    indices: tuple[Any, ...] | None  # of each device's shard; None: every device gets all of it
    committed: bool

    @classmethod
    def of(cls, array: jax.Array, rows: Mapping[Device, int] | None, local: tuple[int, ...]) -> _Template:
        """Of an array that was made from this process's part, of shape `local`."""
        if rows is not None:
            return cls(array.aval, array.sharding, list(rows), tuple(rows.values()), array.committed)
        if array.sharding.is_fully_addressable:
            where: Mapping[Device, Any] = array.sharding.addressable_devices_indices_map(array.shape)
        else:
            _, where = _local_parts(array.sharding, local)
        indices = None if array.sharding.is_fully_replicated else tuple(where.values())
        return cls(array.aval, array.sharding, list(where), indices, array.committed)

    @property
    def knows_dtype(self) -> bool:
        """Whether JAX makes the same of its bytes, whatever `enable_x64` is set to."""
        return self.aval.dtype.name not in NARROW

    def put(self, leaf: Any, batched_put: Callable[..., jax.Array]) -> jax.Array:
        if not isinstance(leaf, np.ndarray):  # a number of Python's
            with np.errstate(all="ignore"):
                leaf = np.asarray(leaf, self.aval.dtype)
        shards = [leaf] * len(self.devices) if self.indices is None else [leaf[index] for index in self.indices]
        return batched_put(self.aval, self.sharding, shards, self.devices, self.committed)


class Transfer:
    """Puts batches of one plan.

    Args:
        context: in force, whatever is in force around it, during every put for which it matters.
        loose: leaves that go to the default device, uncommitted.
        placed: leaves that go where `shardings` says.
        rows: of leaves that come as their shards, one after another along the first axis: which one each device gets.
    """

    def __init__(
        self,
        context: Context,
        loose: Sequence[int],
        placed: Sequence[int],
        shardings: Sequence[Sharding],
        rows: Mapping[int, Mapping[Device, int]] = types.MappingProxyType({}),
    ):
        self._context, self._rows = context, rows
        self._loose, self._placed, self._shardings = loose, placed, shardings
        self._local = all(sharding.is_fully_addressable for sharding in shardings)
        self._templates: dict[int, _Template] | None = None
        self._fast = True
        self._anywhere = False  # the fast way needs no context: it asks for no default of JAX's
        self._rest: tuple[Sequence[int], Sequence[int], Sequence[Sharding]] = ((), (), ())  # without a template

    def put(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves as arrays; those that are in neither group stay as they are.

        Blocking: only for the allocation of device memory; the copies are queued.
        """
        if self._anywhere and (out := self._put_fast(leaves)) is not None:
            return out
        with self._context.entered():
            if (out := self._put_fast(leaves)) is not None:
                return out
            out = self._put_public(leaves, self._loose, self._placed, self._shardings)
            self._prepare(leaves, out)
            return out

    def _prepare(self, leaves: Sequence[Any], arrays: list[Any]) -> None:
        """Templates for what is made from host data; arrays of the source's go the public way always."""
        made = [i for i in (*self._loose, *self._placed) if not isinstance(leaves[i], jax.Array)]
        placed = {i: s for i, s in zip(self._placed, self._shardings, strict=True) if i not in made}
        self._templates = {i: _Template.of(arrays[i], self._rows.get(i), np.shape(leaves[i])) for i in made}
        self._rest = [i for i in self._loose if i not in made], tuple(placed), tuple(placed.values())
        known = all(template.knows_dtype for template in self._templates.values())
        self._anywhere = known and len(made) == len(self._loose) + len(self._placed)

    def _put_fast(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The leaves as arrays, or None where there are no templates yet or JAX has no such call."""
        if self._templates is None or _batched_put is None or not self._fast:
            return None
        loose, placed, shardings = self._rest
        out = self._put_public(leaves, loose, placed, shardings) if loose or placed else list(leaves)
        put, guard = _batched_put[0], _batched_put[1]()
        before, guard.explicit_device_put = guard.explicit_device_put, True  # as in JAX's own `device_put`
        try:
            for i, template in self._templates.items():
                out[i] = template.put(out[i], put)
        except TypeError:  # a JAX whose batched put wants other arguments
            self._fast = False
            return None
        finally:
            guard.explicit_device_put = before
        return out

    @np.errstate(all="ignore")  # numbers that are too large become infinite
    def _put_public(
        self, leaves: Sequence[Any], loose: Sequence[int], placed: Sequence[int], shardings: Sequence[Sharding]
    ) -> list[Any]:
        out = list(leaves)
        if loose:
            for i, array in zip(loose, jax.device_put([out[i] for i in loose]), strict=True):
                out[i] = array
        by_shard = {i: s for i, s in zip(placed, shardings, strict=True) if i in self._rows}
        for i, sharding in by_shard.items():
            out[i] = _put_shards(out[i], sharding, self._rows[i])
        if by_shard:
            whole = {i: s for i, s in zip(placed, shardings, strict=True) if i not in self._rows}
            placed, shardings = tuple(whole), tuple(whole.values())
        if placed and self._local:
            for i, array in zip(placed, jax.device_put([out[i] for i in placed], list(shardings)), strict=True):
                out[i] = array
        elif placed:
            for i, sharding in zip(placed, shardings, strict=True):
                out[i] = _put_local_rows(out[i], sharding)
        return out


def _put_shards(leaf: np.ndarray, sharding: Sharding, rows: Mapping[Device, int]) -> jax.Array:
    """The array whose shards these are."""
    shards = jax.device_put([leaf[row] for row in rows.values()], list(rows))
    shape = tuple(
        n * parts for n, parts in zip(leaf.shape[1:], Target(sharding).local_shards(leaf.ndim - 1), strict=True)
    )
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _put_local_rows(leaf: Any, sharding: Sharding) -> jax.Array:
    """This process's part of a global array, without a collective."""
    if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, sharding)
    rows = np.asarray(leaf)
    shape, parts = _local_parts(sharding, rows.shape)
    shards = jax.device_put([rows[part] for part in parts.values()], list(parts))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.lru_cache(maxsize=1024)
def _local_parts(sharding: Sharding, local: tuple[int, ...]) -> tuple[tuple[int, ...], dict[Device, tuple[slice, ...]]]:
    """The shape of the global array, and which part of this process's rows each of its devices gets.

    `jax.make_array_from_process_local_data` does the same in each call, and calls it implicit (seen in JAX 0.10.2).
    """
    shape = Target(sharding).global_shape(local)
    indices = {
        device: tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if index is not None
    }
    here = [sorted({index[axis] for index in indices.values()}) for axis in range(len(shape))]
    parts = {}
    for device, index in indices.items():
        sizes = [stop - start for start, stop in index]
        places = [here[axis].index(part) for axis, part in enumerate(index)]
        parts[device] = tuple(slice(at * n, (at + 1) * n) for at, n in zip(places, sizes, strict=True))
    return shape, parts
