"""Shows what `train_loop` adds to a loop by hand, with batches that are on the devices already.

    python examples/benchmarks/loop.py --gpus 1 --out results/1gpu
    python examples/benchmarks/loop.py --tiny --out /tmp/tiny          # a CPU, in some seconds

Both run the same jitted step of about 1 ms, and one of 0.33 ms. `train_loop` logs the metrics of every step to a JSONL
file; the loops by hand log nothing, or wait for their loss in every step as those do that print it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Callable

import environment
import jax
import numpy as np
import runner
import synthetic
import timing
from budget import measured
from environment import Settings
from peers import Method

from jaxprefetch import prefetch_to_device
from jaxprefetch.loop import train_loop
from jaxprefetch.writers import JSONLWriter

PARTS = {"loop": "loop:loop_part"}
STEPS_MS = (1.0, 0.33)


def loop_part(settings: Settings, results: dict, log: Callable[[str], None]) -> None:
    """Measures every loop at every length of the step."""
    place = environment.place(settings.gpus)
    spec = synthetic.spec(settings.per_device(8_000_000, 80_000), settings.gpus)
    batches = [{name: np.full(shape, i, dtype) for name, (shape, dtype) in spec.items()} for i in range(2)]
    resident = [jax.device_put(batch, place.sharding) for batch in batches]
    timing.share_out(
        STEPS_MS, settings.rounds, 60, functools.partial(_measure_step, settings, place, resident, results, log)
    )


def _measure_step(settings: Settings, place, resident: list, results: dict, log, step_ms: float, turns) -> None:
    step, seconds = synthetic.calibrated(synthetic.busy_step, step_ms / 1e3, resident[0], place)

    def measure(method: Method, pace_ms: float | None) -> dict:
        with method.open({method.memory: resident}, place) as batches:
            run = functools.partial(LOOPS[method.name], step, place, batches)
            return measured(run, settings.budget(0.5), pace_ms)

    methods = [Method(name, opener=_open(name), is_ours="jaxprefetch" in name) for name in LOOPS]
    contest = timing.Contest(measure, {"step_ms": 1e3 * seconds})
    contest.run(f"{step_ms} ms", methods, turns, results, log)


def _open(name: str):
    """Opens the batches that are on the devices, by the adapter where its name is in the method's."""

    @contextlib.contextmanager
    def opener(resident: list, place):
        batches = itertools.cycle(resident)
        if "jaxprefetch" not in name:
            yield batches
            return
        with prefetch_to_device(batches, sharding=place.sharding) as prefetched:
            yield prefetched

    return opener


def _by_hand(step, place, batches, count: int, wait: bool = False) -> float:
    state = synthetic.make_state(place)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for batch in itertools.islice(batches, count):
        state, loss = step(state, batch)
        if wait:
            loss.block_until_ready()
    jax.block_until_ready(state)
    return time.perf_counter() - start


def _train_loop(step, place, batches, count: int, *, log_every_steps: int) -> float:
    state = synthetic.make_state(place)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(JSONLWriter(f"{folder}/log.jsonl")) as writer:
        start = time.perf_counter()
        state, _ = train_loop(
            step,
            state,
            batches,
            num_steps=count,
            hooks=writer,
            log_every_steps=log_every_steps,
            progress=False,
        )
        jax.block_until_ready(state)
        return time.perf_counter() - start


LOOPS = {
    "resident": _by_hand,
    "by hand, waits for its loss": functools.partial(_by_hand, wait=True),
    "by hand, jaxprefetch": _by_hand,
    "jaxprefetch, train_loop": functools.partial(_train_loop, log_every_steps=1 << 30),
    "jaxprefetch, train_loop, logs every step": functools.partial(_train_loop, log_every_steps=1),
}
"""By the name of the method: `(step, place, batches, count)` to seconds."""

if __name__ == "__main__":
    sys.exit(runner.main(__doc__, __file__, PARTS))
