"""Ctrl-C while results are fetched: the next `next()` gives the result that was due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_interrupts import Strike

from jaxprefetch import fetch_to_host


class Seen:
    """The results, with their names noted as they are handed out."""

    def __init__(self, results: Iterator[Any]):
        self._results = results
        self.names: list[str] = []

    def __next__(self) -> Any:
        result = next(self._results)
        self.names.append(result["name"])
        return result


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("max_bytes", [None, 100])
@pytest.mark.parametrize("spread", [False, True])
def test_interrupt_anywhere_loses_no_result(size, max_bytes, spread):
    """Wherever in `next()` Ctrl-C strikes: all results come, once, in order, with what is no array as it was."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if spread:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    outputs = [{"x": jax.device_put(jnp.full(8, i, jnp.int32), sharding), "name": f"step {i}"} for i in range(5)]

    def run(at: int) -> int:
        strike = Strike(at)
        with fetch_to_host(iter(outputs), size, max_bytes=max_bytes) as results:
            seen = Seen(results)
            assert strike.take(seen) == list(range(5)), at
        assert seen.names == [f"step {i}" for i in range(5)], at
        return strike.places

    for at in range(1, run(0) + 1):
        run(at)
