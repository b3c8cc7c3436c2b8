"""How many batches lie on a device right after each issue, by the device's own count of bytes.

    results = {}
    inflight.inflight_part(settings, results, log=print)
    results["64 MB"]["jaxprefetch, pinned, size 2"]["batches_max"]      # bound: size + 1, or size with delete_used

The step has no temporaries and a state of four bytes, so that what `bytes_in_use` says above the baseline are batches.
It is read when `next()` has returned and the variable of the batch before is still bound: as many as there ever are.
The allocator counts whole chunks, which can be larger than what was asked for when memory is fragmented.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import environment
import jax
import numpy as np
import peers
import pinned
import synthetic
from environment import Settings

Log = Callable[[str], None]
STEP_MS = {64: 1.7, 256: 6.7}
SKIPPED = 4  # the first issues, before the buffers are full


@dataclass(frozen=True)
class Case:
    """A method and the number of batches that it must not exceed; None where nothing is promised."""

    method: peers.Method
    bound: float | None
    steps: int
    note: str = ""

    @property
    def name(self) -> str:
        """The method, and what is special about the case."""
        return self.method.name + self.note


def cases(nbytes: int, settings: Settings) -> list[Case]:
    """The methods for batches of `nbytes` a device; the peers and the long run-ahead only for 64 MB."""
    steps, long = (6, 10) if settings.tiny else (60, 1000)
    found = []
    for delete_used in (False, True):
        for size in (1, 2, 3, 4):
            method = peers.ours("pinned", size, delete_used=delete_used)
            found.append(Case(method, size + (not delete_used), steps))
        cap = 2 if delete_used else 3
        capped = peers.ours("pinned", 4, delete_used=delete_used, max_bytes=cap * nbytes + nbytes // 2)
        found.append(Case(capped, cap + 0.5, steps))
    if nbytes < 100_000_000:
        ahead = [Case(peers.ours("pinned", 2, delete_used=d), 3 - d, long, f", {long} steps") for d in (False, True)]
        others = [peers.plain("pinned"), peers.plain("pageable"), peers.flax("pinned"), peers.grain("pinned")]
        found += ahead + [Case(method, None, steps) for method in others]
    return found


def inflight_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures every case; all of them run before a failure or a broken bound is raised."""
    place = environment.place(settings.gpus)
    broken = []
    for megabytes, step_ms in STEP_MS.items():
        nbytes = settings.per_device(megabytes * 1_000_000, 1 << 16)
        spec = synthetic.spec(nbytes, settings.gpus)
        with pinned.both(spec, 4, place.client) as host:
            step = _step(step_ms, host["pinned"], place)
            for case in cases(nbytes, settings):
                name = f"{megabytes} MB: {case.name}"
                record = _record(case, host, place, step, nbytes)
                results.setdefault(f"{megabytes} MB", {})[case.name] = record
                log(f"{name}: {_short(record)}")
                broken += [f"{name}: {record[key]}" for key in ("broken", "failed") if key in record]
        if settings.tiny:
            break
    if broken:
        raise RuntimeError("; ".join(broken))


def _step(step_ms: float, host: pinned.HostBatches, place) -> synthetic.Step:
    batch = jax.device_put(host.batches[0], place.sharding)
    return synthetic.calibrated(synthetic.reading_step, 1e-3 * step_ms, batch, place)[0]


def _record(case: Case, host: dict, place, step: synthetic.Step, nbytes: int) -> dict:
    try:
        baseline, used = _watch(case, host, place, step)
    except Exception as error:
        key = "failed" if case.method.is_ours and not isinstance(error, ImportError) else "error"
        if key == "failed":
            traceback.print_exc()
        return {key: "".join(traceback.format_exception_only(error)).strip()}
    if baseline is None:
        return {"unavailable": "no statistics"}
    batches = [(value - baseline) / nbytes for value in used]
    settled = batches[SKIPPED:]
    record = {"batches_max": max(batches), "batches_min": min(settled), "bound": case.bound, "batches": batches}
    record["slope_per_1000"] = 1000 * float(np.polyfit(np.arange(len(settled)), settled, 1)[0])
    if case.bound is not None and max(batches) > case.bound + 0.05:
        record["broken"] = f"{max(batches):.2f} batches, the bound is {case.bound}"
    return record


def _watch(case: Case, host: dict, place, step: synthetic.Step) -> tuple[int | None, list[int]]:
    """Returns the bytes in use before, and after each `next()`."""
    gc.collect()  # what the method before left behind
    state = synthetic.make_state(place)
    jax.block_until_ready(state)
    baseline, used = place.bytes_in_use(), []
    with case.method.open(host, place) as opened:
        batches = iter(opened)
        held = next(batches)
        state, _ = step(state, held)
        for _ in range(case.steps):
            new = next(batches)
            used.append(place.bytes_in_use())
            held = new
            del new
            state, _ = step(state, held)
        jax.block_until_ready(state)
    return baseline, used


def _short(record: dict) -> str:
    if "batches_max" not in record:
        return str(record)
    return (
        f"at most {record['batches_max']:.2f} batches (bound {record['bound']}), slope {record['slope_per_1000']:+.3f}"
    )
