"""PyTorch in a process of its own: it answers requests for measurements, so that they can take turns with JAX's.

    python torch_process.py             # reads one JSON request a line, answers each with one JSON line
    {"do": "copy", "megabytes": 64, "gpus": 1, "back": false, "budget": {...}, "pace_ms": null}
    {"do": "train", "how": "resident", "dtype": "uint8", "net": {...}, "tiny": false, "budget": {...}, "pace_ms": null}

`torch_peer.py` is the other end. Between requests it waits and uses neither the GPU nor the link.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator

import budget
import torch
from budget import Budget
from torch_alexnet import Batch, Trainer

DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
COUNT = 2


class Copies:
    """Pinned `non_blocking` copies between host memory and device memory that is there already: the link's limit."""

    def __init__(self):
        self._size: tuple[float, int] | None = None

    def measure(self, megabytes: float, gpus: int, back: bool, settings: Budget, pace_ms: float | None) -> dict:
        """Copies `megabytes` to all GPUs at once, or back; returns milliseconds for one such batch, or why not."""
        if torch.cuda.device_count() < gpus:
            return {"unavailable": f"PyTorch sees {torch.cuda.device_count()} GPUs"}
        if self._size != (megabytes, gpus):
            values = int(megabytes * 250_000)
            self._hosts = [torch.rand(values).pin_memory() for _ in range(gpus)]
            self._devices = [torch.empty(values, device=f"cuda:{i}") for i in range(gpus)]
            self._size = (megabytes, gpus)
        targets, sources = (self._hosts, self._devices) if back else (self._devices, self._hosts)
        return budget.measured(lambda count: self._run(targets, sources, count), settings, pace_ms)

    def _run(self, targets: list[torch.Tensor], sources: list[torch.Tensor], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        for device in self._devices:
            torch.cuda.synchronize(device.device)
        return time.perf_counter() - start


class Endless(torch.utils.data.Dataset):
    """A data set of very many ready batches: the same few in turn."""

    def __init__(self, batches: list[Batch]):
        self._batches = batches

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index % len(self._batches)]


class Training:
    """AlexNet, fed with resident batches or by a `DataLoader`."""

    def __init__(self):
        self._trainer: Trainer | None = None
        self._dtype: str | None = None
        self._batches: list[Batch] = []
        self._choice: dict[str, object] = {}

    def measure(self, how: str, dtype: str, net: dict, tiny: bool, settings: Budget, pace_ms: float | None) -> dict:
        """Trains; returns milliseconds of a step, and whether it is compiled.

        Args:
            how: "resident", or the number of the loader's worker processes.
            dtype: of the images.
            net: sizes, as `Trainer` takes them.
            tiny: nothing is compiled.
            settings: steps of the measurement.
            pace_ms: of the round before.
        """
        self._prepare(dtype, net, tiny)
        batches = self._resident() if how == "resident" else self._loaded(int(how))
        try:
            return self._choice | budget.measured(lambda count: self._run(batches, count), settings, pace_ms)
        finally:
            batches.close()
            gc.collect()  # ends the loader's processes

    def _prepare(self, dtype: str, net: dict, tiny: bool) -> None:
        if self._trainer is None:
            self._trainer = Trainer(**net)
        if self._dtype == dtype:
            return
        rows = net["batch"]
        self._batches = [
            {"image": _random(self._trainer.shape, DTYPES[dtype]), "label": torch.randint(0, net["classes"], (rows,))}
            for _ in range(COUNT)
        ]
        self._dtype = dtype
        if not (self._choice or tiny):
            self._choice = self._trainer.choose(next(self._resident()))

    def _resident(self) -> Generator[Batch, None, None]:
        batches = [{name: leaf.to(self._trainer.device) for name, leaf in batch.items()} for batch in self._batches]
        yield from itertools.cycle(batches)

    def _loaded(self, workers: int) -> Generator[Batch, None, None]:
        if workers:
            self._share()
        loader = torch.utils.data.DataLoader(
            Endless(self._batches),
            batch_size=None,  # the data set's items are batches already
            num_workers=workers,
            pin_memory=self._trainer.on_gpu,
        )
        for batch in loader:
            yield {name: leaf.to(self._trainer.device, non_blocking=True) for name, leaf in batch.items()}

    def _share(self) -> None:
        """Puts the batches into shared memory, so that a worker hands them over without a copy of its own."""
        room = os.statvfs("/dev/shm")
        missing = sum(leaf.nbytes for batch in self._batches for leaf in batch.values() if not leaf.is_shared())
        if missing > 0.9 * room.f_bavail * room.f_frsize:
            raise RuntimeError(f"/dev/shm has no room for {missing >> 20} MiB")
        for batch in self._batches:
            for leaf in batch.values():
                leaf.share_memory_()

    def _run(self, batches: Iterator[Batch], count: int) -> float:
        start = time.perf_counter()
        for batch in itertools.islice(batches, count):
            self._trainer.step(batch)
        self._trainer.wait()
        return time.perf_counter() - start


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=dtype) if dtype == torch.uint8 else torch.rand(shape)


def main() -> None:
    """Answers requests until the input ends. Whatever else is printed goes to the error output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    actions: dict[str, Callable[..., dict]] = {"copy": Copies().measure, "train": Training().measure}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = actions[request.pop("do")](settings=Budget(**request.pop("budget")), **request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": "".join(traceback.format_exception_only(error)).strip()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
