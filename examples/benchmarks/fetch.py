"""From the devices to the host: how fast results come when nothing else runs, and what a loop of steps pays for them.

    results = {}
    fetch.fetch_part(settings, results, log=print)
    results["stream, 64 MB"]["methods"]["jaxprefetch, size 4"]["share_of_limit"]
    results["10 ms step, 64 MB"]["methods"]["jaxprefetch, size 4"]["share"]["median"]

Every result is a new array, for JAX keeps what it has once copied to the host. The limit is the fastest of a pinned
`non_blocking` copy in PyTorch, where that is installed, and `device_put` to `pinned_host`. Megabytes are those of each
device.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator

import environment
import jax
import jax.numpy as jnp
import numpy as np
import peers
import synthetic
import timing
import torch_peer
from budget import Budget, measured
from environment import Settings

STREAM_MEGABYTES = (0.064, 1, 16, 64, 256)
STEP_MEGABYTES = (0.001, 1, 64)
STEP_MS = 10.0
SECONDS = 80
LIMITS = ("torch pinned copy", "device_put to pinned_host")
ALONE = "step alone"

Log = Callable[[str], None]
Fetch = Callable[[Iterable], Iterator]
"""From an iterator of device arrays to one of NumPy arrays."""


def fetch_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures streams of several sizes, then steps that leave a result each."""
    place = environment.place(settings.gpus)
    sizes = [("stream", n) for n in STREAM_MEGABYTES] + [("step", n) for n in STEP_MEGABYTES]
    with torch_peer.started(settings.gpus) as torch:

        def run(case: tuple[str, float], turns: timing.Turns) -> None:
            kind, megabytes = case
            (_stream if kind == "stream" else _steps)(settings, place, megabytes, torch, turns, results, log)

        timing.share_out(sizes[1::4] if settings.tiny else sizes, settings.rounds, SECONDS, run)


def _stream(settings: Settings, place, megabytes: float, torch, turns: timing.Turns, results: dict, log: Log) -> None:
    source, make = _source(settings, place, megabytes), _maker(place)

    def measure(method: peers.Method, pace_ms: float | None) -> dict:
        budget = Budget(3, 3, 1.0, warm=2) if settings.tiny else Budget(2000, 8, 0.3, warm=10)
        if method.measure:
            return method.measure(budget, pace_ms)
        with method.open({"pageable": None}, place) as fetch:
            outputs = (make(source, np.float32(i)) for i in itertools.count())
            return timing.without_step(iter(fetch(outputs)), budget, pace_ms)

    name = f"stream, {_size(megabytes)}"
    contest = timing.Contest(measure, {"bytes": source.nbytes // settings.gpus}, nbytes=source.nbytes)
    methods = [torch.copy(megabytes, back=True), _method(LIMITS[1], _pinned), *_methods()]
    try:
        contest.run(name, methods, turns, results, log)
    finally:
        if name in results:
            _add_shares(results[name])


def _steps(settings: Settings, place, megabytes: float, torch, turns: timing.Turns, results: dict, log: Log) -> None:
    source, make = _source(settings, place, megabytes), _maker(place)
    target = 1e-3 if settings.tiny else STEP_MS / 1e3
    step, seconds = synthetic.calibrated(synthetic.busy_step, target, {"x0": source}, place)

    def run(fetch: Fetch, count: int) -> float:
        state = synthetic.make_state(place)

        def outputs() -> Iterator[jax.Array]:
            nonlocal state
            for _ in range(count):
                state, loss = step(state, {"x0": source})
                yield make(source, loss[0])

        start = time.perf_counter()
        for _ in fetch(outputs()):
            pass
        jax.block_until_ready(state)
        return time.perf_counter() - start

    def measure(method: peers.Method, pace_ms: float | None) -> dict:
        with method.open({"pageable": None}, place) as fetch:
            return measured(lambda count: run(fetch, count), settings.budget(0.6), pace_ms)

    about = {"bytes": source.nbytes // settings.gpus, "step_ms": 1e3 * seconds}
    contest = timing.Contest(measure, about)
    methods = [_method(ALONE, iter), *_methods(base=ALONE), _method("jaxprefetch, into an array", _into, ours=True)]
    contest.run(f"{STEP_MS:.0f} ms step, {_size(megabytes)}", methods, turns, results, log)


def _methods(base: str = LIMITS[1]) -> list[peers.Method]:
    ours = [_method(f"jaxprefetch, size {size}", _ours(size), base, ours=True) for size in (2, 4)]
    theirs = {"np.asarray": _asarray, "jax.device_get": _device_get, "copy_to_host_async, 4 in flight": _async}
    return ours + [_method(name, fetch, base) for name, fetch in theirs.items()]


def _method(name: str, fetch: Fetch, base: str = ALONE, *, ours: bool = False) -> peers.Method:
    @contextlib.contextmanager
    def opener(host, place):
        yield fetch

    return peers.Method(name, opener=opener, is_ours=ours, base=base)


def _ours(size: int) -> Fetch:
    def fetch(outputs: Iterable) -> Iterator:
        import jaxprefetch

        return iter(jaxprefetch.fetch_to_host(outputs, size))

    return fetch


def _into(outputs: Iterable) -> Iterator:
    """Ours, each result copied on into memory of the loop's, as into a memory map."""
    out = None
    for result in _ours(4)(outputs):
        out = np.zeros_like(result) if out is None else out
        np.copyto(out, result)
        yield out


def _asarray(outputs: Iterable) -> Iterator:
    return map(np.asarray, outputs)


def _device_get(outputs: Iterable) -> Iterator:
    return map(jax.device_get, outputs)


def _async(outputs: Iterable) -> Iterator:
    def started(output: jax.Array) -> jax.Array:
        output.copy_to_host_async()
        return output

    return map(np.asarray, _four_at_once(map(started, outputs)))


def _pinned(outputs: Iterable) -> Iterator:
    copies = (jax.device_put(output, output.sharding.with_memory_kind("pinned_host")) for output in outputs)
    return (jax.block_until_ready(copy) for copy in _four_at_once(copies))


def _four_at_once(items: Iterable) -> Iterator:
    kept = collections.deque()
    for item in items:
        kept.append(item)
        del item
        if len(kept) == 4:
            yield kept.popleft()
    while kept:
        yield kept.popleft()


def _source(settings: Settings, place, megabytes: float) -> jax.Array:
    values = settings.per_device(int(megabytes * 250_000), 1000)
    return jax.device_put(np.ones((settings.gpus, values), np.float32), place.sharding)


def _maker(place) -> Callable:
    return jax.jit(lambda source, value: source + jnp.float32(value), out_shardings=place.sharding)


def _size(megabytes: float) -> str:
    return f"{megabytes} MB" if megabytes >= 1 else f"{1000 * megabytes:.0f} KB"


def _add_shares(case: dict) -> None:
    rates = {name: found["gib_s"]["median"] for name, found in case["methods"].items() if found.get("gib_s")}
    case["limit_gib_s"] = max((rates[name] for name in LIMITS if name in rates), default=None)
    for name, rate in rates.items():
        if case["limit_gib_s"]:
            case["methods"][name]["share_of_limit"] = rate / case["limit_gib_s"]
