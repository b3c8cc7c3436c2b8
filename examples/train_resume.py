"""A run that is killed in the middle and started again ends with the parameters of one that was not: bit by bit.

    python examples/train_resume.py

It starts itself as a child, once undisturbed, and once with a kill. Grain's iterator knows its place by itself; for
other sources, pass resume="replay". Needs `pip install "jaxprefetch[demo,train]" grain`.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jaxprefetch import train_loop

STEPS, KILL_AT = 40, 23
optimizer = optax.adam(3e-3)


@jax.jit
def train_step(state, batch):
    params, opt_state = state

    def loss_of(params):
        logits = batch["image"] @ params
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def source():
    images, labels = load_digits(return_X_y=True)
    rows = [{"image": x.astype(np.float32), "label": np.int32(y)} for x, y in zip(images, labels, strict=True)]
    return grain.MapDataset.source(rows).seed(0).shuffle().batch(96, drop_remainder=True).repeat().to_iter_dataset()


def train(folder, kill_at):
    def hook(step, metrics):
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    params = jnp.zeros((64, 10))
    state = params, optimizer.init(params)
    state, summary = train_loop(
        train_step, state, source(), num_steps=STEPS, hooks=hook, checkpoints=folder, save_every_steps=5
    )
    digest = hashlib.sha256(np.asarray(state[0]).tobytes()).hexdigest()[:16]
    print(f"went on from step {summary.resumed_from}; loss {summary.metrics['loss']:.6f}; parameters {digest}")


def child(folder, kill_at):
    command = [sys.executable, __file__, folder, str(kill_at)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(f"kill at step {kill_at or '-'}: exit {done.returncode}: {done.stdout.strip()}")
    return done.stdout.rpartition(";")[2]


def main():
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        undisturbed = child(whole, 0)
        child(parts, KILL_AT)
        assert child(parts, 0) == undisturbed, "the parameters differ"


if __name__ == "__main__":
    main()
