"""Batches of random examples from a cache: with replacement, or each once an epoch. A key determines them.

Synopsis:

    batches = cache.batches(256, jax.random.key(0), replace=False, epochs=10)
    for batch in batches:
        state, metrics = train_step(state, batch)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxprefetch.device.resident import Resident, key_shape
from jaxprefetch.errors import shown

T = TypeVar("T")
Read = Callable[[Resident, int], list[jax.Array]]
"""From the examples, and how many each device has, to the leaves of a batch."""
Serve = Callable[[str, Read], Any]
"""Makes a batch by such a read, for a call of this name, after the refresh that is due before it."""

_COUNTS = "taken", "epoch", "position", "filled"


class CacheBatches(Generic[T]):
    """What `DeviceCache.batches` returns: an iterator of batches, whose position can be saved.

    Args:
        serve: has the cache make a batch.
        rows: of a batch.
        shards: devices of the cache, over which the rows are split.
        key, replace, epochs: as `DeviceCache.batches` has them.

    Thread safety: one thread at a time, the same as for the cache.
    """

    def __init__(self, serve: Serve, rows: int, shards: int, key: Any, *, replace: bool, epochs: int | None):
        self._serve = serve
        self._rows, self._each = rows, rows // shards
        self._key, self._implementation = _key_data(key)
        self._replace, self._epochs = replace, epochs
        self._taken = 0  # batches
        self._epoch, self._position, self._length, self._filled = -1, 0, 0, 0  # of the last batch, in batches
        self._on_devices: tuple[jax.Array, ...] = ()  # key, and count, or order and start; made when first needed

    def __iter__(self) -> CacheBatches[T]:
        return self

    def __next__(self) -> T:
        """The next batch. Blocking: as `DeviceCache.take`.

        Raises:
            StopIteration: after the last epoch.
            ValueError: the cache is closed or empty, or has fewer examples than a batch needs.
            RuntimeError: another thread uses the cache.
        """
        if not self._replace and self._position == self._length and self._epoch + 1 == self._epochs:
            raise StopIteration
        return self._serve("next", self._drawn if self._replace else self._dealt)

    def get_state(self) -> dict[str, Any]:
        """After the last batch taken: plain numbers, the key's data and its implementation's name. Never blocks."""
        return {
            "taken": self._taken,
            "epoch": self._epoch,
            "position": self._position,
            "filled": self._filled,
            "key": self._key,
            "implementation": self._implementation,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from there, with the same batches if the cache, too, is as it was. Never blocks.

        Raises:
            ValueError: it is no state of such batches; nothing has changed.
        """
        try:
            taken, epoch, position, filled = (operator.index(state[name]) for name in _COUNTS)
            key, implementation = np.asarray(state["key"], np.uint32), state["implementation"]
            right = key.shape == key_shape(implementation)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state: expected what get_state() of cache batches returned, got {state!r:.200}. Take another state, "
                "or begin anew without it."
            ) from error
        length = filled // self._each
        if not right or taken < 0 or epoch < -1 or not 0 <= position <= length:
            raise ValueError(
                f"state: {state!r:.200} is not that of batches of {self._rows} rows. Make them as they were made then."
            )
        self._key, self._implementation, self._taken, self._on_devices = key, implementation, taken, ()
        self._epoch, self._position, self._length, self._filled = epoch, position, length, filled

    def _drawn(self, resident: Resident, filled: int) -> list[jax.Array]:
        if not self._on_devices:
            self._on_devices = self._put_key(resident), resident.layout.put_scalar(np.uint32(self._taken))
        key, count = self._on_devices
        batch, count = resident.draw(self._rows, key, self._implementation, count)
        self._on_devices = key, count
        self._taken += 1
        return batch

    def _dealt(self, resident: Resident, filled: int) -> list[jax.Array]:
        if self._position == self._length:
            if filled < self._each:
                raise ValueError(
                    f"batch_size: {self._rows:,} rows are more than the {filled * self._rows // self._each:,} examples "
                    "of the cache. Insert more first, or take smaller batches."
                )
            self._begin(resident, self._epoch + 1, 0, filled)
        elif not self._on_devices:  # restored
            self._begin(resident, self._epoch, self._position, self._filled)
        key, order, start = self._on_devices
        batch, start = resident.deal(self._rows, order, start)
        self._on_devices = key, order, start
        self._position += 1
        self._taken += 1
        return batch

    def _begin(self, resident: Resident, epoch: int, position: int, filled: int) -> None:
        put = resident.layout.put_scalar
        key = self._on_devices[0] if self._on_devices else self._put_key(resident)
        order = resident.shuffle(key, self._implementation, put(np.uint32(epoch)), put(np.int32(filled)))
        self._on_devices = key, order, put(np.int32(position * self._each))
        self._epoch, self._position, self._length, self._filled = epoch, position, filled // self._each, filled

    def _put_key(self, resident: Resident) -> jax.Array:
        return resident.layout.put_scalar(self._key)


def _key_data(key: Any) -> tuple[np.ndarray, Any]:
    """A key's data and implementation.

    Raises:
        TypeError: it is no single key.
    """
    try:
        if not isinstance(key, jax.Array):
            raise TypeError
        data, implementation = jax.device_get(jax.random.key_data(key)), jax.random.key_impl(key)
    except (TypeError, ValueError):
        data, implementation = None, None
    if data is None or data.shape != key_shape(implementation):
        raise TypeError(f"key: expected one key, such as jax.random.key(0), got {shown(key)}.")
    return data.astype(jnp.uint32), implementation
