"""`evaluate`: means over a whole data set, in one compiled shape.

Synopsis:

    @jax.jit
    def eval_step(state, batch):                       # one value a row, `(rows,)`
        return {"loss": cross_entropy(state, batch)}

    evaluate(eval_step, state, test_set, sharding=sharding)      # {"loss": 0.31}
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxprefetch.arguments import check_function, refuse_options
from jaxprefetch.device.placement import warn_of_one_device
from jaxprefetch.errors import source_with_options
from jaxprefetch.host.source import MakesReaders, WritesBatches
from jaxprefetch.late import LateMetrics
from jaxprefetch.prefetch import prefetch_to_device
from jaxprefetch.prefetcher import DevicePrefetcher

S = TypeVar("S")


def evaluate(
    step: Callable[[S, Any], Any],
    state: S,
    source: Iterable[Any] | WritesBatches | MakesReaders,
    *,
    size: int | None = None,
    sharding: Any = None,
    max_bytes: int | str | None = None,
    mask_key: Hashable = "mask",
) -> dict[str, Any]:
    """The means of what `step` returns over all rows of `source`; the last batch may be shorter than the others.

    The last batch is padded to the shape of the others, so that `step` is compiled once. Sums are kept on the devices.
    Of several processes each yields its own rows, and those that have fewer batches go on with padding.

    Args:
        step: `step(state, batch) -> metrics`, a pytree. A leaf `(rows, ...)` has a value for each row: rows that are
            padding are left out. A scalar must be a mean over the real rows, `values.mean(where=batch["mask"])`, and
            counts as many times as there are such rows.
        state: passed to `step`.
        source: any iterable of batches, or a `DevicePrefetcher` made with `last_batch="pad"`, which is quicker when
            there are many evaluations: each begins a new pass of it.
        size, sharding, max_bytes: as for `prefetch_to_device`; not for a `DevicePrefetcher`, which has its own.
        mask_key: where the mask `(rows,)` is in batches that are dicts; others become `(batch, mask)`.

    Returns:
        Means as Python floats by name (`"loss"`, `"accuracy/top5"`; `"loss"` if the metrics are one bare value).

    Raises:
        TypeError: options are given for a `DevicePrefetcher`; `step` returns None.
        ValueError: the batches have no mask; a metric has neither rows nor is it a scalar; there are no rows; the
            `DevicePrefetcher` is in the middle of a pass.
        Exception: what the source or `step` raises.

    Blocking: until the last batch is evaluated.
    """
    check_function("step", step, "a function (state, batch) -> metrics")
    if isinstance(source, DevicePrefetcher):
        refuse_options(size=size, sharding=sharding, max_bytes=max_bytes)
        if source.in_pass:
            raise ValueError("evaluate: batches of this pass have been taken. Go on to its end, or make a prefetcher.")
        totals = _totals(step, state, source, mask_key)
    else:
        batches = prefetch_to_device(
            source,
            2 if size is None else size,
            sharding=sharding,
            max_bytes=max_bytes,
            last_batch="pad",
            mask_key=mask_key,
            uneven="pad",
        )
        with batches, source_with_options("evaluate", " and last_batch='pad'"):
            totals = _totals(step, state, batches, mask_key)
    if totals is None or not (rows := jax.device_get(totals[1]).item()):
        raise ValueError("evaluate: the source has no rows. One-shot sources serve one evaluation; pass an iterable.")
    sums = LateMetrics().read(0, totals[0])
    return {name: value / rows for name, value in sums.items()}


def _totals(step: Callable[[Any, Any], Any], state: Any, batches: Iterable[Any], mask_key: Hashable) -> Any:
    """Sums of the metrics over all rows, and the number of rows; None without a batch."""
    totals = None
    for batch in batches:
        mask = _mask(batch, mask_key)
        if totals is None:
            warn_of_one_device(state, batch)
        if (metrics := step(state, batch)) is None:
            raise TypeError(
                "evaluate: step returned None, expected metrics. Let it return those, or {} if it has none."
            )
        totals = _add(totals, metrics, mask)
    return totals


def _mask(batch: Any, key: Hashable) -> jax.Array:
    if isinstance(batch, Mapping):
        mask = batch.get(key)
    else:
        mask = batch[1] if type(batch) is tuple and len(batch) == 2 else None
    if isinstance(mask, jax.Array) and mask.dtype == jnp.bool_ and mask.ndim == 1:
        return mask
    raise ValueError(
        f"evaluate: the batches have no mask of their rows at {key!r}. Make the DevicePrefetcher with last_batch='pad' "
        "and tell evaluate its mask_key."
    )


@jax.jit
def _add(totals: Any, metrics: Any, mask: jax.Array) -> Any:
    accuracy = jnp.result_type(float)
    rows = mask.sum(dtype=accuracy)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(metrics)
    sums = jax.tree_util.tree_unflatten(treedef, [_sum(path, leaf, mask, rows) for path, leaf in leaves])
    return (sums, rows) if totals is None else jax.tree.map(jnp.add, totals, (sums, rows))


def _sum(path: Any, metric: Any, mask: jax.Array, rows: jax.Array) -> jax.Array:
    values = jnp.asarray(metric, rows.dtype)
    zero = jnp.zeros((), rows.dtype)
    if values.ndim == 0:
        return jnp.where(rows > 0, values * rows, zero)  # the mean over no rows is no number
    if values.shape[0] != mask.shape[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "loss"
        raise ValueError(
            f"evaluate: metric {name} has shape {values.shape} in a batch of {mask.shape[0]} rows. Return one value "
            "for each row, or the mean over the rows that the mask marks."
        )
    return jnp.where(mask.reshape(-1, *(1,) * (values.ndim - 1)), values, zero).sum(axis=0)
