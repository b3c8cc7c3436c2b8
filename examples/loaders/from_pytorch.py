"""PyTorch's DataLoader with worker processes, which a fork server starts: JAX has threads already.

    python examples/loaders/from_pytorch.py

Needs `pip install torch scikit-learn` beside JAX.
"""

import torch
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step
from torch.utils.data import DataLoader

from jaxprefetch import prefetch_to_device


class Digits(torch.utils.data.Dataset):
    """Images as bfloat16, which arrives bit by bit."""

    def __init__(self):
        self.images, self.labels = torch.tensor(IMAGES).bfloat16(), torch.tensor(LABELS)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


def main():
    loader = DataLoader(
        Digits(),
        64,
        shuffle=True,
        drop_last=True,
        num_workers=1,
        multiprocessing_context="forkserver",
        persistent_workers=True,
    )
    w = WEIGHTS
    with prefetch_to_device(loader) as batches:
        for _ in range(3):
            for batch in batches:
                w = train_step(w, batch)
    print(accuracy(w))


if __name__ == "__main__":
    main()
