"""What is known of other packages' loaders that public methods do not tell; recognised without being imported.

Synopsis:

    if (why := shuffles_anew(loader)) is not None: ...     # the order of its batches does not repeat
    if (why := forgets(loader)) is not None: ...           # its own state leaves out examples
    if is_streamed(loader): ...
    if (batches := exact_length(loader)) is not None: ...  # what len() tells of a pass is true
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from jaxprefetch.host.foreign import is_of


def shuffles_anew(source: Any) -> str | None:
    """Why this source's order cannot repeat, with the cure; None where nothing speaks against it."""
    kind, what = type(source), f"this {type(source).__name__}"
    if is_of(kind, "torch.utils.data", "DataLoader") and any(map(_draws_globally, _samplers(source))):
        return (
            f"{what} shuffles with the global random state, so its order does not repeat. Give it a generator of its "
            "own (generator=torch.Generator().manual_seed(0))."
        )
    if is_of(kind, "tensorflow", "DatasetV2") and any(map(_draws_its_seed, _inputs(source))):
        return f"{what} shuffles without a seed, so its order does not repeat. Pass shuffle(..., seed=0)."
    if is_of(kind, "ray.data", "_IterableFromIterator") and not _ray_keeps_order():
        return (
            "Ray Data yields blocks as they get ready, so its order does not repeat. Set "
            "ray.data.DataContext.get_current().execution_options.preserve_order = True before making the data set."
        )
    return None


def forgets(source: Any) -> str | None:
    """Why this source's own state does not bring it back exactly; None where nothing speaks against it."""
    streamed = next(filter(is_streamed, (source, getattr(source, "dataset", None))), None)
    if any(type(examples).__name__ == "BufferShuffledExamplesIterable" for examples in _streams(streamed)):
        return "its state leaves out what is in the buffer that it shuffles in."
    return None


def is_streamed(source: Any) -> bool:
    """Whether it is a streaming data set of Hugging Face, which begins every pass where its state was set."""
    return is_of(type(source), "datasets", "IterableDataset")


def exact_length(source: Any) -> int | None:
    """How many batches a pass has, where `len()` tells: of sequences, and of PyTorch's loaders over such."""
    sequence = getattr(source, "dataset", source)  # what a loader splits; its own length counts batches
    if any(kind.__name__ == "IterableDataset" for kind in type(sequence).__mro__):
        return None  # its length is a guess, and each worker may go through all of it
    if not (hasattr(sequence, "__getitem__") and hasattr(sequence, "__len__") and hasattr(source, "__len__")):
        return None
    try:
        return len(source)
    except TypeError:
        return None


def pins_batches(source: Any) -> bool:
    """Whether it is a PyTorch loader that makes its batches, and copies each to pinned memory of its own."""
    is_loader = is_of(type(source), "torch.utils.data", "DataLoader")
    return is_loader and source.batch_sampler is not None and bool(source.pin_memory)


def worker_shutdown(iterator: Any) -> Callable[[], None] | None:
    """What ends the worker processes of PyTorch's iterator now: the traceback of an error would keep them alive.

    Persistent workers are the loader's, and stay. `_shutdown_workers` is looked for (seen in torch 2.13); without
    it they end when nothing refers to the iterator any more.
    """
    if not is_of(type(iterator), "torch.utils.data", "_MultiProcessingDataLoaderIter"):
        return None
    return None if getattr(iterator, "_persistent_workers", True) else getattr(iterator, "_shutdown_workers", None)


def _samplers(sampler: Any) -> Iterator[Any]:
    """PyTorch's samplers below a loader or a sampler: those of batches have one of indices."""
    for other in (getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)):
        if other is not None:
            yield other
            yield from _samplers(other)


def _draws_globally(sampler: Any) -> bool:
    return "Random" in type(sampler).__name__ and getattr(sampler, "generator", 0) is None


def _streams(stream: Any) -> Iterator[Any]:
    """What a stream of Hugging Face is made of."""
    below = [getattr(stream, name, None) for name in ("_ex_iterable", "ex_iterable")]
    for examples in (*below, *(getattr(stream, "ex_iterables", None) or ())):
        if examples is not None:
            yield examples
            yield from _streams(examples)


def _draws_its_seed(dataset: Any) -> bool:
    if not is_of(type(dataset), "tensorflow", "_ShuffleDataset"):
        return False
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    return all(seed is not None and int(seed) == 0 for seed in seeds)


def _inputs(dataset: Any) -> Iterator[Any]:
    """A TensorFlow data set and all that it is made from."""
    yield dataset
    for other in dataset._inputs() if hasattr(dataset, "_inputs") else ():
        yield from _inputs(other)


def _ray_keeps_order() -> bool:
    return bool(sys.modules["ray"].data.DataContext.get_current().execution_options.preserve_order)
