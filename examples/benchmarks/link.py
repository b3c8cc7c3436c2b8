"""How fast host memory reaches the devices: the limit that shares are taken of.

    results = {}
    link.link_part(settings, results, log=print)
    results["limit_gib_s"]

The limit is the fastest of a pinned `non_blocking` copy in PyTorch, where that is installed, and `device_put` from
pinned memory. PyTorch runs in a process of its own: `python link.py GPUS MEGABYTES...` prints its figures.
"""

from __future__ import annotations

import collections
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable

import environment
import jax
import peers
import pinned
import synthetic
from environment import GIB, Settings

MEGABYTES = (1, 4, 16, 64, 256)
REPEATS = 5
TOTAL = 2 << 30


def link_part(settings: Settings, results: dict, log: Callable[[str], None]) -> None:
    """Measures copies of several sizes, all devices at once, and what our iterator sustains without a step."""
    sizes = MEGABYTES[:1] if settings.tiny else MEGABYTES
    results["torch"] = torch_rates(settings.gpus, sizes)
    log(f"torch: {results['torch']}")
    place = environment.place(settings.gpus)
    ways = {"device_put": _put, "jaxprefetch, size 2": _ours(2), "jaxprefetch, size 3": _ours(3)}
    for megabytes in sizes:
        nbytes = megabytes * 1_000_000
        with pinned.host_batches(synthetic.spec(nbytes, settings.gpus), 4, place.client) as host:
            for name, way in ways.items():
                rates = sorted(_rate(way, host, place, settings) for _ in range(1 if settings.tiny else REPEATS))
                results.setdefault(name, {})[str(megabytes)] = rates
                log(f"{name}, {megabytes} MB: {rates[len(rates) // 2]:.1f} GiB/s")
    torch = results["torch"].values() if isinstance(results["torch"], dict) else []
    results["limit_gib_s"] = max(itertools.chain(*torch, *results["device_put"].values()))


def known_limit(settings: Settings, place) -> float:
    """Returns GiB/s of all devices together: as the part "link" wrote it to the same directory, or measured briefly."""
    path = settings.out / "link.json"
    if path.exists():
        record = json.loads(path.read_text())
        if record.get("gpus") == settings.gpus and "limit_gib_s" in record["results"]:
            return record["results"]["limit_gib_s"]
    nbytes = settings.per_device(256_000_000, 1 << 20)
    with pinned.host_batches(synthetic.spec(nbytes, settings.gpus), 2, place.client) as host:
        return max(_rate(_put, host, place, settings) for _ in range(3))


def torch_rates(gpus: int, sizes: tuple[int, ...]) -> dict[str, list[float]] | str:
    """Returns GiB/s of PyTorch's pinned copies by megabytes, or why there are none."""
    command = [sys.executable, __file__, str(gpus), *map(str, sizes)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if answer.returncode:
        return answer.stderr.strip().splitlines()[-1]
    return json.loads(answer.stdout.splitlines()[-1])


def _rate(way: Callable, host: pinned.HostBatches, place, settings: Settings) -> float:
    count = 4 if settings.tiny else max(8, min(400, TOTAL // host.nbytes))
    return count * host.nbytes / way(host, place, count) / GIB


def _put(host: pinned.HostBatches, place, count: int) -> float:
    source, recent = host.forever(), collections.deque(maxlen=4)
    jax.block_until_ready(jax.device_put(next(source), place.sharding))
    start = time.perf_counter()
    for batch in itertools.islice(source, count):
        recent.append(jax.device_put(batch, place.sharding))
    jax.block_until_ready(list(recent))
    return time.perf_counter() - start


def _ours(size: int) -> Callable:
    method = peers.ours("pinned", size)

    def way(host: pinned.HostBatches, place, count: int) -> float:
        with method.open({"pinned": host}, place) as opened:
            batches = iter(opened)
            for batch in itertools.islice(batches, 2 * size):
                jax.block_until_ready(batch)
            start = time.perf_counter()
            for batch in itertools.islice(batches, count):
                last = batch
            jax.block_until_ready(last)
            return time.perf_counter() - start

    return way


def _torch_main(gpus: int, sizes: list[int]) -> dict[str, list[float]]:
    import torch

    if torch.cuda.device_count() < gpus:
        raise SystemExit(f"torch sees {torch.cuda.device_count()} GPUs")
    rates = {}
    for megabytes in sizes:
        values = megabytes * 250_000
        hosts = [torch.rand(values).pin_memory() for _ in range(gpus)]
        devices = [torch.empty(values, device=f"cuda:{i}") for i in range(gpus)]
        count = max(8, min(400, TOTAL // (4 * values * gpus)))
        rates[str(megabytes)] = sorted(_torch_rate(torch, hosts, devices, count) for _ in range(REPEATS + 1))[1:]
    return rates


def _torch_rate(torch, hosts: list, devices: list, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        for host, device in zip(hosts, devices, strict=True):
            device.copy_(host, non_blocking=True)
    for device in devices:
        torch.cuda.synchronize(device.device)
    seconds = time.perf_counter() - start
    return count * sum(host.nbytes for host in hosts) / seconds / GIB


if __name__ == "__main__":
    print(json.dumps(_torch_main(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])))
