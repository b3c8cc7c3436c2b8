"""Runs that are killed at any point and resumed end as if nothing had happened.

JAXPREFETCH_KILLS=100 pytest tests/test_kill.py
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import jaxprefetch

KILLS = int(os.environ.get("JAXPREFETCH_KILLS", "4"))
STEPS = 40
RUN = """
import os, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jaxprefetch.loop import train_loop
from jaxprefetch.checkpoints import Checkpoints

def say(what):
    os.write(1, (what + "\\n").encode())

class Shuffled:
    def __init__(self):
        self.rng = np.random.default_rng(1)

    def __iter__(self):
        for i in self.rng.permutation(9):
            say("pull")
            yield {"id": np.int32(i), "x": self.rng.normal(size=(4, 3)).astype(np.float32)}

optimizer = optax.adam(0.1)

@jax.jit
def update(state, x):
    params, opt, key = state
    key, noise = jax.random.split(key)
    loss, grads = jax.value_and_grad(lambda p: ((x @ p - 1 + jax.random.normal(noise, (4,))) ** 2).mean())(params)
    updates, opt = optimizer.update(grads, opt)
    return (optax.apply_updates(params, updates), opt, key), {"loss": loss}

done = 0
def step(state, batch):
    global done
    done += 1
    say(f"step {done} {int(batch['id'])} {float(batch['x'].sum()).hex()}")
    return update(state, batch["x"])

class Telling(Checkpoints):
    def restore(self, *args):
        global done
        state, done = super().restore(*args)
        return state, done

    def save(self, *args):
        say("save")
        super().save(*args)
        say("saved")

params = jnp.zeros(3)
with Telling(sys.argv[1], max_to_keep=2) as checkpoints:
    state, summary = train_loop(
        step, (params, optimizer.init(params), jax.random.key(0)), Shuffled(), num_steps=int(sys.argv[2]),
        resume="replay", checkpoints=checkpoints, save_every_steps=3, hooks=lambda *call: say("log"), progress=False,
    )
say("end " + np.asarray(state[0]).tobytes().hex())
"""


def run(folder: Path, events: int | None) -> tuple[dict[int, str], str | None]:
    """Runs until it has told of so many events, then kills it: the steps that it began, and how it ended."""
    root = str(Path(jaxprefetch.__file__).parents[1])
    env = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", RUN, str(folder), str(STEPS)]
    steps, end = {}, None
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for count, line in enumerate(process.stdout, 1):
            what, _, rest = line.strip().partition(" ")
            if what == "step":
                number, _, batch = rest.partition(" ")
                steps[int(number)] = batch
            elif what == "end":
                end = rest
            if count == events:
                process.kill()
        _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return steps, end


def test_killed_runs_end_as_if_nothing_had_happened(tmp_path):
    """By the last execution of each step, batches are those of an undisturbed run; parameters are bit-equal."""
    expected_steps, expected_end = run(tmp_path / "undisturbed", None)
    assert sorted(expected_steps) == list(range(1, STEPS + 1))
    draw = random.Random(0)
    kills = number = 0
    while kills < KILLS:
        number += 1
        steps: dict[int, str] = {}
        end = None
        while end is None:
            events = draw.randrange(1, 120) if kills < KILLS else None
            more, end = run(tmp_path / str(number), events)
            steps |= more
            kills += end is None
        assert steps == expected_steps
        assert end == expected_end
