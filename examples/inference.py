"""Predicts with a Flax NNX model and writes what comes off the devices to a `.npy` memory map, while later steps run.

    python examples/inference.py

Needs `pip install "jaxprefetch[demo]"`. JAXPREFETCH_SHORT=1 goes through the data set fewer times.
"""

import os
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from jaxprefetch import fetch_to_host, prefetch_to_device

TIMES = 5 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 200
BATCH = 96  # rounded up to a multiple of the devices by last_batch="pad"


def batches_of(images):
    for start in range(0, len(images), BATCH):
        yield images[start : start + BATCH]


@nnx.jit
def predict(model, images, mask):
    return {"probability": nnx.softmax(model(images)), "real": mask}


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    images = np.tile((load_digits().data / 16).astype(np.float32), (TIMES, 1))

    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
    nnx.update(model, jax.device_put(nnx.state(model), replicated))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probabilities.npy"
        out = np.lib.format.open_memmap(path, "w+", np.float32, (len(images), 10))
        row = 0
        with prefetch_to_device(batches_of(images), sharding=split, last_batch="pad") as batches:
            predictions = (predict(model, *batch) for batch in batches)  # each step is dispatched when it is asked for
            for result in fetch_to_host(predictions):
                real = result["probability"][result["real"]]
                out[row : row + len(real)] = real
                row += len(real)
        out.flush()
        written = np.load(path, mmap_mode="r")
        expected = predict(model, jax.device_put(images[-10:], replicated), True)["probability"]
        assert row == len(images)
        np.testing.assert_allclose(written[-10:], expected, rtol=1e-5, atol=1e-6)
        print(f"{row:,} rows of {written.shape[1]} probabilities, {path.stat().st_size / 1e6:.1f} MB in {path.name}")


if __name__ == "__main__":
    main()
