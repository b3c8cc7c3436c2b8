"""What a benchmark runs on: its devices, its sizes, and the versions that go into every result.

place = environment.place(gpus=2)
batch = jax.device_put(host_batch, place.sharding)
"""

from __future__ import annotations

import contextlib
import datetime
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax
import numpy as np
from budget import Budget
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "llvmlite"),
    *("flax", "optax", "grain", "datarax", "torch"),
)
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Settings:
    """How much is measured: the command line, as the parts see it."""

    gpus: int
    tiny: bool
    rounds: int
    seconds: float
    out: Path
    sources: tuple[str, ...]

    def budget(self, seconds: float | None = None) -> Budget:
        """The steps of one measurement: `--tiny` allows three, whatever else is asked for."""
        if self.tiny:
            return Budget(most=3, least=3, seconds=1.0, warm=2)
        return Budget(most=2000, least=8, seconds=seconds or self.seconds)

    def per_device(self, size: int, tiny_size: int) -> int:
        """`size`, or `tiny_size` under `--tiny`."""
        return tiny_size if self.tiny else size


@dataclass(frozen=True)
class Place:
    """The devices of a run, as a mesh with the one axis "data"."""

    devices: tuple[jax.Device, ...]
    sharding: NamedSharding
    replicated: NamedSharding

    @property
    def client(self):
        """The runtime client of the devices; its `dma_map` registers host memory, where it has one."""
        return self.devices[0].client

    def bytes_in_use(self, key: str = "bytes_in_use") -> int | None:
        """The largest `key` of the devices' memory statistics, in bytes; None where the backend keeps none."""
        stats = [device.memory_stats() for device in self.devices]
        return max(s[key] for s in stats) if all(s and key in s for s in stats) else None


def place(gpus: int) -> Place:
    """Returns the first `gpus` devices; on CPU, as many virtual ones are made."""
    with contextlib.suppress(RuntimeError):  # the backend is up already
        jax.config.update("jax_num_cpu_devices", gpus)
    devices = tuple(jax.devices()[:gpus])
    if len(devices) < gpus:
        raise RuntimeError(f"--gpus {gpus}: this machine has {len(devices)} devices.")
    mesh = Mesh(np.array(devices), ("data",))
    return Place(devices, NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec()))


def versions() -> dict[str, str]:
    """Returns the versions of Python and the packages that matter; what is missing is "not installed"."""
    import jaxprefetch

    found = {"python": platform.python_version(), "jaxprefetch": jaxprefetch.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def gpus() -> list[str]:
    """Returns name and driver of each GPU as `nvidia-smi` tells them, without touching JAX's backend."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def describe() -> dict[str, object]:
    """Returns everything about this machine that belongs beside a number."""
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.isoformat(timespec="seconds"),
        "versions": versions(),
        "gpus": gpus(),
        "platform": platform.platform(),
    }
