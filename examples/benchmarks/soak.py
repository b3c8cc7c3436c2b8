"""Runs small batches for a long time and tells whether memory, threads and open files stay flat.

    python examples/benchmarks/soak.py --batches 1000000 --out results/cpu        # JAX_PLATFORMS=cpu: 15 minutes or so
    python examples/benchmarks/soak.py --minutes 10 --out results/h200x1          # on a GPU
    python examples/benchmarks/soak.py --tiny --out /tmp/tiny                     # some seconds, any platform

A round takes 1,000 batches: most of one pass without an end, others of prefetchers that are closed, dropped in the
middle or broken by their source, of a queue and a cache, and some results on their way back. What they carry is
checked. Between rounds the figures are read. `steady.py` makes slopes of them; the exit status is 1 unless each is
flat (with `--tiny`, for which there are too few figures: if one grows).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import environment
import jax
import jax.numpy as jnp
import numpy as np
import steady
from environment import MIB

from jaxprefetch import DeviceCache, DeviceQueue, fetch_to_host, prefetch_to_device

ENDLESS, SHORT = 600, 100  # batches of a round: of the pass without an end, of each other way
VALUES = {"cpu": 256, "gpu": 1 << 18}  # float32 values of a batch: 1 KiB, 1 MiB
MOST_GROWTH = {"resident_bytes": 8 * MIB, "device_bytes": 1 * MIB, "threads": 0.5, "open_files": 0.5}
"""Over the whole run. A single object of Python's for each batch would make 16 MB of a million at the least."""


def numbered(values: int, start: int = 0, stop: int | None = None) -> Iterator[dict]:
    """Batches that tell their number, all in one array that is refilled, and two small leaves."""
    x = np.empty(values, np.float32)
    for n in itertools.count(start) if stop is None else range(start, stop):
        x.fill(n % 1000)
        yield {"x": x, "n": np.uint32(n), "small": np.full(3, n % 100, np.int8)}


@jax.jit
def step(state: jax.Array, batch: dict) -> jax.Array:
    """A checksum of the numbers that were seen, in their order."""
    right = (batch["x"][0] == batch["x"][-1]) & (batch["x"][0].astype(jnp.uint32) == batch["n"] % 1000)
    right &= batch["small"].sum(dtype=jnp.int32).astype(jnp.uint32) == 3 * (batch["n"] % 100)
    return state * 31 + batch["n"] + jnp.where(right, 0, 1 << 20).astype(jnp.uint32)


class Checked:
    """Takes batches, and compares what they carried with what they should have."""

    def __init__(self) -> None:
        self.count = 0
        self._state, self._expected = jnp.uint32(0), 0

    def take(self, batch: dict, number: int) -> None:
        """One step on it."""
        self._state = step(self._state, batch)
        self._expected = (self._expected * 31 + number) % (1 << 32)
        self.count += 1

    def check(self) -> None:
        """Blocking: until all steps are done.

        Raises:
            AssertionError: a batch had other values, or came in another order.
        """
        got = int(jax.device_get(self._state))
        assert got == self._expected, f"after {self.count} batches: {got}, expected {self._expected}"


