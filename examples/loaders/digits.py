"""What the examples beside this file train: softmax regression of handwritten digits.

Needs `pip install scikit-learn` beside JAX.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES, LABELS = IMAGES.astype(np.float32), LABELS.astype(np.int32)  # (1797, 64), (1797,)
WEIGHTS = np.zeros((64, 10), np.float32)


@jax.jit
def train_step(w, batch):
    """The weights after one batch: `{"image": (rows, 64), "label": (rows,)}`."""

    def loss(w):
        logits = jax.nn.log_softmax(batch["image"].astype(jnp.float32) / 16 @ w)
        return -jnp.take_along_axis(logits, batch["label"][:, None], axis=1).mean()

    return w - 0.5 * jax.grad(loss)(w)


def accuracy(w):
    """How many of all digits these weights tell right."""
    return f"{float(((IMAGES / 16 @ w).argmax(-1) == LABELS).mean()):.0%} of the digits are told right"
