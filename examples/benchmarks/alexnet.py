"""AlexNet in Flax with the training step that the benchmarks feed.

    net = alexnet.full()
    state = alexnet.make_state(net, place)
    state, loss = alexnet.train_step(net, place)(state, {"image": image, "label": label})

The layers are those of Krizhevsky et al. 2012 on one tower, without local response normalisation: 62 million
parameters, computed in bfloat16, kept in float32. Images arrive as uint8 in 0..255 or float32 in 0..1; the step casts
and normalises them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

OPTIMIZER = optax.sgd(1e-3, momentum=0.9)


@dataclass(frozen=True)
class Net:
    """Sizes of one AlexNet. `width` divides every channel count."""

    batch: int  # rows per device
    pixels: int
    classes: int
    width: int = 1

    def spec(self, dtype: type, devices: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and dtype of the leaves of one batch for `devices` devices."""
        rows = self.batch * devices
        return {"image": ((rows, self.pixels, self.pixels, 3), dtype), "label": ((rows,), np.int32)}


def full() -> Net:
    """1,024 images of 227 x 227 per device."""
    return Net(batch=1024, pixels=227, classes=1000)


def tiny() -> Net:
    """A net that a CPU trains in milliseconds."""
    return Net(batch=4, pixels=67, classes=10, width=16)


class AlexNet(nn.Module):
    """Five convolutions, three dense layers; images `(rows, pixels, pixels, 3)` in, logits `(rows, classes)` out."""

    classes: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels, kernel, stride, padding, pool in (
            (96, 11, 4, "VALID", True),
            (256, 5, 1, "SAME", True),
            (384, 3, 1, "SAME", False),
            (384, 3, 1, "SAME", False),
            (256, 3, 1, "SAME", True),
        ):
            conv = nn.Conv(
                channels // self.width, (kernel, kernel), (stride, stride), padding=padding, dtype=jnp.bfloat16
            )
            x = nn.relu(conv(x))
            if pool:
                x = nn.max_pool(x, (3, 3), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.Dropout(0.5, deterministic=False)(x)
            x = nn.relu(nn.Dense(4096 // self.width, dtype=jnp.bfloat16)(x))
        return nn.Dense(self.classes, dtype=jnp.bfloat16)(x).astype(jnp.float32)


def make_state(net: Net, place) -> dict[str, object]:
    """Returns parameters, momentum and step count, replicated over the devices."""

    def init():
        image = jnp.zeros((1, net.pixels, net.pixels, 3), jnp.bfloat16)
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = AlexNet(net.classes, net.width).init(keys, image)
        return {"params": params, "optimizer": OPTIMIZER.init(params), "step": jnp.int32(0)}

    return jax.jit(init, out_shardings=place.replicated)()


def train_step(net: Net, place) -> Callable:
    """Returns the jitted step: `(state, batch) -> (state, loss)`, the state donated.

    It takes a batch of `(rows, ...)` leaves, or of `(devices, rows, ...)` leaves as `flax.jax_utils` yields them.
    """
    model = AlexNet(net.classes, net.width)

    def step(state, batch):
        if batch["image"].ndim == 5:
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        image = normalised(batch["image"])
        key = jax.random.fold_in(jax.random.key(2), state["step"])

        def loss_of(params):
            logits = model.apply(params, image, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer, "step": state["step"] + 1}, loss

    return jax.jit(step, donate_argnums=0, out_shardings=(place.replicated, place.replicated))


def normalised(image: jax.Array) -> jax.Array:
    """Returns the image as bfloat16 around zero; uint8 counts in 255ths."""
    scale = 1 / 255 if image.dtype == jnp.uint8 else 1.0
    return (image.astype(jnp.float32) * scale - 0.45).astype(jnp.bfloat16) * 4
