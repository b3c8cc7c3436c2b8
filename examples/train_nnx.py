"""Trains a Flax NNX model on handwritten digits with `train_loop`, over all devices, and logs each step to a CSV file.

    python examples/train_nnx.py

Needs `pip install "jaxprefetch[demo]"`. JAXPREFETCH_SHORT=1 trains for fewer steps.
"""

import os
import tempfile

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from jaxprefetch import evaluate, train_loop
from jaxprefetch.writers import CSVWriter

STEPS = 60 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 300
TRAIN, BATCH = 1_440, 96  # of 1,797 examples; the rest is held out


def load():
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    split = [{"image": images[i : i + BATCH], "label": labels[i : i + BATCH]} for i in range(0, len(images), BATCH)]
    return split[: TRAIN // BATCH], split[TRAIN // BATCH :]


def loss_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


@nnx.jit
def update(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    return {"loss": loss}


@nnx.jit
def accuracy(model, batch):
    return {"accuracy": model(batch["image"]).argmax(axis=-1) == batch["label"]}  # one value a row


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    train, held_out = load()

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), replicated))

    def step(state, batch):  # the model and its optimizer are updated themselves
        return state, update(*state, batch)

    with tempfile.TemporaryDirectory() as folder:
        log = CSVWriter(f"{folder}/log.csv")
        _, summary = train_loop(step, (model, optimizer), train, num_steps=STEPS, sharding=split, hooks=log)
        log.close()
    print(summary)
    print(evaluate(accuracy, model, held_out, sharding=split))


if __name__ == "__main__":
    main()
