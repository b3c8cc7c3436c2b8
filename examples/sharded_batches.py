"""Leaves of one batch that go to different places: split, replicated, kept on the host; and a short last batch.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu python examples/sharded_batches.py

Needs `pip install scikit-learn` beside JAX. JAXPREFETCH_SHORT=1 trains for fewer epochs.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

from jaxprefetch import prefetch_to_device

EPOCHS = 10 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 40
TRAIN = 1_440  # of 1,797; the rest is held out

# One entry a leaf; one for a whole subtree, or for all of the batch, would do as well. The mask that
# last_batch="pad" adds goes where the rows go.
SHARDING = {"image": P("data"), "label": P("data"), "class_weight": P(), "name": P()}


class Digits:
    """Batches of 100 rows; the last one has what is left. `name` is text, which no device can hold."""

    def __init__(self, images, labels, names):
        self.images, self.labels, self.names = images, labels, names
        self.class_weight = (len(labels) / 10 / np.bincount(labels, minlength=10)).astype(np.float32)

    def __iter__(self):
        for start in range(0, len(self.images), 100):
            rows = slice(start, start + 100)
            batch = {"image": self.images[rows], "label": self.labels[rows], "name": self.names[rows]}
            yield {**batch, "class_weight": self.class_weight}


def loss_of(params, batch):
    """The mean over real rows: padded ones weigh nothing, so a short batch gives the gradient of its own rows."""
    log_probs = jax.nn.log_softmax(batch["image"] @ params["w"] + params["b"])
    losses = -jnp.take_along_axis(log_probs, batch["label"][:, None], axis=-1)[:, 0]
    weights = batch["class_weight"][batch["label"]] * batch["mask"]
    return (losses * weights).sum() / weights.sum()


@jax.jit
def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss


@jax.jit
def wrong(params, batch):
    predicted = (batch["image"] @ params["w"] + params["b"]).argmax(axis=-1)
    return (predicted != batch["label"]) & batch["mask"]


def prefetch(source):
    return prefetch_to_device(source, sharding=SHARDING, keep_on_host="name", last_batch="pad")


def main():
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    names = np.array([f"digit-{i:04d}" for i in range(len(images))])
    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}

    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):  # gives the PartitionSpecs their devices
        with prefetch(Digits(images[:TRAIN], labels[:TRAIN], names[:TRAIN])) as batches:
            for key, spec in batches.element_spec.items():
                print(f"{key}: {spec.shape}, {spec.sharding.spec}" if key != "name" else "name: on the host")
            for _ in range(EPOCHS):
                for batch in batches:
                    params, loss = train_step(params, {key: batch[key] for key in batch if key != "name"})
        missed, rows = [], 0
        with prefetch(Digits(images[TRAIN:], labels[TRAIN:], names[TRAIN:])) as batches:
            for batch in batches:
                name, rows = batch.pop("name"), rows + int(batch["mask"].sum())
                missed += list(name[np.asarray(wrong(params, batch))[: len(name)]])
    print(f"last loss {float(loss):.3f}; of {rows} held-out rows {len(missed)} wrong, such as {', '.join(missed[:4])}")


if __name__ == "__main__":
    main()
