"""Trains a Flax Linen model on handwritten digits, evaluates every epoch, and keeps the best checkpoint.

    python examples/train_linen.py

Needs `pip install "jaxprefetch[demo,train]"`. JAXPREFETCH_SHORT=1 trains for fewer epochs.
"""

import functools
import os
import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

from jaxprefetch import Checkpoints, evaluate, train_loop

EPOCHS = 4 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 20
TRAIN, BATCH = 1_440, 96  # of 1,797 examples; the rest is held out


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(128)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


class Trained(TrainState):
    key: jax.Array  # of the dropout: part of the state, so that a resumed run draws the same


def load():
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    split = [{"image": images[i : i + BATCH], "label": labels[i : i + BATCH]} for i in range(0, len(images), BATCH)]
    return split[: TRAIN // BATCH], split[TRAIN // BATCH :]


def create(model):
    params = model.init(jax.random.key(0), jnp.ones((1, 64)))["params"]
    return Trained.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3), key=jax.random.key(1))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    key, dropout = jax.random.split(state.key)

    def loss_of(params):
        logits = state.apply_fn({"params": params}, batch["image"], train=True, rngs={"dropout": dropout})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads, key=key), {"loss": loss}


@jax.jit
def eval_step(state, batch):  # one value a row; `evaluate` leaves the padding out
    logits = state.apply_fn({"params": state.params}, batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return {"loss": loss, "accuracy": logits.argmax(axis=-1) == batch["label"]}


def main():
    train, held_out = load()
    epoch = len(train)
    evaluate_state = functools.partial(evaluate, eval_step, source=held_out)
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(folder, max_to_keep=2, best_metric="eval/accuracy") as checkpoints,
    ):
        _, summary = train_loop(
            train_step,
            create(Classifier()),
            train,
            num_steps=EPOCHS * epoch,
            resume="replay",
            log_every_steps=epoch,
            hooks=lambda step, metrics: print(f"epoch {step // epoch}:", {k: round(v, 4) for k, v in metrics.items()}),
            eval_fn=evaluate_state,
            eval_every_steps=epoch,
            checkpoints=checkpoints,
            save_every_steps=epoch,
        )
        print(summary)
        best, step = checkpoints.restore(create(Classifier()), step=checkpoints.best_step)
        print(f"best after epoch {step // epoch}:", evaluate_state(best))


if __name__ == "__main__":
    main()
