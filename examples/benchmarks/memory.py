"""The peak of device memory while AlexNet trains, for each method in a process of its own.

    results = {}
    memory.memory_part(settings, results, log=print)
    results["float32"]["jaxprefetch, size 2"]["batches_above_resident"]

Compiling measures candidate kernels and takes memory for that. So a process that had to compile, instead of reading the
compilation cache, is run again. One process: `python memory.py METHOD DTYPE GPUS [--tiny]`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable

import alexnet
import environment
import jax
import peers
import pinned
from environment import Settings
from throughput import DTYPES

STEPS = 24
METHODS = {
    "resident": peers.resident_one(),
    "jaxprefetch, size 2": peers.ours("pinned"),
    "jaxprefetch, size 2, delete_used": peers.ours("pinned", delete_used=True),
    "jaxprefetch, size 3": peers.ours("pinned", 3),
    "device_put in the loop": peers.plain("pageable"),
    "flax prefetch_to_device(2)": peers.flax("pageable"),
    "grain device_put": peers.grain("pageable"),
}


def memory_part(settings: Settings, results: dict, log: Callable[[str], None]) -> None:
    """Runs every method in fresh processes and compares the peaks with that of one resident batch."""
    failures = []
    for dtype in ("uint8",) if settings.tiny else ("float32", "uint8"):
        table = results.setdefault(dtype, {})
        for name in list(METHODS)[: 2 if settings.tiny else None]:
            if not importlib.util.find_spec(METHODS[name].package):
                table[name] = {"unavailable": "not installed"}
                continue
            record = _fresh_process(name, dtype, settings)
            if record.get("compiled"):
                record = _fresh_process(name, dtype, settings) | {"second_run": True}
            base = table.get("resident", record).get("peak_bytes")
            if record.get("peak_bytes") and base:
                record["batches_above_resident"] = (record["peak_bytes"] - base) / record["batch_bytes"]
            table[name] = record
            log(f"{dtype}: {name}: {record}")
            if "error" in record and (METHODS[name].is_ours or name == "resident"):
                failures.append(f"{dtype}, {name}: {record['error']}")
    if failures:
        raise RuntimeError("; ".join(failures))


def _fresh_process(name: str, dtype: str, settings: Settings) -> dict:
    command = [sys.executable, __file__, name, dtype, str(settings.gpus)] + ["--tiny"] * settings.tiny
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=150)
    except subprocess.TimeoutExpired:
        return {"error": "took more than 150 s"}
    if answer.returncode:
        last = "\n".join(answer.stderr.strip().splitlines()[-4:])
        return {"error": last or f"exit status {answer.returncode}"}
    record = json.loads(answer.stdout.splitlines()[-1])
    return record if record["peak_bytes"] else record | {"unavailable": "no statistics"}


def peak(name: str, dtype: str, gpus: int, tiny: bool) -> dict:
    """Trains for some steps with one method; returns the peak bytes of the fullest device."""
    misses = []
    jax.monitoring.register_event_listener(
        lambda event, **_: misses.append(event) if event == "/jax/compilation_cache/cache_misses" else None
    )
    place = environment.place(gpus)
    net = alexnet.tiny() if tiny else alexnet.full()
    method, step, state = METHODS[name], alexnet.train_step(net, place), alexnet.make_state(net, place)
    with pinned.host_batches(net.spec(DTYPES[dtype], gpus), 2, place.client) as random:
        host = {"pinned": random} if method.memory == "pinned" else {"pageable": random.pageable_copy()}
        with method.open(host, place) as batches:
            for batch in itertools.islice(batches, 3 if tiny else STEPS):
                state, loss = step(state, batch)
            jax.block_until_ready(state)
            figure = place.bytes_in_use("peak_bytes_in_use")
        batch_bytes = random.nbytes // gpus
    return {"peak_bytes": figure, "batch_bytes": batch_bytes, "compiled": len(misses), "loss": float(loss)}


if __name__ == "__main__":
    print(json.dumps(peak(sys.argv[1], sys.argv[2], int(sys.argv[3]), "--tiny" in sys.argv)))
