"""What fails between the put and the hand-out is told at its place, and nothing else is lost for it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from gated import batch, number

from jaxprefetch import prefetch_to_device
from jaxprefetch.device import feed
from jaxprefetch.device.fences import Fences


def test_a_failed_landing_is_told_after_what_is_on_its_way(monkeypatch):
    """A copy that fails is an error with the batch's number, raised again each time; the next batch comes first."""
    wait, error, calls = feed.wait_landed, RuntimeError("the copy failed"), []

    def failing(arrays):
        calls.append(arrays)
        if len(calls) == 2:
            raise error
        return wait(arrays)

    monkeypatch.setattr(feed, "wait_landed", failing)
    with prefetch_to_device([batch(i) for i in range(9)], host_size=0) as batches:
        delivered = [number(next(batches)) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the copy failed"):
                delivered.append(number(next(batches)))
                delivered.append(number(next(batches)))
    assert delivered == sorted(set(delivered))
    assert error.__notes__ == ["jaxprefetch: raised while batch 1 was on its way to its devices"]


def test_a_node_that_cannot_be_rebuilt_costs_no_batch():
    """What a registered node raises when a batch is put together comes from next(); asked again it is tried again."""
    failures = [ValueError("not now")]

    class Pair:
        def __init__(self, x):
            self.x = x

    def rebuild(_, children):
        if failures and isinstance(children[0], jax.Array):
            raise failures.pop()
        return Pair(children[0])

    jax.tree_util.register_pytree_node(Pair, lambda pair: ((pair.x,), None), rebuild)
    with prefetch_to_device([Pair(np.full(3, i)) for i in range(4)], host_size=0) as batches:
        with pytest.raises(ValueError, match="not now"):
            next(batches)
        assert [int(pair.x[0]) for pair in batches] == [0, 1, 2, 3]


def test_later_batches_on_other_devices_prove_nothing():
    """Deleted batches on one device are not proved to have landed by those on another; all arrive as they were."""
    devices = jax.devices()
    source = [{"a": np.full(4, i), "b": None} if i % 2 else {"a": None, "b": np.full(4, i)} for i in range(12)]
    seen = []
    with prefetch_to_device(source, sharding={"a": devices[0], "b": devices[1]}, delete_used=True) as batches:
        for out in batches:
            (leaf,) = jax.tree_util.tree_leaves(out)
            seen.append(int(leaf[0]))
            leaf.delete()
    assert seen == list(range(12))


@pytest.mark.parametrize("what", ["fence", "marker"])
def test_what_a_wait_for_the_devices_raises_ends_the_pass(what, monkeypatch):
    """A device that fails while room is waited for is an error with the batch, kept, after the batches before it."""
    error = RuntimeError("the device is gone")

    def failing(*_):
        raise error

    monkeypatch.setattr(Fences, "wait", failing) if what == "fence" else monkeypatch.setattr(
        feed, "put_marker", failing
    )
    delivered = []
    with prefetch_to_device([batch(i) for i in range(9)], size=1, delete_used=True) as batches:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is gone"):
                for out in batches:
                    delivered.append(number(out))
                    out["x"].delete()
    assert delivered == list(range(len(delivered)))
    assert "jaxprefetch: raised while the devices were busy with batch" in error.__notes__[0]
