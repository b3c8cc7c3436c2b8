"""How fast host memory reaches the devices: the limit that shares are taken of, and what each method sustains.

    results = {}
    link.link_part(settings, results, log=print)
    results["limit_gib_s"], results["64 MB"]["methods"]["jaxprefetch, pageable, size 2"]["gib_s"]["median"]

The limit is the fastest of a pinned `non_blocking` copy in PyTorch, where that is installed, and `device_put` from
pinned memory. There is no step: batches are taken as fast as they come. Our iterator bounds itself; with the others the
loop keeps four batches and waits for the oldest.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterator

import environment
import jax
import peers
import pinned
import synthetic
import timing
import torch_peer
from budget import Budget
from environment import GIB, Settings

MEGABYTES = (0.064, 0.256, 1, 4, 16, 64, 256, 1024)
LARGE = 256
"""From here on few batches: slow methods need up to a second for each."""
SECONDS = 85
LIMITS = ("torch pinned copy", "device_put, pinned")


def methods() -> list[peers.Method]:
    """The methods of a round, after PyTorch's copy."""
    return [
        _put(),
        peers.calls_alone(),
        *(peers.ours(how) for how in ("pageable", "read_into", "pinned")),
        peers.plain(),
        peers.flax(),
        peers.grain(),
    ]


def link_part(settings: Settings, results: dict, log: Callable[[str], None]) -> None:
    """Measures copies of several sizes, all devices at once."""
    place = environment.place(settings.gpus)
    sizes = MEGABYTES[:2] if settings.tiny else MEGABYTES
    with torch_peer.started(settings.gpus) as torch:

        def run(megabytes: float, turns: timing.Turns) -> None:
            spec = synthetic.spec(int(1_000_000 * megabytes), settings.gpus)
            with pinned.both(spec, 2 if megabytes >= LARGE else 4, place.client) as host:
                contest = _contest(settings, place, megabytes, host)
                contest.run(size_name(megabytes), [torch.copy(megabytes), *methods()], turns, results, log)

        try:
            timing.share_out(sizes, settings.rounds, SECONDS, run)
        finally:
            limits = [case["methods"][name]["gib_s"] for case in results.values() for name in _limits(case)]
            results["limit_gib_s"] = max((rate["max"] for rate in limits), default=0.0)


def size_name(megabytes: float) -> str:
    """Returns the size as tables call it."""
    return f"{megabytes} MB" if megabytes >= 1 else f"{1000 * megabytes:.0f} KB"


def known_limit(settings: Settings, place) -> float:
    """Returns GiB/s of all devices together: as the part "link" wrote it to the same directory, or measured briefly."""
    path = settings.out / "link.json"
    if path.exists():
        record = json.loads(path.read_text())
        limit = record["results"].get("limit_gib_s")
        if limit and (record["gpus"], record["tiny"]) == (settings.gpus, settings.tiny):
            return limit
    nbytes = settings.per_device(256_000_000, 1 << 20)
    with pinned.host_batches(synthetic.spec(nbytes, settings.gpus), 2, place.client) as host:
        samples = [_sustained(_put(), {"pinned": host}, place, Budget(8, 4, 0.1, warm=2), None) for _ in range(3)]
        return host.nbytes / GIB / min(sample["ms"] for sample in samples) * 1e3


def _limits(case: dict) -> list[str]:
    """The methods of `case` that tell the limit, as far as they were measured."""
    return [name for name in LIMITS if "gib_s" in case["methods"].get(name, {})]


def _contest(settings: Settings, place, megabytes: float, host: dict) -> timing.Contest:
    def measure(method: peers.Method, pace_ms: float | None) -> dict:
        budget = _budget(method, megabytes, settings.tiny)
        if method.measure:
            return method.measure(budget, pace_ms)
        return _sustained(method, host, place, budget, pace_ms)

    nbytes = host["pinned"].nbytes
    about = {"batch_bytes": nbytes // settings.gpus, "pinned": host["pinned"].pinned}
    return timing.Contest(measure, about, nbytes=nbytes)


def _budget(method: peers.Method, megabytes: float, tiny: bool) -> Budget:
    """Ours warms up for as long as it makes its slots."""
    if tiny:
        return Budget(most=3, least=3, seconds=1.0, warm=2)
    if megabytes >= LARGE:
        return Budget(most=40, least=max(3, 2 * method.ahead), seconds=0.2, warm=20 if method.is_ours else 2)
    return Budget(most=2000, least=8, seconds=0.12, warm=10)


def _put() -> peers.Method:
    """`device_put` of pinned arrays, and nothing else."""
    return dataclasses.replace(peers.plain("pinned"), name="device_put, pinned")


def _sustained(method: peers.Method, host: dict, place, budget: Budget, pace_ms: float | None) -> dict:
    with method.open(host, place) as opened:
        batches = iter(opened) if method.is_ours else _four_at_once(iter(opened))
        return timing.without_step(batches, budget, pace_ms)


def _four_at_once(batches: Iterator) -> Iterator:
    kept = collections.deque()
    for batch in batches:
        kept.append(batch)
        if len(kept) > 4:
            jax.block_until_ready(kept.popleft())
        yield batch
