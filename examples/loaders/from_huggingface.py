"""Hugging Face datasets: streamed in NumPy's form, left in the middle of a pass, and gone on with there.

    python examples/loaders/from_huggingface.py

Needs `pip install datasets scikit-learn` beside JAX.
"""

import datasets
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step

from jaxprefetch import prefetch_to_device


def data():
    """`load_dataset(..., streaming=True)` would do as well."""
    rows = datasets.Dataset.from_dict({"image": IMAGES.tolist(), "label": LABELS.tolist()})
    stream = rows.shuffle(seed=0).to_iterable_dataset(num_shards=4)
    return stream.with_format("numpy").batch(64, drop_last_batch=True)


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
