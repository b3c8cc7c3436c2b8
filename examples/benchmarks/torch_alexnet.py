"""AlexNet in PyTorch: the layers, the data types and the optimiser of `alexnet.py`, as PyTorch runs them best.

    trainer = torch_alexnet.Trainer(batch=1024, pixels=227, classes=1000, width=1)
    trainer.choose({"image": image, "label": label})            # compiled or not, whichever is quicker
    trainer.step({"image": image, "label": label})

bfloat16 autocast, channels last, `cudnn.benchmark`, a fused SGD with momentum. Images come as `(rows, pixels, pixels,
3)`, as for JAX, and are seen as channels-last without a copy.
"""

from __future__ import annotations

import time
import traceback

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
CONVOLUTIONS = (
    (96, 11, 4, 0, True),
    (256, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)
"""Channels, kernel, stride, padding, and whether a pool follows."""


def model(classes: int, width: int) -> nn.Sequential:
    """Returns five convolutions and three dense layers; `width` divides every channel count."""
    layers: list[nn.Module] = []
    for channels, kernel, stride, padding, pool in CONVOLUTIONS:
        layers += [nn.LazyConv2d(channels // width, kernel, stride, padding), nn.ReLU()]
        if pool:
            layers.append(nn.MaxPool2d(3, 2))
    layers.append(nn.Flatten())
    for _ in range(2):
        layers += [nn.Dropout(0.5), nn.LazyLinear(4096 // width), nn.ReLU()]
    return nn.Sequential(*layers, nn.LazyLinear(classes))


class Trainer:
    """A model, its optimiser, and the step that trains it on the first GPU, or on the CPU where there is none."""

    def __init__(self, batch: int, pixels: int, classes: int, width: int):
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda:0" if self.on_gpu else "cpu")
        self.shape = (batch, pixels, pixels, 3)
        net = model(classes, width)
        net(torch.zeros(1, 3, pixels, pixels))  # the lazy layers learn their sizes
        self._net = net.to(self.device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=1e-3, momentum=0.9, fused=self.on_gpu or None)
        self._normalised = normalised

    def step(self, batch: Batch) -> torch.Tensor:
        """Trains on a batch that lies on the device; returns the loss."""
        image = self._normalised(batch["image"])
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self._net(image)
        loss = nn.functional.cross_entropy(logits.float(), batch["label"].long())
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def wait(self) -> None:
        """Waits until the device has done all that was given to it."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def choose(self, batch: Batch) -> dict[str, object]:
        """Takes `torch.compile` if it is quicker on `batch`; returns the milliseconds of both, or what kept it."""
        eager = self._normalised, self._net
        found: dict[str, object] = {"eager_ms": self._time(batch)}
        try:
            self._normalised, self._net = torch.compile(normalised), torch.compile(self._net)
            found["compiled_ms"] = self._time(batch)
        except Exception as error:
            found["not_compiled"] = "".join(traceback.format_exception_only(error)).strip()[:300]
        found["compiled"] = found.get("compiled_ms", float("inf")) < found["eager_ms"]
        if not found["compiled"]:
            self._normalised, self._net = eager
        return found

    def _time(self, batch: Batch, steps: int = 4) -> float:
        """Milliseconds of a step, the best of three times."""
        for _ in range(3):
            self.step(batch)
        seconds = []
        for _ in range(3):
            self.wait()
            start = time.perf_counter()
            for _ in range(steps):
                self.step(batch)
            self.wait()
            seconds.append(time.perf_counter() - start)
        return 1e3 * min(seconds) / steps


def normalised(image: torch.Tensor) -> torch.Tensor:
    """Returns the image `(rows, 3, pixels, pixels)` as bfloat16 around zero; uint8 counts in 255ths."""
    scale = 1 / 255 if image.dtype == torch.uint8 else 1.0
    return (image.permute(0, 3, 1, 2).float() * scale - 0.45).bfloat16() * 4
