"""`evaluate`: right means, a padded last batch, one compiled shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device
from jaxprefetch.evaluation import evaluate

ROWS = np.arange(1, 22, dtype=np.float32)  # 21 rows: batches of 8, 8 and 5


def batches(values=ROWS, size=8):
    return [{"x": values[i : i + size]} for i in range(0, len(values), size)]


def over_devices():
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


@pytest.mark.parametrize("sharding", [lambda: None, over_devices], ids=["one", "split"])
def test_values_of_rows_are_averaged_over_real_rows(sharding):
    """Padding counts in no mean, whatever its values are, and the step is compiled once."""

    @jax.jit
    def step(state, batch):
        return {"x": batch["x"] * state, "inverse": 1 / batch["x"], "nested": {"even": batch["x"] % 2 == 0}}

    means = evaluate(step, jnp.float32(2), batches(), sharding=sharding())
    assert means["x"] == pytest.approx(2 * ROWS.mean())
    assert means["inverse"] == pytest.approx((1 / ROWS).mean())  # infinite in padded rows
    assert means["nested/even"] == pytest.approx((ROWS % 2 == 0).mean())
    assert step._cache_size() == 1


def test_batches_on_one_device_of_the_states_are_said(caplog):
    """A forgotten sharding works, but all devices do the same: once an evaluation, and not where one is given."""
    state = jax.device_put(np.float32(2), NamedSharding(over_devices().mesh, PartitionSpec()))
    step = jax.jit(lambda state, batch: batch["x"] * state)
    for sharding, times in ((None, 1), (over_devices(), 0)):
        caplog.clear()
        assert evaluate(step, state, batches(), sharding=sharding)["loss"] == pytest.approx(2 * ROWS.mean())
        assert caplog.text.count("the state is on 8 devices and the batches are on one") == times


def test_scalars_count_as_often_as_there_are_rows():
    """A mean over a batch's real rows is weighted by their number."""

    @jax.jit
    def step(state, batch):
        return batch["x"].mean(where=batch["mask"])

    assert evaluate(step, None, batches()) == {"loss": pytest.approx(ROWS.mean())}


def test_metrics_with_more_axes_are_averaged_over_rows():
    """A value for each row may be an array; so is its mean."""

    def step(state, batch):
        return {"both": jnp.stack([batch["x"], -batch["x"]], axis=1)}

    np.testing.assert_allclose(evaluate(step, None, batches())["both"], [ROWS.mean(), -ROWS.mean()], rtol=1e-6)


def test_batches_that_are_no_dicts_become_pairs():
    """A batch that is no dict arrives as `(batch, mask)`."""

    def step(state, batch):
        (x,), mask = batch
        return jnp.where(mask, x, jnp.nan)

    assert evaluate(step, None, [(b["x"],) for b in batches()]) == {"loss": pytest.approx(ROWS.mean())}


def test_own_prefetcher_serves_many_evaluations():
    """A prefetcher made with `last_batch="pad"` is gone through once an evaluation, with its own key of the mask."""
    with prefetch_to_device(batches(), last_batch="pad", mask_key="real") as source:
        for _ in range(3):
            means = evaluate(lambda state, batch: batch["x"], None, source, mask_key="real")
            assert means == {"loss": pytest.approx(ROWS.mean())}


def test_own_prefetcher_in_the_middle_of_a_pass_is_refused():
    """The rest of a pass would give the means of some rows only."""
    with prefetch_to_device(batches(), last_batch="pad") as source:
        next(source)
        with pytest.raises(ValueError, match="batches of this pass have been taken"):
            evaluate(lambda state, batch: batch["x"], None, source)
        assert len(list(source)) == 2
        assert evaluate(lambda state, batch: batch["x"], None, source) == {"loss": pytest.approx(ROWS.mean())}


def test_own_prefetcher_without_a_mask_is_refused():
    """Without a mask nobody knows which rows are real."""
    with (
        prefetch_to_device(batches()) as source,
        pytest.raises(ValueError, match=r"no mask of their rows at 'mask'. Make the .* with last_batch='pad'"),
    ):
        evaluate(lambda state, batch: batch["x"], None, source)


def test_metric_of_another_shape_is_refused():
    """A metric that is neither a scalar nor has the rows is an error with its name and shape."""
    with pytest.raises(ValueError, match=r"metric confusion has shape \(3, 3\) in a batch of 8 rows"):
        evaluate(lambda state, batch: {"confusion": jnp.zeros((3, 3))}, None, batches())


@pytest.mark.parametrize("size", [0, False])
def test_size_is_no_less_than_elsewhere(size):
    """A `size` of zero is an error here too."""
    with pytest.raises(ValueError, match=f"size: expected an integer of at least 1, got {size}"):
        evaluate(lambda state, batch: batch["x"], None, batches(), size=size)


@pytest.mark.parametrize("source", [[], iter([])])
def test_no_rows_are_an_error(source):
    """There is no mean of nothing."""
    with pytest.raises(ValueError, match="the source has no rows"):
        evaluate(lambda state, batch: batch["x"], None, source)


def test_step_that_returns_nothing_is_an_error():
    """A step without its `return` is told; one without metrics returns an empty dict."""
    with pytest.raises(TypeError, match=r"evaluate: step returned None, expected metrics\. Let it return .* or {} if"):
        evaluate(lambda state, batch: None, None, batches())
    assert evaluate(lambda state, batch: {}, None, batches()) == {}


def test_step_that_raises_closes_everything():
    """The step's error passes through."""

    def step(state, batch):
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError, match="no"):
        evaluate(step, None, batches())
