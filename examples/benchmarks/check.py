"""Right values: whatever the consumer does with its batches, each holds what the source gave.

results = {}
check.check_part(settings, results, log=print)
results["donates each, pinned, size 2"]     # "OK"
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator

import environment
import jax
import numpy as np
import pinned
from environment import Settings
from pinned import Batch

COUNT = 24
Copies = list[Batch]


def spec(settings: Settings) -> pinned.Spec:
    """A large and a small leaf, and one that does not fill its slot."""
    rows = 8 * settings.gpus
    values = settings.per_device(1 << 20, 1 << 10)
    return {
        "x": ((rows, values // 8), np.float32),
        "image": ((rows, 3, 17), np.uint8),
        "label": ((rows,), np.int32),
    }


def reuses_buffer(copies: Copies) -> Iterator[Batch]:
    """A source that gives out the same arrays every time and overwrites them for the next batch."""
    buffers = {name: np.empty_like(leaf) for name, leaf in copies[0].items()}
    for batch in copies:
        for name, leaf in batch.items():
            np.copyto(buffers[name], leaf)
        yield dict(buffers)
    for buffer in buffers.values():
        buffer.fill(77)


def deletes_each(batches: Iterator[Batch], copies: Copies, twice: Callable) -> None:
    """Dispatches a step, then deletes the batch while the step may still run."""
    results = []
    for batch in batches:
        results.append(twice(batch))
        jax.tree.map(lambda leaf: leaf.delete(), batch)
    _compare(results, copies, range(len(copies)), scale=2)


def donates_each(batches: Iterator[Batch], copies: Copies, twice: Callable) -> None:
    """Donates the batch to a step whose result takes its memory."""
    donate = jax.jit(_twice, donate_argnums=0)
    results = [donate(batch) for batch in batches]
    _compare(results, copies, range(len(copies)), scale=2)


def skips_most(batches: Iterator[Batch], copies: Copies, twice: Callable) -> None:
    """Drops two batches of three without a step."""
    results = [twice(batch) for k, batch in enumerate(batches) if k % 3 == 0]
    _compare(results, copies, range(0, len(copies), 3), scale=2)


def keeps_all(batches: Iterator[Batch], copies: Copies, twice: Callable) -> None:
    """Keeps every batch and looks at them after the end."""
    _compare(list(batches), copies, range(len(copies)), scale=1)


def steps_on_each(batches: Iterator[Batch], copies: Copies, twice: Callable) -> None:
    """Does a step on each and no more: the only one for `delete_used`, which ends a batch at the next."""
    _compare([twice(batch) for batch in batches], copies, range(len(copies)), scale=2)


CONSUMERS = (steps_on_each, deletes_each, donates_each, skips_most, keeps_all)


def check_part(settings: Settings, results: dict, log: Callable[[str], None]) -> None:
    """Runs every consumer on every source, sizes 1 to 3, with and without `delete_used`."""
    place = environment.place(settings.gpus)
    twice = jax.jit(_twice)
    wrong = []
    with pinned.both(spec(settings), COUNT, place.client) as host:
        for consumer, memory, size, delete_used in itertools.product(
            CONSUMERS, ("pinned", "reused"), (1, 2, 3), (False, True)
        ):
            if delete_used and consumer is keeps_all:
                continue  # it would keep what it asked to have deleted
            name = f"{consumer.__name__}, {memory}, size {size}" + ", delete_used" * delete_used
            try:
                _run(consumer, (memory, size, delete_used), host["pageable"].batches, host["pinned"], place, twice)
                results[name] = "OK"
            except Exception as error:
                traceback.print_exc()
                results[name] = "".join(traceback.format_exception_only(error)).strip()
                wrong.append(f"{name}: {results[name]}")
    log(f"{len(results) - len(wrong)} of {len(results)} consumers saw the right values" + (": OK" if not wrong else ""))
    if wrong:
        raise RuntimeError("; ".join(wrong))


def _run(consumer, how: tuple[str, int, bool], copies: Copies, host: pinned.HostBatches, place, twice) -> None:
    import jaxprefetch

    memory, size, delete_used = how
    source = iter(host.batches) if memory == "pinned" else reuses_buffer(copies)
    options = {"sharding": place.sharding, "delete_used": delete_used, "fresh_buffers": memory == "pinned" or None}
    with jaxprefetch.prefetch_to_device(source, size, **options) as batches:
        consumer(iter(batches), copies, twice)


def _twice(batch: Batch) -> Batch:
    return jax.tree.map(lambda leaf: leaf + leaf, batch)


def _compare(found: list[Batch], copies: Copies, numbers: range, scale: int) -> None:
    if len(found) != len(numbers):
        raise ValueError(f"The consumer has {len(found)} batches, the source gave {len(numbers)}.")
    for batch, number in zip(found, numbers, strict=True):
        for name, leaf in copies[number].items():
            want = leaf if scale == 1 else leaf + leaf
            got = np.asarray(batch[name])
            if not np.array_equal(got, want):
                share = np.mean(got != want)
                raise ValueError(f"Batch {number}, leaf {name}: {share:.1%} of the values differ from the source's.")
