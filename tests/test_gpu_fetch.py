"""What only a GPU shows of `fetch_to_host`: copies in pinned memory, read in place, that hold nothing on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefetch import fetch_to_host
from jaxprefetch.device import fetch as device_fetch

pytestmark = pytest.mark.gpu

SHAPE = (4096, 4096)  # 64 MiB of float32
BYTES = 4 * SHAPE[0] * SHAPE[1]
make = jax.jit(lambda i: jnp.full(SHAPE, i, jnp.float32) + jnp.arange(SHAPE[1], dtype=jnp.float32))
donating = jax.jit(lambda x: x + 1, donate_argnums=0)


def bytes_in_use() -> int:
    return jax.local_devices()[0].memory_stats()["bytes_in_use"]


def test_results_are_read_where_they_landed(monkeypatch) -> None:
    """The copies are arrays in pinned memory, and NumPy's arrays have the same addresses."""
    copies, to_host = [], device_fetch.to_host

    def seen(copy):
        array = to_host(copy)
        copies.append((copy.sharding.memory_kind, copy.unsafe_buffer_pointer() == array.ctypes.data))
        return array

    monkeypatch.setattr("jaxprefetch.fetch.to_host", seen)
    for i, result in enumerate(fetch_to_host(make(jnp.float32(i)) for i in range(6))):
        np.testing.assert_array_equal(result[7], i + np.arange(SHAPE[1], dtype=np.float32))
    assert copies == [("pinned_host", True)] * 6


def test_outputs_in_flight_are_bounded() -> None:
    """No more than `size` outputs are on the device, and none is left after the last result.

    A thread of the runtime gives the memory of an output back when its copy is done, at times after that is known.
    """
    make(jnp.float32(0)).block_until_ready()
    before, most = bytes_in_use(), 0

    def outputs():
        nonlocal most
        for i in range(40):
            output = make(jnp.float32(i))
            most = max(most, bytes_in_use() - before)
            yield output
            del output

    for i, result in enumerate(fetch_to_host(outputs(), 4)):
        assert result[0, 0] == i
    assert most <= 5 * BYTES + (1 << 20)
    assert bytes_in_use() - before <= 1 << 20


@pytest.mark.parametrize("how", ["delete", "donate"])
def test_outputs_may_go_as_soon_as_the_next_is_asked_for(how) -> None:
    """Values are right when the state is deleted or donated while its copy has hardly begun."""

    def states():
        state = make(jnp.float32(0))
        for _ in range(30):
            yield state
            old, state = state, donating(state) if how == "donate" else state + 1
            if how == "delete":
                old.delete()

    for i, result in enumerate(fetch_to_host(states())):
        np.testing.assert_array_equal(result[-1], i + np.arange(SHAPE[1], dtype=np.float32))


def test_results_that_are_kept_do_not_change() -> None:
    """Every result of a loop that keeps all of them is as it was."""
    for i, result in enumerate(list(fetch_to_host(make(jnp.float32(i)) for i in range(30)))):
        assert (result[0, 0], result[-1, -1]) == (i, i + SHAPE[1] - 1)


def test_transfers_are_explicit() -> None:
    """A loop that forbids implicit transfers may fetch."""
    outputs = [{"x": jnp.full(4, i, jnp.float32), "s": jnp.float32(i)} for i in range(5)]
    with jax.transfer_guard("disallow"):
        results = list(fetch_to_host(outputs))
    assert [float(result["s"]) for result in results] == [0, 1, 2, 3, 4]


def test_more_than_pinned_memory_takes_is_fetched_all_the_same(monkeypatch) -> None:
    """Without pinned memory JAX's own copies give the same values."""
    monkeypatch.setattr(device_fetch, "_has_pinned", lambda device: False)
    for i, result in enumerate(fetch_to_host(make(jnp.float32(i)) for i in range(6))):
        np.testing.assert_array_equal(result[0], i + np.arange(SHAPE[1], dtype=np.float32))
