"""Batches from a `DeviceCache`, random and while it is refreshed, against the same step on batches that lie there.

    results = {}
    cache.cache_part(settings, results, log=print)
    results["10 ms step"]["methods"]["cache, refreshed at 10%"]["share"]["median"]
    results["bytes"]["in_use"], results["bytes"]["announced"]

A refresh at 10% replaces a tenth of the rows of a batch in every step, from pageable arrays. Megabytes are for each
device.
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
import synthetic
import timing
from environment import Settings

BATCH_MEGABYTES, CACHE_BATCHES = 64, 16
ROWS = 1000  # of a batch, on each device
STEPS_MS = (1.0, 10.0)
SECONDS = 60
KEY = 0

Log = Callable[[str], None]


def cache_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures bytes first, then steps of several lengths."""
    place = environment.place(settings.gpus)
    spec = _spec(settings)
    results["bytes"] = _bytes(settings, place, spec)
    log(f"bytes on a device: {results['bytes']}")
    with pinned.host_batches(spec, CACHE_BATCHES, None) as host:

        def run(step_ms: float, turns: timing.Turns) -> None:
            _steps(settings, place, step_ms, host, turns, results, log)

        timing.share_out(STEPS_MS[:1] if settings.tiny else STEPS_MS, settings.rounds, SECONDS, run)


def _bytes(settings: Settings, place, spec: pinned.Spec) -> dict:
    """What a cache announces, and what the fullest device has in use more once it is there, and after 50 inserts."""
    before = place.bytes_in_use()
    with _empty(settings, place, spec) as cache:
        found = {"announced": cache.nbytes, "in_use": _more(place, before)}
        rows = {name: np.ones(shape, dtype) for name, (shape, dtype) in _tenth(spec, settings).items()}
        for _ in range(3 if settings.tiny else 50):
            cache.insert(rows)
        jax.block_until_ready(cache.take(_all_devices(cache, settings)))
        found["in_use_after_inserts"] = _more(place, before)
        found["peak"] = _more(place, before, "peak_bytes_in_use")
    return found


def _steps(settings: Settings, place, step_ms: float, host, turns: timing.Turns, results: dict, log: Log) -> None:
    batch = jax.device_put(host.batches[0], place.sharding)
    step, seconds = synthetic.calibrated(synthetic.busy_step, step_ms / 1e3, batch, place)
    loop = timing.Loop(lambda: synthetic.make_state(place), step)
    about = {"step_ms": 1e3 * seconds, "batch_bytes": host.nbytes // settings.gpus}
    measure = timing.in_loop(loop, {"pageable": host}, place, settings.budget(0.6))
    contest = timing.Contest(measure, about)
    methods = [
        peers.resident(),
        _method("cache, uniform", settings),
        _method("cache, epochs", settings, replace=False),
        _method("cache, refreshed at 10%", settings, refresh=True),
        _method("cache, refreshed at 10%, not deterministic", settings, refresh=True, deterministic=False),
        peers.resident(),
        _indexed(),
    ]
    contest.run(f"{step_ms:g} ms step", methods, turns, results, log)


def _method(
    name: str, settings: Settings, *, replace: bool = True, refresh: bool = False, deterministic: bool = True
) -> peers.Method:
    @contextlib.contextmanager
    def opener(host, place):
        spec = {key: (leaf.shape, leaf.dtype.type) for key, leaf in host.batches[0].items()}
        with _empty(settings, place, spec) as cache:
            for batch in host.batches:
                cache.insert(batch)
            if refresh:
                cache.refresh(_tenths(host, settings), deterministic=deterministic)
            yield cache.batches(_rows(settings), jax.random.key(KEY), replace=replace)

    return peers.Method(name, opener=opener, is_ours=True)


def _indexed() -> peers.Method:
    """Rows drawn from one resident array by `jnp.take` under `jit`, without a mesh's help: what a few lines do."""

    @contextlib.contextmanager
    def opener(host, place):
        name = next(iter(host.batches[0]))
        whole = jax.device_put(np.concatenate([batch[name] for batch in host.batches[:4]]), place.sharding)
        rows = len(host.batches[0][name])

        @jax.jit
        def draw(whole, key):
            key, own = jax.random.split(key)
            chosen = jax.random.randint(own, (rows,), 0, len(whole))
            return jax.lax.with_sharding_constraint(whole[chosen], place.sharding), key

        def batches() -> Iterator:
            key = jax.device_put(jax.random.key(KEY), place.replicated)
            while True:
                drawn, key = draw(whole, key)
                yield {name: drawn}

        yield batches()

    return peers.Method("jnp indexing under jit", opener=opener)


def _empty(settings: Settings, place, spec: pinned.Spec):
    import jaxprefetch

    example = {name: jax.ShapeDtypeStruct(shape[1:], dtype) for name, (shape, dtype) in spec.items()}
    return jaxprefetch.DeviceCache(CACHE_BATCHES * _rows(settings), example, sharding=place.sharding)


def _tenths(host, settings: Settings) -> Iterator[pinned.Batch]:
    """A tenth of a batch, again and again."""
    n = _rows_per_device(settings) // 10 * settings.gpus
    for batch in itertools.cycle(host.batches):
        yield {name: leaf[:n] for name, leaf in batch.items()}


def _all_devices(cache, settings: Settings) -> np.ndarray:
    return np.arange(settings.gpus) * (cache.capacity // settings.gpus)


def _more(place, before: int | None, key: str = "bytes_in_use") -> int | None:
    now = place.bytes_in_use(key)
    return None if now is None or before is None else now - before


def _rows_per_device(settings: Settings) -> int:
    return settings.per_device(ROWS, 20)


def _rows(settings: Settings) -> int:
    return _rows_per_device(settings) * settings.gpus


def _spec(settings: Settings) -> pinned.Spec:
    values = settings.per_device(BATCH_MEGABYTES * 250_000 // ROWS, 50)
    return {"x0": ((_rows(settings), values), np.float32)}


def _tenth(spec: pinned.Spec, settings: Settings) -> pinned.Spec:
    n = _rows_per_device(settings) // 10 * settings.gpus
    return {name: ((n, *shape[1:]), dtype) for name, (shape, dtype) in spec.items()}
