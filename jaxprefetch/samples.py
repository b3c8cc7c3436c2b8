"""`batched`: single samples become batches, stacked where they are sent from.

Synopsis:

    with prefetch_to_device(batched(dataset, batch_size=256), sharding=sharding) as batches:
        for batch in batches:
            state, metrics = train_step(state, batch)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxprefetch.arguments import check_switch, integer
from jaxprefetch.errors import typed
from jaxprefetch.host.batches import Batches
from jaxprefetch.host.source import writes_batches


class Batched:
    """What `batched` makes of samples that can be gone through again: each pass goes through all of them."""

    def __init__(self, samples: Iterable[Any], batch_size: int, drop_last: bool):
        self._samples, self._batch_size, self._drop_last = samples, batch_size, drop_last

    def __iter__(self) -> Batches:
        return Batches(iter(self._samples), self._batch_size, self._drop_last)


def batched(samples: Iterable[Any], batch_size: int, *, drop_last: bool = False) -> Batched | Batches:
    """Batches of `batch_size` samples, stacked along a new first axis.

    Iterated, it yields NumPy arrays of its own. Given to `prefetch_to_device`, it stacks samples straight into the
    memory that they are sent from, large ones by several threads.

    Args:
        samples: an iterable of samples: pytrees of arrays and numbers, such as `{"image": (height, width, 3),
            "label": 7}`. Those of one batch have the same structure, shapes and dtypes; the next batch may have others.
            A sample must not change before its batch is complete: a source that refills one buffer yields copies.
            `jax.Array`s are fetched, one transfer each.
        batch_size: samples a batch; in a multi-process run, of this process.
        drop_last: leaves out a last batch with fewer samples. Else it is short, which is the matter of `last_batch` in
            `prefetch_to_device`; there, too, `"pad"` fills it up.

    Returns:
        An iterable, or an iterator if `samples` is one. Closing the prefetcher closes the iterator of `samples`.

    Raises:
        TypeError, ValueError: an argument is not what it should be. Samples that cannot be stacked, or have no
            leaf, are an error in the place of their batch, which names the sample and the leaf.

    Blocking: never; `samples` is asked for nothing before the first batch is.
    """
    batch_size = integer("batch_size", batch_size, 1)
    check_switch("drop_last", drop_last)
    if isinstance(samples, (Mapping, str, bytes, type)) or not (
        hasattr(samples, "__iter__") or hasattr(samples, "__getitem__")
    ):
        raise TypeError(f"samples: expected an iterable of samples, got {typed(samples)}.{_cure(samples)}")
    made = Batched(samples, batch_size, bool(drop_last))
    return iter(made) if isinstance(samples, Iterator) else made


def _cure(samples: Any) -> str:
    if isinstance(samples, Mapping):
        return (
            " Zip columns to samples, such as ({'image': i, 'label': l} for i, l in zip(images, labels)), or yield "
            "slices of them, which are batches, to prefetch_to_device."
        )
    if writes_batches(samples) and not isinstance(samples, type):
        return " It writes whole batches (read_into): pass it to prefetch_to_device as it is."
    return " Call it, and pass what it returns." if callable(samples) else ""
