"""Trains on handwritten digits that lie on the devices as a whole: nothing is copied while it trains.

    python examples/digits_resident.py

Needs `pip install scikit-learn` beside JAX. JAXPREFETCH_SHORT=1 trains for fewer epochs.
"""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from jaxprefetch import DeviceCache

EPOCHS = 5 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 20
TRAIN = 1_440  # of 1,797; the rest is held out


@jax.jit
def train_step(params, batch):
    def loss_of(params):
        images = batch["image"].astype(jnp.float32) / 16  # a byte a pixel in the cache
        log_probs = jax.nn.log_softmax(images @ params["w"] + params["b"])
        return -jnp.mean(jnp.take_along_axis(log_probs, batch["label"][:, None], axis=1))

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    digits = load_digits()
    images, labels = digits.data.astype(np.uint8), digits.target.astype(np.int32)
    params = jax.device_put({"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}, replicated)

    rows = TRAIN // mesh.size * mesh.size
    with DeviceCache(rows, {"image": images[:rows], "label": labels[:rows]}, sharding=split) as cache:
        print(f"{len(cache):,} digits, {cache.nbytes:,} bytes on each device")
        batch_size = 96 // mesh.size * mesh.size
        batches = cache.batches(batch_size, jax.random.key(0), replace=False)
        for epoch in range(EPOCHS):
            for batch in itertools.islice(batches, rows // batch_size):
                params, loss = train_step(params, batch)
            print(f"epoch {epoch + 1}: loss {float(loss):.3f}")

    predicted = np.argmax(images[TRAIN:] / 16 @ np.asarray(params["w"]) + np.asarray(params["b"]), axis=1)
    print(f"held-out accuracy: {np.mean(predicted == labels[TRAIN:]):.3f}")


if __name__ == "__main__":
    main()
