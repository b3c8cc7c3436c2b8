"""A Python generator that fills the same arrays for each batch: what was delivered does not change.

    python examples/loaders/from_generator.py

Needs `pip install scikit-learn` beside JAX.
"""

import numpy as np
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step

from jaxprefetch import prefetch_to_device


def random_batches(seed, n):
    """`n` batches of rows drawn at random, all in the same memory."""
    rng = np.random.default_rng(seed)
    image, label = np.empty((64, 64), np.float32), np.empty(64, np.int32)
    for _ in range(n):
        rows = rng.integers(0, len(LABELS), 64)
        image[:], label[:] = IMAGES[rows], LABELS[rows]
        yield {"image": image, "label": label}


def main():
    w = WEIGHTS
    with prefetch_to_device(random_batches(seed=0, n=80)) as batches:  # one pass: a generator is spent then
        for batch in batches:
            w = train_step(w, batch)
    print(accuracy(w))


if __name__ == "__main__":
    main()
