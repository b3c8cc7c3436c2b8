"""tf.data: shuffled, batched and augmented by TensorFlow, without a copy before it is staged.

    python examples/loaders/from_tfdata.py

Needs `pip install tensorflow-cpu scikit-learn` beside JAX.
"""

import tensorflow as tf
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step

from jaxprefetch import prefetch_to_device


def noisy(row):
    return {**row, "image": row["image"] + tf.random.normal([64])}


def main():
    rows = {"image": IMAGES, "label": LABELS}
    data = tf.data.Dataset.from_tensor_slices(rows).shuffle(2_000, seed=0).map(noisy).batch(64, drop_remainder=True)
    w = WEIGHTS
    with prefetch_to_device(data) as batches:
        for _ in range(3):
            for batch in batches:
                w = train_step(w, batch)
    print(accuracy(w))


if __name__ == "__main__":
    main()