class Rounds:
    """What one round does, and what lives from one to the next."""

    def __init__(self, values: int, stack: contextlib.ExitStack):
        self._values, self.checked = values, Checked()
        self._endless = stack.enter_context(prefetch_to_device(numbered(values)))
        self._taken = 0
        first = jax.tree.map(lambda leaf: np.stack([leaf] * SHORT), next(numbered(8)))
        self._cache = stack.enter_context(DeviceCache(4 * SHORT, first))

    def run(self) -> None:
        """1,000 batches, and then everything that was begun in this round is over."""
        for batch in itertools.islice(self._endless, ENDLESS):
            self.checked.take(batch, self._taken)
            self._taken += 1
        for way in (self._closed, self._dropped, self._broken, self._queue):
            way()
        self._results()
        self._resident()
        self.checked.check()

    def _closed(self) -> None:
        with prefetch_to_device(numbered(self._values, 0, SHORT), 3, delete_used=True) as batches:
            for n, batch in enumerate(batches):
                self.checked.take(batch, n)

    def _dropped(self) -> None:
        for n, batch in enumerate(itertools.islice(prefetch_to_device(numbered(self._values)), SHORT)):
            self.checked.take(batch, n)

    def _broken(self) -> None:
        def source() -> Iterator[dict]:
            yield from numbered(self._values, 0, SHORT)
            raise KeyError("the source's own")

        with contextlib.suppress(KeyError), prefetch_to_device(source()) as batches:
            for n, batch in enumerate(batches):
                self.checked.take(batch, n)

    def _queue(self) -> None:
        with DeviceQueue(4) as queue:

            def put() -> None:
                for batch in numbered(self._values, 0, SHORT):
                    queue.put(batch)
                queue.close()

            producer = threading.Thread(target=put)
            producer.start()
            for n, batch in enumerate(queue):
                self.checked.take(batch, n)
            producer.join()

    def _results(self) -> None:
        with prefetch_to_device(numbered(self._values, 0, SHORT // 10)) as batches:
            outputs = fetch_to_host(batch["n"] + jnp.uint32(1) for batch in batches)
            assert [int(output) for output in outputs] == list(range(1, SHORT // 10 + 1))

    def _resident(self) -> None:
        slots = np.arange(4)
        self._cache.insert(jax.tree.map(lambda leaf: np.stack([leaf] * 4), next(numbered(8, 7))))
        assert self._cache.take(slots)["n"].shape == (4,)


def figures(device: jax.Device) -> dict[str, int]:
    """Of this process now. On a CPU the bytes of all arrays that are alive stand for the device's memory."""
    stats = device.memory_stats() or {}
    on_device = stats.get("bytes_in_use")
    if on_device is None:
        on_device = sum(array.nbytes for array in jax.live_arrays())
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "device_bytes": on_device,
        "threads": len(os.listdir("/proc/self/task")),
        "open_files": len(os.listdir("/proc/self/fd")),
    }


def soak(go_on: Callable[[int, float], bool], device: jax.Device) -> dict:
    """Runs rounds until `go_on(batches, seconds)` is False.

    Returns:
        "at": batches taken, "seconds": the time of each sample, and one list for each figure.
    """
    samples: dict[str, list] = {"at": [], "seconds": []} | {name: [] for name in MOST_GROWTH}
    start, said = time.perf_counter(), 0.0
    with contextlib.ExitStack() as stack:
        rounds = Rounds(VALUES.get(device.platform, VALUES["gpu"]), stack)
        while go_on(rounds.checked.count, time.perf_counter() - start):
            rounds.run()
            gc.collect()
            seconds, now = time.perf_counter() - start, figures(device)
            for name, value in ({"at": rounds.checked.count, "seconds": seconds} | now).items():
                samples[name].append(value)
            if seconds - said > 30:
                said = seconds
                print(f"{rounds.checked.count:,} batches, {seconds:.0f} s: {now}", flush=True)
    return samples


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1_000_000, help="how many (1,000,000)")
    parser.add_argument("--minutes", type=float, help="for how long, instead of a number of batches")
    parser.add_argument("--tiny", action="store_true", help="a dozen rounds")
    parser.add_argument("--out", type=Path, default=Path("benchmark_results"), help="directory for soak.json")
    options = parser.parse_args()
    batches = 12_000 if options.tiny else options.batches
    device = jax.devices()[0]
    if options.minutes is None or options.tiny:
        samples = soak(lambda count, seconds: count < batches, device)
    else:
        samples = soak(lambda count, seconds: seconds < 60 * options.minutes, device)
    blocks = 5 if options.tiny else steady.BLOCKS
    slopes = {
        name: steady.slope(samples["at"], samples[name], most_growth=most, blocks=blocks)
        for name, most in MOST_GROWTH.items()
    }
    record = {
        "part": "soak",
        "tiny": options.tiny,
        "environment": environment.describe(),
        "platform": device.platform,
        "device": device.device_kind,
        "batches": samples["at"][-1],
        "seconds": samples["seconds"][-1],
        "samples": len(samples["at"]),
        "slopes": slopes,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['batches']:,} batches in {record['seconds']:.0f} s on {device.device_kind}, values right")
    for name, found in slopes.items():
        print(steady.told(name, found))
    bad = {"grows"} if options.tiny else {"grows", "undecided"}
    return int(any(found["verdict"] in bad for found in slopes.values()))


if __name__ == "__main__":
    sys.exit(main())
