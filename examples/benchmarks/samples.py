"""From samples to a batch: how fast 1,024 images become one array.

    results = {}
    samples.samples_part(settings, results, log=print)
    results["1024 x 155 KB"]["methods"]["np.stack, warm out"]["gib_s"]["median"]

NumPy's ways are timed on the host alone. Ours stacks in its slots while the batch before is on its way, so it is timed
to the device, and beside it what a loop of `np.stack` and `device_put` reaches.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import environment
import jax
import numpy as np
import peers
import pinned
import timing
from budget import Budget
from environment import Settings

SECONDS = 40


def methods(images: list[np.ndarray], size: int) -> list[peers.Method]:
    """The methods of a round: `images` are the samples of all batches, `size` of them make one."""
    return [
        _on_host("np.stack, fresh", images, size, lambda batch: np.stack(batch)),
        _on_host("np.stack, warm out", images, size, _into(np.empty((size, *images[0].shape), images[0].dtype))),
        _ours(images, size),
        _stacked_and_put(images, size),
    ]


def samples_part(settings: Settings, results: dict, log: Callable[[str], None]) -> None:
    """Measures all ways on the same samples, each an array of its own."""
    place = environment.place(settings.gpus)
    size, pixels = (64, 16) if settings.tiny else (1024, 227)
    with pinned.host_batches({"image": ((size, pixels, pixels, 3), np.uint8)}, 4, None) as host:
        images = [image.copy() for batch in host.batches for image in batch["image"]]
        nbytes = host.nbytes
    budget = settings.budget(0.4)
    about = {"batch_bytes": nbytes // settings.gpus}
    contest = timing.Contest(lambda method, pace_ms: _measure(method, place, budget, pace_ms), about, nbytes=nbytes)
    name = f"{size} x {images[0].nbytes / 1000:.0f} KB"
    contest.run(name, methods(images, size), timing.Turns(settings.rounds, SECONDS), results, log)


def _measure(method: peers.Method, place, budget: Budget, pace_ms: float | None) -> dict:
    with method.open({"pageable": None}, place) as opened:
        return timing.without_step(iter(opened), budget, pace_ms)


def _on_host(name: str, images: list[np.ndarray], size: int, stack: Callable) -> peers.Method:
    @contextlib.contextmanager
    def opener(host, place):
        yield map(stack, _groups(images, size))

    return peers.Method(name, opener=opener)


def _into(out: np.ndarray) -> Callable:
    out.fill(0)  # the first touch of its pages is not to be timed
    return lambda batch: np.stack(batch, out=out)


def _stacked_and_put(images: list[np.ndarray], size: int) -> peers.Method:
    @contextlib.contextmanager
    def opener(host, place):
        yield (jax.device_put(np.stack(batch), place.sharding) for batch in _groups(images, size))

    return peers.Method("np.stack and device_put, to the device", opener=opener)


def _ours(images: list[np.ndarray], size: int) -> peers.Method:
    def opener(host, place):
        import jaxprefetch

        source = peers.batched()(itertools.cycle(images), size)
        return jaxprefetch.prefetch_to_device(source, 2, sharding=place.sharding)

    return peers.Method("jaxprefetch batched, to the device", opener=opener, is_ours=True)


def _groups(images: list[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    return itertools.cycle([images[start : start + size] for start in range(0, len(images), size)])
