"""Measures what several processes cost: the host's time for a step by their number, and two GPUs in one process or two.

    python examples/benchmarks/processes.py --gpus 2 --rounds 4 --parts training --out results/2gpu    # a host with two
    python examples/benchmarks/processes.py --parts host --out results/cpu                             # CPU processes
    python examples/benchmarks/processes.py --tiny --out /tmp/tiny                                     # a CPU, a minute

`training`: the same training with data parallelism over all GPUs, once by one process that has them all and once by as
many processes with one each, on resident batches, on batches of a generator, whose end nobody knows before, so that
every batch is agreed on ("counted"), and on those of a list ("known"). `--sources` says where the batches lie: in
ordinary arrays (pageable), in memory registered with the driver (pinned), or where the source writes them (read_into,
which is counted always). Both ways are started once and take turns; a measurement is as long as its slowest process.

`host`: 1, 2 and 4 processes on CPU devices, with batches so small that only the host's own work is left, and a step in
which the loop's thread waits. `next_us` is what `next()` takes on it, `loop_us` and `process_us` the CPU time of that
thread and of the whole process for a step; `batches_per_s` is how many are agreed on when nothing else is done. Those
with a known length agree once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import runner
import timing
from budget import Budget, measured
from environment import Settings
from peers import Method

PARTS = {"training": "processes:training_part", "host": "processes:host_part"}
WORKER = Path(__file__).with_name("process_worker.py")
SECONDS = 190
ON_CPU = Budget(most=20, least=3, seconds=1.0, warm=2)
COUNTS = (1, 2, 4)
STEP_S = 0.005


class Workers:
    """Processes that do the same at the same time; each is asked and answers with a line of JSON.

    Args:
        count: how many processes.
        devices: of each; the first has the first ones.
        options: what every worker is told at the start.
    """

    def __init__(self, count: int, devices: int, **options):
        port = _free_port()
        self._workers = []
        for rank in range(count):
            mine = range(rank * devices, (rank + 1) * devices)
            told = options | {"count": count, "rank": rank, "port": port, "devices": devices}
            command = [sys.executable, str(WORKER), json.dumps(told)]
            environment = os.environ | _environment(list(mine), options["platform"])
            worker = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            self._workers.append(worker)
        self.devices = self._answers()[0]["device"]

    def ask(self, **request) -> list[dict]:
        """Sends all of them the same request; returns their answers."""
        for worker in self._workers:
            worker.stdin.write(json.dumps(request) + "\n")
        return self._answers()

    def run(self, steps: int) -> float:
        """So many steps of what was opened; the seconds of the slowest process."""
        return max(answer["seconds"] for answer in self.ask(do="run", steps=steps))

    def close(self) -> None:
        """Ends them."""
        for worker in self._workers:
            worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(30)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def _answers(self) -> list[dict]:
        answers = [json.loads(worker.stdout.readline() or '{"error": "it has died"}') for worker in self._workers]
        if failed := [answer["error"] for answer in answers if "error" in answer]:
            self.close()
            raise RuntimeError("a worker: " + "; ".join(failed))
        return answers


def training_part(settings: Settings, results: dict, log: Callable[[str], None]) -> None:
    """Measures all ways in turns."""
    import environment

    platform, gpus = "gpu" if environment.gpus() else "cpu", max(2, settings.gpus)
    options = {"platform": platform, "tiny": settings.tiny, "train": True}
    one, many = "1 process", f"{gpus} processes"
    with contextlib.ExitStack() as stack:
        ways = {}
        for name, count in ((one, 1), (many, gpus)):
            ways[name] = Workers(count, gpus // count, **options)
            stack.callback(ways[name].close)
            log(f"{name}: {ways[name].devices}")

        def measure(method: Method, pace_ms: float | None) -> dict:
            way, source = method.name.split(", ")[:2]
            ways[way].ask(do="open", source=source, memory=method.memory)
            budget = settings.budget(1.2) if platform == "gpu" else ON_CPU
            sample = measured(ways[way].run, budget, pace_ms)
            ways[way].ask(do="close")
            return sample

        for dtype in ("uint8", "float32"):
            made = [answer for workers in ways.values() for answer in workers.ask(do="data", dtype=dtype)]
            methods = list(_methods(one, many, settings.sources))
            about = {"batch_bytes": made[0]["nbytes"], "pinned": all(answer["pinned"] for answer in made)}
            turns = timing.Turns(settings.rounds, SECONDS / 2)
            timing.Contest(measure, about).run(dtype, methods, turns, results, log)


def host_part(settings: Settings, results: dict, log: Callable[[str], None]) -> None:
    """Measures 1, 2 and 4 processes in turns."""
    steps = 20 if settings.tiny else 400
    with contextlib.ExitStack() as stack:
        ways = {}
        for count in COUNTS:
            ways[count] = Workers(count, 1, platform="cpu", tiny=True, train=False)
            stack.callback(ways[count].close)
        samples: dict[str, list[dict]] = {}
        for _, (count, workers), source in _in_turns(settings.rounds, ways):
            answers = workers.ask(do="host", source=source, steps=steps, step_s=STEP_S)
            name = f"{count} processes, {source}"
            samples.setdefault(name, []).append({key: timing.median(a[key] for a in answers) for key in answers[0]})
            log(f"{name}: {samples[name][-1]}")
    for name, found in samples.items():
        results[name] = {key: timing.spread([sample[key] for sample in found]) for key in found[0]}
    results["cores"] = os.cpu_count()


def _methods(one: str, many: str, memories: Sequence[str]) -> Iterator[Method]:
    """Every source for one process, and for many, which are compared with it."""
    fed = [(f", {kind}, {memory}", memory) for memory in memories for kind in ("counted", "known")]
    for what, memory in ((", resident", "pageable"), *fed):
        if what != ", known, read_into":  # such a source has no length
            yield from (Method(way + what, memory, base=one + what, is_ours=True) for way in (one, many))


def _in_turns(rounds: int, ways: dict[int, Workers]) -> Iterator[tuple[int, tuple[int, Workers], str]]:
    return itertools.product(range(rounds), ways.items(), ("counted", "known"))


def _environment(devices: list[int], platform: str) -> dict[str, str]:
    if platform == "cpu":
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={len(devices)}"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(devices[-1] + 1)]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in devices),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # both ways share the devices
    }


@functools.cache
def _used_ports() -> set[int]:
    return set()


def _free_port() -> int:
    while True:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        if port not in _used_ports():
            _used_ports().add(port)
            return port


if __name__ == "__main__":
    sys.exit(runner.main(__doc__, __file__, PARTS))
