"""Both ways across the border into the runtime deliver the same."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device
from jaxprefetch.device import transfer
from jaxprefetch.device.context import Context


def test_the_batched_put_is_there() -> None:
    """Every JAX that we test has the private call; where one has not, this says so before a benchmark does."""
    assert transfer._batched_put is not None


@pytest.mark.parametrize("spec", [None, PartitionSpec("a"), PartitionSpec("a", "b"), PartitionSpec(None, "b")])
@pytest.mark.parametrize("batched", [True, False])
def test_the_public_way_delivers_the_same(spec: PartitionSpec | None, batched: bool, monkeypatch) -> None:
    """With and without the batched put all batches have the values, sharding, commitment and dtype of the first."""
    if not batched:
        monkeypatch.setattr(transfer, "_batched_put", None)
    mesh = Mesh(np.array(jax.devices())[[3, 1, 7, 0, 2, 6, 5, 4]].reshape(2, 4), ("a", "b"))
    sharding = None if spec is None else NamedSharding(mesh, spec)
    base = np.arange(256, dtype=np.float32).reshape(16, 16)
    source = [base, np.asfortranarray(base), base[::-1, ::-1], base.astype(">f4"), np.broadcast_to(base[0], (16, 16))]
    with prefetch_to_device(source, sharding=sharding) as batches:
        first = None
        for batch, raw in zip(batches, source, strict=True):
            np.testing.assert_array_equal(np.asarray(batch), raw)
            first = first or (batch.sharding, batch.committed, batch.dtype, batch.weak_type)
            assert first == (batch.sharding, batch.committed, batch.dtype, batch.weak_type)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("batched", [True, False])
def test_numbers_of_python_stay_weak_in_every_batch(batched: bool, split: bool, monkeypatch) -> None:
    """All batches have the value, dtype and weak type that jax.device_put gives; what is too large becomes infinite."""
    if not batched:
        monkeypatch.setattr(transfer, "_batched_put", None)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec()) if split else None
    source = [(i, i + 0.5, bool(i % 2), 1j * i, 1e300 * i) for i in range(5)]
    with prefetch_to_device(source, sharding=sharding) as batches:
        for batch, numbers in zip(batches, source, strict=True):
            for out, number in zip(batch, numbers, strict=True):
                with np.errstate(all="ignore"):
                    wanted = jax.device_put(number, sharding)
                assert out.aval == wanted.aval
                assert (out.committed, out.sharding) == (wanted.committed, wanted.sharding)
                assert np.asarray(out) == np.asarray(wanted)


def test_a_batched_put_that_wants_other_arguments_is_done_without(monkeypatch) -> None:
    """Where another JAX has changed its private call all batches go the public way, and none is lost."""

    def changed(*, something_else):
        raise AssertionError

    monkeypatch.setattr(transfer, "_batched_put", (changed, *(transfer._batched_put or (None, None))[1:]))
    with prefetch_to_device([np.full(4, i) for i in range(5)]) as batches:
        assert [int(batch[0]) for batch in batches] == list(range(5))


def test_only_the_first_batch_needs_what_is_in_force(monkeypatch) -> None:
    """The settings of the call are entered where a put asks for one of them: not once the templates say it all."""
    entered: list[Context] = []
    real = Context.entered

    def noted(context: Context) -> Any:
        entered.append(context)
        return real(context)

    monkeypatch.setattr(Context, "entered", noted)
    source = [{"x": np.full(4, i, np.float32), "seed": i} for i in range(5)]
    with prefetch_to_device(source, 1, host_size=0) as batches:
        assert [int(batch["seed"]) for batch in batches] == list(range(5))
    assert len(entered) == 1
    assert transfer_of(batches)._fast


def test_what_guards_explicit_transfers_is_as_before() -> None:
    """Our own are explicit, and those of the loop are what they were: refused where it says so."""
    with prefetch_to_device([np.full(4, i) for i in range(3)]) as batches:
        for _ in batches:
            with jax.transfer_guard_host_to_device("disallow"), pytest.raises(Exception, match="Disallowed"):
                jax.jit(lambda x: x + 1)(np.ones(4))


def transfer_of(batches: Any) -> transfer.Transfer:
    """Of the plan of the first batch."""
    return batches._stager._shapes.first.transfer
