"""One process of those that `processes.py` measures: it answers a line of JSON with a line of JSON.

{"do": "data", "dtype": "uint8"}
{"do": "open", "source": "resident" | "counted" | "known", "memory": "pageable" | "pinned" | "read_into"}
{"do": "run", "steps": 20}, {"do": "close"}
{"do": "host", "source": "counted" | "known", "steps": 400, "step_s": 0.005}
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pinned
import sources
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxprefetch

LAYERS = 40
MANY = 1_000_000


class Known:
    """The same few batches in turn, so many that the end is not reached, and it is known how many."""

    def __init__(self, batches: list, count: int = MANY):
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int):
        if not 0 <= number < self._count:
            raise IndexError(number)
        return self._batches[number % len(self._batches)]


class Worker:
    """Does what it is asked."""

    def __init__(self, told: dict):
        self._tiny = told["tiny"]
        mesh = Mesh(np.array(jax.devices()), ("data",))
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._local = told["devices"]
        self._memory = contextlib.ExitStack()  # of the host's batches
        self._host: dict[str, pinned.HostBatches] = {}
        self._open = self._iterator = None
        if told["train"]:
            self._make_step()

    def data(self, dtype: str) -> dict:
        """Makes the host's batches, pinned and not: rows of images for each of this process's devices.

        Returns:
            The bytes of a batch, all processes together, and whether memory could be pinned.
        """
        self.forget()
        rows, values = (8, 600) if self._tiny else (1024, 227 * 227 * 3)
        spec = {"image": ((rows * self._local, values), np.dtype(dtype).type)}
        self._host = self._memory.enter_context(pinned.both(spec, 3, jax.local_devices()[0].client))
        batches = self._host["pinned"]
        return {"nbytes": batches.nbytes * jax.process_count(), "pinned": batches.pinned}

    def open(self, source: str, memory: str) -> dict:
        """Begins to feed from this source."""
        self.close()
        host = self._host["pinned" if memory == "pinned" else "pageable"]
        if source == "resident":
            arrays = [
                {"image": jax.make_array_from_process_local_data(self._rows, batch["image"])}
                for batch in host.batches[:2]
            ]
            self._iterator = itertools.cycle(arrays)
            return {}
        self._open = jaxprefetch.prefetch_to_device(
            sources.ReadsInto(host) if memory == "read_into" else _source(source, host.batches),
            sharding=self._rows,
            fresh_buffers=True if memory == "pinned" else None,
        )
        self._iterator = iter(self._open)
        return {}

    def run(self, steps: int) -> dict:
        """So many steps; the seconds until the last state is ready."""
        start = time.perf_counter()
        for batch in itertools.islice(self._iterator, steps):
            self._state, _ = self._step(self._state, batch)
        jax.block_until_ready(self._state)
        return {"seconds": time.perf_counter() - start}

    def close(self) -> dict:
        """Ends what was opened."""
        if self._open is not None:
            self._open.close()
        self._open = self._iterator = None
        return {}

    def forget(self) -> dict:
        """Ends what was opened, and gives up the host's batches."""
        self.close()
        self._host = {}
        self._memory.close()
        return {}

    def host(self, source: str, steps: int, step_s: float) -> dict:
        """What the loop's thread does for a step in which it waits, and how many batches come without a step."""
        host = [{"image": np.zeros((4, 16), np.float32)}]
        pause, took = threading.Event(), []
        with jaxprefetch.prefetch_to_device(_source(source, host), sharding=self._rows) as batches:
            iterator = iter(batches)
            for _ in range(10):
                next(iterator)
            loop, process = time.thread_time(), time.process_time()
            for _ in range(steps):
                start = time.perf_counter()
                next(iterator)
                took.append(time.perf_counter() - start)
                pause.wait(step_s)
            loop, process = time.thread_time() - loop, time.process_time() - process
            start = time.perf_counter()
            for _ in range(steps):
                next(iterator)
            rate = steps / (time.perf_counter() - start)
        return {
            "next_us": 1e6 * statistics.median(took),
            "loop_us": 1e6 * loop / steps,
            "process_us": 1e6 * process / steps,
            "batches_per_s": rate,
        }

    def _make_step(self) -> None:
        """A step that reads the whole batch and multiplies by the same weights again and again, with their gradient."""
        values, width = (600, 32) if self._tiny else (227 * 227 * 3, 8192)

        def loss_of(weights, images):
            first, repeated = weights
            hidden = (images.astype(jnp.bfloat16) / 255) @ first

            def layer(hidden, _):
                return jnp.tanh(hidden @ repeated), None

            hidden, _ = jax.lax.scan(layer, jnp.pad(hidden, ((0, 0), (0, width - hidden.shape[1]))), length=LAYERS)
            return jnp.mean(jnp.square(hidden.astype(jnp.float32)))

        def step(weights, batch):
            loss, slopes = jax.value_and_grad(loss_of)(weights, batch["image"])
            return jax.tree.map(lambda w, s: w - 0.01 * s.astype(w.dtype), weights, slopes), loss

        self._step = jax.jit(step, donate_argnums=0, out_shardings=(self._whole, self._whole))
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=self._whole)
        narrow = min(width, 256)
        shapes = (values, narrow), (width, width)
        self._state = [draw(jax.random.key(i), shape, jnp.bfloat16) / shape[0] ** 0.5 for i, shape in enumerate(shapes)]


def _source(name: str, batches: list) -> Known | Iterator:
    return Known(batches) if name == "known" else itertools.cycle(batches)


def main() -> None:
    """Answers until the input ends."""
    told = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print there, in C++ too, is no answer
    if told["count"] > 1:
        address = f"127.0.0.1:{told['port']}"
        jax.distributed.initialize(address, told["count"], told["rank"], coordinator_bind_address=address)
    worker = Worker(told)
    print(json.dumps({"device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}"}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": "".join(traceback.format_exception_only(error)).strip()}
        print(json.dumps(answer), file=answers, flush=True)
    worker.forget()


if __name__ == "__main__":
    main()
