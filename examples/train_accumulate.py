"""Gradient accumulation: one update of the parameters from the gradients of several micro-batches.

    python examples/train_accumulate.py

The batch of a step is prefetched whole; the step splits it and goes through the micro-batches in a `scan`, so that the
activations of only one of them are in memory. Needs `pip install "jaxprefetch[demo]"`. JAXPREFETCH_SHORT=1 shortens it.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jaxprefetch import batched, train_loop

STEPS = 30 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 200
BATCH, MICRO_BATCHES = 128, 4

optimizer = optax.adam(3e-3)


def init(key):
    first, second = jax.random.split(key)
    params = {"in": 0.1 * jax.random.normal(first, (64, 128)), "out": 0.1 * jax.random.normal(second, (128, 10))}
    return params, optimizer.init(params)


def loss_of(params, batch):
    logits = jax.nn.relu(batch["image"] @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    params, opt_state = state
    micro = jax.tree.map(lambda x: x.reshape(MICRO_BATCHES, -1, *x.shape[1:]), batch)

    def accumulate(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, part)), None

    nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(accumulate, nothing, micro)
    loss, grads = jax.tree.map(lambda x: x / MICRO_BATCHES, total)
    updates, opt_state = optimizer.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def main():
    digits = load_digits()
    samples = [
        {"image": (image / 16).astype(np.float32), "label": np.int32(label)}
        for image, label in zip(digits.data, digits.target, strict=True)
    ]
    source = batched(samples, BATCH, drop_last=True)
    _, summary = train_loop(train_step, init(jax.random.key(0)), source, num_steps=STEPS)
    print(summary)
    print(f"loss {summary.metrics['loss']:.3f} after {summary.steps} steps of {MICRO_BATCHES} micro-batches")


if __name__ == "__main__":
    main()
