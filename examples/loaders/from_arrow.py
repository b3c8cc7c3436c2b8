"""A Parquet file, read batch by batch: lists of fixed size are the rows of an array.

    python examples/loaders/from_arrow.py

Needs `pip install pyarrow scikit-learn` beside JAX.
"""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step

from jaxprefetch import prefetch_to_device


class Passes:
    """`iter_batches` is a generator of one pass; here is a new one for each."""

    def __init__(self, path):
        self.path = path

    def __iter__(self):
        return pyarrow.parquet.ParquetFile(self.path).iter_batches(batch_size=64)


def main():
    w = WEIGHTS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.parquet"
        images = pa.FixedSizeListArray.from_arrays(pa.array(IMAGES.ravel()), 64)
        pyarrow.parquet.write_table(pa.table({"image": images, "label": LABELS}), path)
        with prefetch_to_device(Passes(path), last_batch="drop") as batches:
            for _ in range(3):
                for batch in batches:
                    w = train_step(w, batch)
    print(accuracy(w))


if __name__ == "__main__":
    main()
