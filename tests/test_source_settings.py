"""The JAX settings of a source: those of the call at first, its own later, and never the loop's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefetch import prefetch_to_device

by_host_size = pytest.mark.parametrize("host_size", [0, 2])


@by_host_size
@pytest.mark.parametrize("outside", [False, True])
def test_a_generator_keeps_its_own_settings_across_yields(host_size, outside):
    """A generator that holds `enable_x64` and `default_device` has them in every batch, and the loop keeps its own."""
    device = jax.devices()[3]

    def source():
        with jax.enable_x64(True), jax.default_device(device):
            for i in range(4):
                x = jnp.arange(3) + 2**40 + i
                yield {"x": x, "where": np.array([d.id for d in x.devices()])}
        yield {"x": jnp.arange(3), "where": np.array([d.id for d in jnp.arange(3).devices()])}

    delivered = []
    with jax.enable_x64(outside):
        for batch in prefetch_to_device(source(), host_size=host_size):
            delivered.append(batch)
            assert jax.config.jax_enable_x64 == outside
            assert jax.config.jax_default_device is None
            assert jnp.arange(3).dtype == (jnp.int64 if outside else jnp.int32)
    *inside, last = delivered
    assert [int(batch["x"][0]) for batch in inside] == [2**40 + i for i in range(4)]
    assert {batch["x"].dtype.name for batch in inside} == {"int64"}
    assert {int(batch["where"][0]) for batch in inside} == {3}
    assert last["x"].dtype == (jnp.int64 if outside else jnp.int32)
    assert int(last["where"][0]) == 0


@by_host_size
def test_a_generator_left_in_the_middle_changes_no_setting(host_size):
    """A generator that is closed inside of its own `enable_x64` leaves the loop's setting as it was."""

    def source():
        with jax.enable_x64(True):
            while True:
                yield np.zeros(2, np.float32)

    with prefetch_to_device(source(), host_size=host_size) as batches:
        next(batches)
    assert not jax.config.jax_enable_x64
