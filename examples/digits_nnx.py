"""Trains a small Flax NNX model on handwritten digits, with batches prefetched to all devices.

    python examples/digits_nnx.py

Needs `pip install "jaxprefetch[demo]"`. JAXPREFETCH_SHORT=1 trains for fewer epochs.
"""

import os

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from jaxprefetch import prefetch_to_device

EPOCHS = 4 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 15
TRAIN = 1_440  # of 1,797; the rest is held out


class ShuffledBatches:
    """Goes through the data in a new order each time it is iterated, noise added."""

    def __init__(self, images, labels, batch_size):
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        order = self.rng.permutation(len(self.images))
        for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
            chosen = order[start : start + self.batch_size]
            noise = self.rng.normal(0, 0.1, (self.batch_size, 64)).astype(np.float32)
            yield {"image": self.images[chosen] + noise, "label": self.labels[chosen]}


@nnx.jit
def train_step(model, optimizer, batch):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    batch_size = 96 // mesh.size * mesh.size
    source = ShuffledBatches(images[:TRAIN], labels[:TRAIN], batch_size)

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), replicated))

    with prefetch_to_device(source, size=2, sharding=split) as batches:
        for epoch in range(EPOCHS):
            losses = [train_step(model, optimizer, batch) for batch in batches]
            print(f"epoch {epoch + 1}: loss {np.mean(jax.device_get(losses)):.3f}")
        print(batches.statistics().verdict)

    held_out = jax.device_put(images[TRAIN:], replicated)
    print(f"held-out accuracy: {np.mean(model(held_out).argmax(axis=-1) == labels[TRAIN:]):.3f}")


if __name__ == "__main__":
    main()
