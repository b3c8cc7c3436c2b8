"""Hugging Face datasets that lie in a table, shuffled from a seed, in NumPy's form.

    python examples/loaders/from_huggingface_table.py

Needs `pip install datasets scikit-learn` beside JAX.
"""

import datasets
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step

from jaxprefetch import prefetch_to_device


def main():
    columns = {"image": IMAGES.tolist(), "label": LABELS.tolist(), "name": ["digit"] * len(LABELS)}
    rows = datasets.Dataset.from_dict(columns)
    rows = rows.remove_columns("name")  # strings stay at home
    w, count = WEIGHTS, 0
    with prefetch_to_device(rows.shuffle(seed=0).with_format("numpy").batch(64, drop_last_batch=True)) as batches:
        for _ in range(3):  # epochs
            for batch in batches:
                w = train_step(w, batch)
                count += 1
    print(f"{count} batches;", accuracy(w))


if __name__ == "__main__":
    main()
