"""Steps so short that the copy or the host's work per batch shows.

    results = {}
    short.short_part(settings, results, log=print)
    results["1.7 ms, 64 MB"]["methods"]["jaxprefetch, pinned, size 3"]["share"]["median"]

Batches are one float32 leaf or twenty, so many bytes for each device. The share is of the best possible: the longer of
the step on a resident batch and the copy at the limit of the link.
"""

from __future__ import annotations

from collections.abc import Callable

import environment
import jax
import link
import peers
import pinned
import synthetic
import timing
from environment import Settings

MS = 1e-3
CASES = ((0.33, 1, 1), (0.33, 1, 20), (0.33, 8, 1), (1.7, 64, 1), (6.7, 256, 1))
"""Milliseconds of a step, MB of a batch on each device, and its leaves."""


def methods() -> list[peers.Method]:
    """The methods of a round."""
    return [
        peers.resident(),
        peers.ours("pinned", 2),
        peers.ours("pinned", 2, delete_used=True),
        peers.resident(),
        peers.ours("pinned", 3),
        peers.ours("pinned", 3, delete_used=True),
        peers.plain("pageable"),
        peers.plain("pinned"),
        peers.flax("pageable"),
        peers.grain("pinned"),
    ]


def short_part(settings: Settings, results: dict, log: Callable[[str], None]) -> None:
    """Measures every case; all of them run before a failure of ours is raised."""
    place = environment.place(settings.gpus)
    limit = link.known_limit(settings, place)
    failures = []
    for step_ms, megabytes, leaves in CASES[:2] if settings.tiny else CASES:
        name = f"{step_ms} ms, {megabytes} MB" + (f" in {leaves} leaves" if leaves > 1 else "")
        nbytes = settings.per_device(megabytes * 1_000_000, 80_000)
        spec = synthetic.spec(nbytes, settings.gpus, leaves)
        try:
            _case(settings, place, (name, step_ms * MS, spec, limit), results, log)
        except RuntimeError as error:
            failures.append(f"{name}: {error}")
    if failures:
        raise RuntimeError("; ".join(failures))


def _case(settings: Settings, place, case: tuple[str, float, pinned.Spec, float], results: dict, log) -> None:
    name, target, spec, limit = case
    budget = settings.budget(steps=1500, seconds=0.4)
    with pinned.both(spec, 4, place.client) as host:
        batch = jax.device_put(host["pinned"].batches[0], place.sharding)
        step, seconds = synthetic.calibrated(synthetic.busy_step, target, batch, place)
        nbytes = host["pinned"].nbytes
        copy = nbytes / (limit * environment.GIB)
        log(f"{name}: step {1e3 * seconds:.3f} ms, copy at the limit {1e3 * copy:.3f} ms")
        loop = timing.Loop(lambda: synthetic.make_state(place), step)
        contest = timing.Contest(loop, place, host, budget, floor=copy)
        about = {
            "step_ms": 1e3 * seconds,
            "copy_ms": 1e3 * copy,
            "limit_gib_s": limit,
            "batch_bytes": nbytes // settings.gpus,
            "pinned": host["pinned"].pinned,
        }
        for _ in range(settings.rounds):
            contest.round(methods(), lambda line: log(f"{name}: {line}"))
            results[name] = about | contest.results()
        contest.check()
