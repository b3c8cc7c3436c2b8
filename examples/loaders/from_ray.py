"""Ray Data: its processes make the batches.

    python examples/loaders/from_ray.py

Needs `pip install "ray[data]" scikit-learn` beside JAX.
"""

import ray
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step

from jaxprefetch import prefetch_to_device


def scaled(batch):
    """Runs in Ray's processes."""
    return {"image": batch["image"].astype("float32"), "label": batch["label"]}


def main():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    rows = [{"image": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)]
    data = ray.data.from_items(rows, override_num_blocks=4).map_batches(scaled)
    w = WEIGHTS
    with prefetch_to_device(data.iter_batches(batch_size=64, drop_last=True)) as batches:
        for _ in range(3):
            for batch in batches:
                w = train_step(w, batch)
    print(accuracy(w))
    ray.shutdown()


if __name__ == "__main__":
    main()
