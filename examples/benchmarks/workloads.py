"""Batches of several forms before a step of a chosen length: where the copy or the host's work per batch shows.

    results = {}
    workloads.steps_part(settings, results, log=print)
    results["0.33 ms, 8 MB"]["methods"]["jaxprefetch, pageable, size 2"]["share"]["median"]

The share is of the best possible: the longer of the step on a resident batch and the copy at the limit of the link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import environment
import jax
import link
import numpy as np
import peers
import pinned
import synthetic
import timing
from environment import Settings

Log = Callable[[str], None]
SHORT = ((0.33, 1, 1), (0.33, 1, 20), (0.33, 8, 1), (1.7, 64, 1), (6.7, 256, 1))
STEPS = tuple((step_ms, 1 if step_ms < 0.3 else 8, leaves) for leaves in (1, 20) for step_ms in (0.1, 0.33, 1, 10))
"""Milliseconds of a step, MB of a batch on each device, and its float32 leaves."""

TOKENS = ("tokens", "targets", "positions", "segment_ids", "loss_mask", "document_ids", "target_segments", "weights")
TRANSITION = {
    "observation": ((192,), np.float32),
    "next_observation": ((192,), np.float32),
    "frame": ((28, 28), np.uint8),
    "next_frame": ((28, 28), np.uint8),
    "memory": ((128,), np.float32),
    "action": ((8,), np.float32),
    "legal": ((16,), np.bool_),
    **dict.fromkeys(("reward", "discount", "value", "advantage", "log_prob", "weight"), ((), np.float32)),
    **dict.fromkeys(("choice", "step", "episode", "index"), ((), np.int32)),
    **dict.fromkeys(("done", "truncated", "valid"), ((), np.bool_)),
}
"""A row of a replay batch: 20 leaves, 3.7 KB."""


@dataclass(frozen=True)
class Workload:
    """A batch, the step that takes it, and who feeds it."""

    name: str
    step_ms: float
    spec: pinned.Spec
    methods: list[peers.Method]
    seconds: float = 0.2


def core_methods() -> list[peers.Method]:
    """What the core promises: sizes, with and without `delete_used`, from arrays that are pinned already."""
    return [
        peers.resident(),
        peers.calls_alone(),
        peers.ours("pinned", 2),
        peers.ours("pinned", 2, delete_used=True),
        peers.resident(),
        peers.ours("pinned", 3),
        peers.ours("pinned", 3, delete_used=True),
        peers.plain("pinned"),
    ]


def main_methods() -> list[peers.Method]:
    """Ours and those that most people use."""
    ours = [peers.ours(how) for how in ("pageable", "read_into")]
    return [peers.resident(), *ours, peers.plain(), peers.flax(), peers.grain()]


def all_methods() -> list[peers.Method]:
    """Ours and all others."""
    others = [peers.double_buffer(), peers.datarax()]
    return [*main_methods(), peers.calls_alone(), peers.resident(), peers.ours("pinned"), *others]


def short_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures the core's variants."""
    cases = [_floats(settings, *case, core_methods()) for case in SHORT]
    _run(settings, cases[:2] if settings.tiny else cases, 80, results, log)


def steps_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures steps of 0.1 to 10 ms, with one leaf and with twenty."""
    cases = [_floats(settings, *case, main_methods()) for case in STEPS]
    _run(settings, cases[::5] if settings.tiny else cases, 85, results, log)


def tokens_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures batches as language models take them: 8 leaves of int32, 256 rows of 2,048 tokens on each device."""
    shape = (4 * settings.gpus, 32) if settings.tiny else (256 * settings.gpus, 2048)
    spec = {name: (shape, np.int32) for name in TOKENS}
    _run(settings, [Workload("8 leaves, 10 ms", 10.0, spec, all_methods(), seconds=0.5)], 50, results, log)


def rl_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures batches as reinforcement learning takes them: 20 small leaves, 256 rows on each device."""
    rows = settings.per_device(256, 8) * settings.gpus
    spec = {name: ((rows, *shape), dtype) for name, (shape, dtype) in TRANSITION.items()}
    _run(settings, [Workload("20 leaves, 0.3 ms", 0.3, spec, all_methods())], 50, results, log)


def _floats(settings: Settings, step_ms: float, megabytes: int, leaves: int, methods: list) -> Workload:
    name = f"{step_ms} ms, {megabytes} MB" + (f" in {leaves} leaves" if leaves > 1 else "")
    nbytes = settings.per_device(megabytes * 1_000_000, 80_000)
    return Workload(name, step_ms, synthetic.spec(nbytes, settings.gpus, leaves), methods)


def _run(settings: Settings, workloads: list[Workload], seconds: float, results: dict, log: Log) -> None:
    """Measures every workload, all of them in about `seconds`."""
    place = environment.place(settings.gpus)
    limit = link.known_limit(settings, place)

    def run(workload: Workload, turns: timing.Turns) -> None:
        with pinned.both(workload.spec, 4, place.client) as host:
            contest = _contest(settings, place, workload, limit, host)
            log(f"{workload.name}: {contest.about}")
            contest.run(workload.name, workload.methods, turns, results, log)

    timing.share_out(workloads, settings.rounds, seconds, run)


def _contest(settings: Settings, place, workload: Workload, limit: float, host: dict) -> timing.Contest:
    batch = jax.device_put(host["pinned"].batches[0], place.sharding)
    step, seconds = synthetic.calibrated(synthetic.busy_step, workload.step_ms / 1e3, batch, place)
    nbytes = host["pinned"].nbytes
    copy_ms = 1e3 * nbytes / (limit * environment.GIB)
    about = {"step_ms": 1e3 * seconds, "copy_ms": copy_ms, "limit_gib_s": limit}
    about |= {"batch_bytes": nbytes // settings.gpus, "pinned": host["pinned"].pinned}
    loop = timing.Loop(lambda: synthetic.make_state(place), step)
    measure = timing.in_loop(loop, host, place, settings.budget(workload.seconds))
    return timing.Contest(measure, about, floor_ms=copy_ms)
