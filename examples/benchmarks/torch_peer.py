"""PyTorch as a peer: methods that are measured in its own process, in the rounds of the others.

with torch_peer.started(gpus=1) as torch:
    contest.round([peers.resident(), torch.resident("uint8", net, tiny=False)], log=print)
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from budget import Budget
from peers import Method, Unavailable

ANSWER_TIMEOUT_S = 100
SCRIPT = Path(__file__).with_name("torch_process.py")
RESIDENT = "torch resident"


class Torch:
    """A running `torch_process.py`, where PyTorch is installed."""

    def __init__(self, gpus: int, errors):
        self._gpus = gpus
        self._errors = errors
        self._process: subprocess.Popen | None = None
        if importlib.util.find_spec("torch"):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self._process = subprocess.Popen([sys.executable, SCRIPT], text=True, **pipes)

    def copy(self, megabytes: float, *, back: bool = False) -> Method:
        """A pinned `non_blocking` copy, to the devices or back: the limit of the link."""
        request = {"do": "copy", "megabytes": megabytes, "gpus": self._gpus, "back": back}
        return self._method("torch pinned copy", request)

    def train(self, how: str, dtype: str, net, tiny: bool) -> Method:
        """AlexNet's loop in PyTorch, on one GPU: "resident", or fed by a `DataLoader` with `how` workers."""
        name = RESIDENT if how == "resident" else f"torch DataLoader(pin_memory), {how} workers"
        request = {"do": "train", "how": how, "dtype": dtype, "net": dataclasses.asdict(net), "tiny": tiny}
        return self._method(name, request, one_gpu=True)

    def _method(self, name: str, request: dict, one_gpu: bool = False) -> Method:
        def measure(budget: Budget, pace_ms: float | None) -> dict:
            if self._process is None:
                raise Unavailable("not installed")
            if one_gpu and self._gpus > 1:
                raise Unavailable("one GPU only")
            return self._ask(self._process, request | {"budget": dataclasses.asdict(budget), "pace_ms": pace_ms})

        return Method(name, package="torch", base=RESIDENT, measure=measure)

    def _ask(self, process: subprocess.Popen, request: dict) -> dict:
        watch = threading.Timer(ANSWER_TIMEOUT_S, process.kill)
        watch.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it is dead, and readline says so
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise RuntimeError(f"PyTorch's process ended, or took more than {ANSWER_TIMEOUT_S} s: {self._last_words()}")
        answer = json.loads(line)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        if "error" in answer:
            raise RuntimeError(f"in PyTorch's process: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "no message"

    def stop(self) -> None:
        """Ends the process."""
        if self._process:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()


@contextlib.contextmanager
def started(gpus: int) -> Iterator[Torch]:
    """Yields what PyTorch's methods are made from; its process ends with the context."""
    with tempfile.TemporaryFile("w+") as errors:
        torch = Torch(gpus, errors)
        try:
            yield torch
        finally:
            torch.stop()
