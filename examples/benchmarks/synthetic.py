"""Steps of a chosen length: one that hardly reads its batch, and one without temporaries that reads all of it.

    step, seconds = synthetic.calibrated(synthetic.busy_step, target=1.7e-3, batch=batch, place=place)
    state = synthetic.make_state(place)
    state, loss = step(state, batch)                        # the state is donated

Batches of `spec` have float32 leaves `(devices, values)`; the busy step takes any leaves that are split over the
devices along their first axis. So nothing is exchanged between devices. The loops have a fixed length: one whose length
is only known on the device would make the host wait in every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Step = Callable[[jax.Array, dict[str, jax.Array]], tuple[jax.Array, jax.Array]]


def spec(nbytes: int, devices: int, leaves: int = 1) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of a batch of `leaves` equal leaves with `nbytes` per device altogether."""
    return {f"x{i}": ((devices, nbytes // 4 // leaves), np.float32) for i in range(leaves)}


def make_state(place) -> jax.Array:
    """Returns one zero per device."""
    return jax.device_put(np.zeros(len(place.devices), np.float32), place.sharding)


def busy_step(length: int, place) -> Step:
    """Returns a step of one matrix product that reads one value of each leaf on each device.

    One product and not a loop of small ones: a step of many launches keeps the host busy for as long as the device, and
    then everything that the host does besides shows.
    """
    width, rows = (8192, 32 * length) if place.devices[0].platform == "gpu" else (64, 8 * length)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=place.replicated)
    start = draw(jax.random.key(0), (rows, width), jnp.bfloat16)
    weights = draw(jax.random.key(1), (width, width), jnp.bfloat16) / width**0.5

    def step(state, batch, start, weights):
        read = sum(leaf.reshape(len(state), -1)[:, 0].astype(jnp.float32) for leaf in batch.values())
        matrix = start + (state + read).astype(jnp.bfloat16)[:, None, None]
        state = 0.5 * state + jnp.max(matrix @ weights, axis=(1, 2)).astype(jnp.float32)
        return state, 2 * state

    compiled = jax.jit(step, donate_argnums=0, out_shardings=place.sharding)
    return lambda state, batch: compiled(state, batch, start, weights)


def reading_step(length: int, place) -> Step:
    """Returns a step that reduces the whole batch `length` times, each time with the last result."""

    def step(state, batch):
        values = batch["x0"].reshape(len(state), -1)

        def pass_over(_, state):
            return jnp.mean(jnp.abs(values - state[:, None]), axis=1)

        state = jax.lax.fori_loop(0, length, pass_over, state)
        return state, 2 * state

    return jax.jit(step, donate_argnums=0, out_shardings=place.sharding)


def calibrated(make_step: Callable[..., Step], target: float, batch, place) -> tuple[Step, float]:
    """Returns a step of about `target` seconds on `batch`, which lies on the devices, and its true length."""
    length = 8
    for _ in range(4):
        step = make_step(length, place)
        seconds = _time(step, batch, place)
        wanted = max(1, round(length * target / seconds))
        if wanted == length or abs(seconds / target - 1) < 0.04:
            break
        length = wanted
    return step, seconds


def _time(step: Step, batch, place) -> float:
    state = make_state(place)
    state, _ = step(state, batch)
    jax.block_until_ready(state)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - start) / 10)
    return sorted(seconds)[2]
