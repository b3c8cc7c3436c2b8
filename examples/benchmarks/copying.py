"""How many threads, and pieces of which size, copy a batch into a slot best: where `host/copying.py` has its figures.

    python examples/benchmarks/copying.py --out results/h200x1        # writes copying.json; --tiny for a small machine

Measures GiB/s of copies from ordinary arrays into a warm slot, and of stacking samples there; what making a slot takes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import environment
import jax
import numpy as np
import peers

from jaxprefetch import prefetch_to_device
from jaxprefetch.device.pinning import Pinning
from jaxprefetch.host import copying, stacking
from jaxprefetch.host.slots import Slots

GIB = 1 << 30
MIB = 1 << 20


def main() -> None:
    """Measures all and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmark_results"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    threads = [n for n in (1, 2, 4, 8, 12, 16, 24) if n <= max(cores, 4)]
    large = [64 * MIB] if options.tiny else [1200 * MIB, 150 * MIB, 16 * MIB, 4 * MIB]
    results = {
        "cores": cores,
        "loop": [loop(nbytes, n) for nbytes in (MIB, 4 * MIB, 16 * MIB) for n in threads],
        "making_a_slot": [making(large[0]) for _ in range(2)],
        "copy": [row for nbytes in large for row in copies(nbytes, threads)],
        "small": [small(kib, n) for kib in (64, 256, 512, 1024, 2048) for n in threads[:4]],
        "stack": [stacks(n, way, kib) for kib in (16, 36, 155, 618) for n in threads[2:] for way in (False, True)],
    }
    record = {"part": "copying", "environment": environment.describe(), "results": results}
    (options.out / "copying.json").write_text(json.dumps(record, indent=1) + "\n")
    for name in ("loop", "making_a_slot", "copy", "small", "stack"):
        print(name, *results[name], sep="\n  ")


def making(nbytes: int) -> dict:
    """Seconds for a new slot: mapping and touching it, then registering it."""
    pinning, took = Pinning.of(jax.local_devices()), []

    def register(address: int, size: int):
        start = time.perf_counter()
        undo = pinning.register(address, size) if pinning else lambda: None
        took.append(time.perf_counter() - start)
        return undo

    slots = Slots(register=register)
    start = time.perf_counter()
    slot = slots.take(nbytes)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    del slot
    slots.clear()
    return {
        "MiB": nbytes // MIB,
        "touch_s": seconds - took[0],
        "register_s": took[0],
        "undo_s": time.perf_counter() - start,
    }


def loop(nbytes: int, most: int, count: int = 100) -> dict:
    """Microseconds a batch of a loop that takes ordinary arrays and does nothing else: the threads sleep in between."""
    copying.copying_threads = lambda: most
    batches = [{"x": np.ones(nbytes, np.uint8)} for _ in range(4)]
    with prefetch_to_device(itertools.cycle(batches)) as taken:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in itertools.islice(taken, count):
                pass
            times.append((time.perf_counter() - start) / count * 1e6)
    return {"MiB": nbytes // MIB, "threads": most, "us": sorted(times)[len(times) // 2]}


def copies(nbytes: int, threads: list[int]) -> list[dict]:
    """GiB/s from arrays in turn, so that no cache holds them, into slots in turn, by NumPy and by the extra `native`.

    Alone, and beside the links: while all devices read as many bytes from other slots, one batch every 30 ms.
    """
    count, all_threads = max(2, min(8, 1200 * MIB // nbytes)), copying.Copier(threads[-1])
    pinning = Pinning.of(jax.local_devices())
    slots = Slots(register=pinning.register if pinning else None, copier=all_threads)
    sources = [np.empty(nbytes, np.uint8) for _ in range(count)]
    outs, sent = ([slots.take(nbytes).view(0, np.dtype(np.uint8), (nbytes,)) for _ in range(count)] for _ in range(2))
    all_threads.copy([*zip(sources, outs, strict=True), *zip(outs, sources, strict=True)])
    pairs, rows = itertools.cycle(zip(outs, sources, strict=True)), []
    for n, native in itertools.product(threads, (False, True)):
        copier = copying.Copier(n)
        with contextlib.nullcontext() if native else peers.copies_by_numpy():
            for links in (False, True) if nbytes >= 64 * MIB else (False,):
                with reading(sent) if links else contextlib.nullcontext():
                    rate = best(lambda copier=copier: copier.copy([next(pairs)]), nbytes)
                rows.append({"MiB": nbytes / MIB, "threads": n, "native": native, "beside_links": links, "GiB_s": rate})
    return rows


@contextlib.contextmanager
def reading(slots: list[np.ndarray]) -> Iterator[None]:
    """All devices together read one of these every 30 ms."""
    stop, place = threading.Event(), environment.place(jax.local_device_count())

    def read() -> None:
        for slot in itertools.cycle(slots):
            until = time.perf_counter() + 0.03
            jax.device_put(slot.reshape(len(place.devices), -1), place.sharding).block_until_ready()
            if stop.wait(max(until - time.perf_counter(), 0)):
                return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def small(kib: int, most: int) -> dict:
    """Microseconds of one copy of a small array, with the threshold for several threads taken away."""
    copying.PARALLEL_BYTES, copying.chunk_bytes = 0, lambda nbytes, threads: max(nbytes // threads, 1)
    copier, leaf = copying.Copier(most), np.ones(kib * 1024, np.uint8)
    out = np.empty_like(leaf)
    rate = best(lambda: copier.copy([(out, leaf)]), leaf.nbytes)
    return {"KiB": kib, "threads": most, "us": leaf.nbytes / rate / GIB * 1e6}


def stacks(most: int, native: bool, kib: int) -> dict:
    """GiB/s of samples of so many KiB stacked into one slot."""
    count = min(150 * 1024 // kib, 4096)
    copier, samples = copying.Copier(most), [np.full((kib, 1024), i % 251, np.uint8) for i in range(count)]
    out = Slots(copier=copier).take(count * kib * 1024).view(0, np.dtype(np.uint8), (count, kib, 1024))
    with contextlib.nullcontext() if native else peers.copies_by_numpy():
        rate = best(lambda: stacking.stack(samples, out, where="Batch 0", copier=copier), out.nbytes)
    return {"KiB": kib, "threads": most, "native": native, "GiB_s": rate}


def best(run, nbytes: int) -> float:
    """GiB/s of the median of several runs."""
    run()
    times = []
    until = time.perf_counter() + 0.25
    while len(times) < 5 or (time.perf_counter() < until and len(times) < 200):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return nbytes / sorted(times)[len(times) // 2] / GIB


if __name__ == "__main__":
    main()
