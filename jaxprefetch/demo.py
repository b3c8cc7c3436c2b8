"""The demo: one model trained twice on the same batches, without and with `prefetch_to_device`.

    python -m jaxprefetch demo

Handwritten digits (scikit-learn carries them) are drawn at a larger size under random rotation, zoom, shift and noise,
on the host, and classified by a small Flax NNX model on all devices there are. Both runs take the same steps from the
same start. Both read the loss after every step, as loops that show it do, so that a device that waits for input really
waits, and the time inside `next()` is just that. Compilation is outside of the timing. JAXPREFETCH_SHORT=1 shortens it.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from jaxprefetch import PrefetchStatistics, prefetch_to_device

STEPS, SHORT_STEPS = 300, 60
BATCH_SIZE = 128  # rounded down to a multiple of the devices
SIDE = 32  # pixels of the images drawn from the 8x8 originals
SEED = 0

Batch = dict[str, Any]


# --- the data ---------------------------------------------------------------------------------------------------------


def draw(images: np.ndarray, angle: np.ndarray, zoom: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """The images, `(n, 8, 8)`, drawn at `(n, SIDE, SIDE, 1)`, each under its own rotation, zoom and shift.

    Args:
        images: values from 0 to 1.
        angle: radians, `(n,)`.
        zoom: above 1 is larger, `(n,)`.
        shift: down and right, in image widths, `(2, n)`.
    """
    grid = (np.arange(SIDE, dtype=np.float32) + 0.5) / SIDE - 0.5
    down, right = np.meshgrid(grid, grid, indexing="ij")
    cos, sin = (f(angle)[:, None, None] / zoom[:, None, None] for f in (np.cos, np.sin))
    n, height, width = images.shape
    rows = (cos * down - sin * right - shift[0][:, None, None]) * height + (height - 1) / 2
    columns = (sin * down + cos * right - shift[1][:, None, None]) * width + (width - 1) / 2
    which = np.broadcast_to(np.arange(n, dtype=rows.dtype)[:, None, None], rows.shape)
    return ndimage.map_coordinates(images, [which, rows, columns], output=np.float32, order=1)[..., None]


@dataclass(frozen=True)
class AugmentedDigits:
    """Batches of augmented digits. Each pass over them yields the same ones, drawn anew on the host."""

    images: np.ndarray
    labels: np.ndarray
    batch_size: int
    steps: int

    def __iter__(self) -> Iterator[Batch]:
        rng = np.random.default_rng(SEED)
        n = self.batch_size
        for _ in range(self.steps):
            chosen = rng.integers(0, len(self.images), n)
            images = draw(
                self.images[chosen],
                angle=rng.uniform(-0.3, 0.3, n),
                zoom=rng.uniform(0.8, 1.1, n),
                shift=rng.uniform(-0.1, 0.1, (2, n)),
            )
            images += rng.normal(0, 0.1, images.shape)
            yield {"image": images, "label": self.labels[chosen]}


def load(batch_size: int, steps: int) -> tuple[AugmentedDigits, Batch]:
    """The training batches, and the held-out digits as one batch, drawn without augmentation."""
    digits: Any = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)
    parts: Any = train_test_split(images, labels, test_size=0.2, random_state=SEED, stratify=labels)
    train, held, train_labels, held_labels = parts
    n = len(held)
    held_images = draw(held, angle=np.zeros(n), zoom=np.ones(n), shift=np.zeros((2, n)))
    return AugmentedDigits(train, train_labels, batch_size, steps), {"image": held_images, "label": held_labels}


# --- the model --------------------------------------------------------------------------------------------------------


class Classifier(nnx.Module):
    """Three convolutions and a linear layer."""

    def __init__(self, rngs: nnx.Rngs):
        def conv(inputs: int, outputs: int) -> nnx.Conv:
            return nnx.Conv(inputs, outputs, kernel_size=(3, 3), strides=2, rngs=rngs)

        self.conv1, self.conv2, self.conv3 = conv(1, 12), conv(12, 24), conv(24, 48)
        self.linear = nnx.Linear((SIDE // 8) ** 2 * 48, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for conv in (self.conv1, self.conv2, self.conv3):
            x = nnx.relu(conv(x))
        return self.linear(x.reshape(len(x), -1))


def make_model(replicated: NamedSharding) -> tuple[Classifier, nnx.Optimizer]:
    """A model and its optimizer, the same each time, with a copy on every device."""
    model = Classifier(nnx.Rngs(SEED))
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), replicated))
    return model, optimizer


@nnx.jit
def train_step(model: Classifier, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """One step; returns the loss."""

    def loss_of(model: Classifier) -> jax.Array:
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model: Classifier, batch: Batch) -> jax.Array:
    """The share of the batch that the model classifies rightly."""
    return (model(batch["image"]).argmax(axis=-1) == batch["label"]).mean()


# --- the two runs -----------------------------------------------------------------------------------------------------


class PutInTheLoop:
    """The plain loop: each batch is made and put when it is asked for. Counts the bytes it has on a device."""

    def __init__(self, source: Iterable[Batch], sharding: NamedSharding):
        self.most_bytes = 0
        self._source, self._sharding = source, sharding
        self._put: list[weakref.ref[jax.Array]] = []

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._source:
            batch = jax.device_put(batch, self._sharding)
            self._put += [weakref.ref(array) for array in batch.values()]
            alive = [array for ref in self._put if (array := ref()) is not None]
            self._put = [weakref.ref(array) for array in alive]
            self.most_bytes = max(self.most_bytes, sum(map(_bytes_on_a_device, alive)))
            del alive
            yield batch


def _bytes_on_a_device(array: jax.Array) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


@dataclass(frozen=True)
class Result:
    """What one run measured."""

    steps_per_s: float
    waiting: float  # share of the time
    last_loss: float
    accuracy: float


def train(name: str, batches: Iterable[Batch], steps: int, held_out: Batch, replicated: NamedSharding) -> Result:
    """Trains a new model on `batches`, then tells how fast that was and how well it does on `held_out`."""
    model, optimizer = make_model(replicated)
    loss, waited = math.nan, 0.0
    with tqdm(total=steps, desc=name, unit="step", disable=None) as bar:
        started = time.perf_counter()
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(iterator, None)
            got = time.perf_counter()
            waited += got - asked
            if batch is None:
                break
            loss = float(train_step(model, optimizer, batch))
            waiting = waited / (time.perf_counter() - started)
            bar.set_postfix(loss=f"{loss:.3f}", waiting=f"{waiting:.0%}", refresh=False)
            bar.update()
        seconds = time.perf_counter() - started
    return Result(steps / seconds, waited / seconds, loss, float(accuracy(model, held_out)))


def main() -> None:
    """Runs the demo and prints its table."""
    steps = SHORT_STEPS if os.environ.get("JAXPREFETCH_SHORT") == "1" else STEPS
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("data",))
    split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    source, held_out = load(BATCH_SIZE // len(devices) * len(devices), steps)
    held_out = jax.device_put(held_out, replicated)
    print(
        f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), JAX {jax.__version__}: "
        f"{steps} steps of {source.batch_size} augmented digits, split over the devices"
    )

    model, optimizer = make_model(replicated)  # compiles both functions, for both runs
    train_step(model, optimizer, jax.device_put(next(iter(source)), split)).block_until_ready()
    accuracy(model, held_out).block_until_ready()

    plain = PutInTheLoop(source, split)
    without = train("device_put in the loop", plain, steps, held_out, replicated)
    print(f"device_put in the loop: held-out accuracy {without.accuracy:.3f}")
    with prefetch_to_device(source, size=2, sharding=split) as batches:
        with_prefetch = train("prefetch_to_device", batches, steps, held_out, replicated)
        statistics = batches.statistics()
    print(f"prefetch_to_device: held-out accuracy {with_prefetch.accuracy:.3f}\n")
    print(table(without, with_prefetch, plain.most_bytes, statistics))


def table(without: Result, with_prefetch: Result, plain_bytes: int, statistics: PrefetchStatistics) -> str:
    """Both runs side by side, and what they amount to."""
    both = without, with_prefetch
    held = statistics.peak_bytes_in_flight, statistics.bytes_bound
    rows = [
        ("", "device_put in the loop", "prefetch_to_device"),
        ("steps per second", *(f"{run.steps_per_s:.1f}" for run in both)),
        ("time waiting for input", *(f"{run.waiting:.1%}" for run in both)),
        ("held-out accuracy", *(f"{run.accuracy:.4f}" for run in both)),
        ("last loss", *(f"{run.last_loss:.6f}" for run in both)),
        ("most bytes in flight, a device", f"{plain_bytes:,}, no bound", "{:,} of at most {:,}".format(*held)),
    ]
    ratio = with_prefetch.steps_per_s / without.steps_per_s
    lines = [f"{what:<32}{first:>24}{second:>34}" for what, first, second in rows]
    lines += ["", f"With prefetching, {ratio:.2f} times the steps per second{'' if ratio >= 1 else ': slower here'}."]
    lines += ["One run came after the other: whatever else the machine did meanwhile is in these figures too."]
    return "\n".join([*lines, f"Verdict: {statistics.verdict}"])
