"""NumPy's files: slices of a memory map, which are read while they are copied, and the arrays of an .npz.

    python examples/loaders/from_files.py

Needs `pip install scikit-learn` beside JAX.
"""

import tempfile
from pathlib import Path

import numpy as np
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step

from jaxprefetch import prefetch_to_device


class Slices:
    """Batches of consecutive rows, anew in each pass."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __iter__(self):
        for at in range(0, len(self.labels), 64):
            yield {"image": self.images[at : at + 64], "label": self.labels[at : at + 64]}


def main():
    w = WEIGHTS
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "images.npy", IMAGES)
        np.savez(Path(folder) / "labels.npz", label=LABELS)
        images, labels = np.load(Path(folder) / "images.npy", mmap_mode="r"), np.load(Path(folder) / "labels.npz")
        with labels, prefetch_to_device(Slices(images, labels["label"]), last_batch="drop") as batches:
            for _ in range(3):
                for batch in batches:
                    w = train_step(w, batch)
    print(accuracy(w))


if __name__ == "__main__":
    main()
