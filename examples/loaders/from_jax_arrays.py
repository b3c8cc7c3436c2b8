"""Batches that JAX makes itself: arrays on a device are passed on, ahead of the step that needs them.

    python examples/loaders/from_jax_arrays.py

Needs `pip install scikit-learn` beside JAX.
"""

import jax
import jax.numpy as jnp
from digits import IMAGES, LABELS, WEIGHTS, accuracy, train_step

from jaxprefetch import prefetch_to_device


@jax.jit
def noisy(key, images, labels):
    """Rows drawn at random, with noise."""
    rows = jax.random.randint(key, 64, 0, len(labels))
    return {"image": images[rows] + jax.random.normal(key, (64, 64)), "label": labels[rows]}


def main():
    images, labels = jnp.asarray(IMAGES, jnp.float32), jnp.asarray(LABELS)
    made = (noisy(key, images, labels) for key in jax.random.split(jax.random.key(0), 80))
    w = WEIGHTS
    with prefetch_to_device(made) as batches:
        for batch in batches:
            w = train_step(w, batch)
    print(accuracy(w))


if __name__ == "__main__":
    main()
