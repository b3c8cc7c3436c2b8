"""Grain: a data set that is shuffled, batched and goes on where it was.

    python examples/loaders/from_grain.py

Needs `pip install grain scikit-learn` beside JAX.
"""

import grain
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step

from jaxprefetch import prefetch_to_device


def data():
    rows = [{"image": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)]
    return grain.MapDataset.source(rows).seed(0).shuffle().batch(64, drop_remainder=True)


def main():
    w = WEIGHTS
    with prefetch_to_device(data()) as batches:
        for _ in range(10):
            w = train_step(w, next(batches))
        state = batches.get_state()
    with prefetch_to_device(data()) as batches:  # in another process, say
        batches.set_state(state)
        left = 0
        for batch in batches:
            w = train_step(w, batch)
            left += 1
    print(f"{left} batches were left;", accuracy(w))


if __name__ == "__main__":
    main()
