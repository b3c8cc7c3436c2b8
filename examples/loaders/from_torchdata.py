"""torchdata's StatefulDataLoader: left in the middle of a pass, it goes on there.

    python examples/loaders/from_torchdata.py

Needs `pip install torchdata scikit-learn` beside JAX.
"""

import torch
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step
from torchdata.stateful_dataloader import StatefulDataLoader

from jaxprefetch import prefetch_to_device


def loader():
    rows = [{"image": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)]
    generator = torch.Generator().manual_seed(0)
    return StatefulDataLoader(rows, 64, shuffle=True, drop_last=True, generator=generator)


def main():
    w = WEIGHTS
    with prefetch_to_device(loader()) as batches:
        for _ in range(10):
            w = train_step(w, next(batches))
        state = batches.get_state()
    with prefetch_to_device(loader()) as batches:  # in another process, say
        batches.set_state(state)
        left = 0
        for batch in batches:
            w = train_step(w, batch)
            left += 1
    print(f"{left} batches were left;", accuracy(w))


if __name__ == "__main__":
    main()
