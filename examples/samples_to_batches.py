"""Single samples stacked to batches where they are sent from, and rows of a file that are read right into them.

    python examples/samples_to_batches.py

Needs `pip install scikit-learn` beside JAX. JAXPREFETCH_SHORT=1 takes fewer samples.
"""

import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from jaxprefetch import batched, prefetch_to_device

SAMPLES = 500 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 1_797


def decoded(images, labels):
    """Sample by sample, as a decoder would give them: any iterable of pytrees will do."""
    for image, label in zip(images, labels, strict=True):
        yield {"image": image.reshape(8, 8), "label": label}


class Rows:
    """The rows of a file. `read_into` writes each batch into the memory that it is sent from: one copy, none after."""

    def __init__(self, path, batch_size):
        self.rows, self.batch_size, self.at = np.load(path, mmap_mode="r"), batch_size, 0

    @property
    def element_spec(self):
        return {"image": jax.ShapeDtypeStruct((self.batch_size, *self.rows.shape[1:]), self.rows.dtype)}

    def read_into(self, out):
        rows = self.rows[self.at : self.at + self.batch_size]
        out["image"][: len(rows)] = rows
        self.at += len(rows)
        return len(rows)  # fewer than a batch at the end, then 0


@jax.jit
def add(total, batch):
    """Sums of the images of each digit; padded rows go to an eleventh."""
    label = jnp.where(batch["mask"], batch["label"], 10)
    return total.at[label].add(batch["image"])


@jax.jit
def brightness(batch):
    return batch["image"].sum()


def main():
    digits = load_digits()
    images, labels = digits.data[:SAMPLES].astype(np.float32), digits.target[:SAMPLES].astype(np.int32)

    total = jnp.zeros((11, 8, 8))
    with prefetch_to_device(batched(decoded(images, labels), 128), last_batch="pad") as batches:
        for batch in batches:
            total = add(total, batch)
    means = total[:10] / np.bincount(labels, minlength=10)[:, None, None]
    closest = jnp.abs(images.reshape(-1, 1, 64) - means.reshape(1, 10, 64)).sum(-1).argmin(-1)
    print(
        f"{SAMPLES} samples in batches; {float((closest == labels).mean()):.0%} are closest to the mean of their digit"
    )

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "digits.npy")
        np.save(path, images)
        with prefetch_to_device(Rows(path, 128), last_batch="pad") as batches:
            sums = [brightness(batch) for batch in batches]
    print(f"mean pixel, read from a file in {len(sums)} batches: {sum(map(float, sums)) / images.size:.3f}")
    print(f"the same in memory: {images.mean():.3f}")


if __name__ == "__main__":
    main()
