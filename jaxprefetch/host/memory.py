"""How much host memory this process may take.

Synopsis:

    available_bytes()                   # what is free now, within the limits of the container; None where nobody tells
"""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_SHARE = 0.25
"""Of what is free, for batches that wait: several processes may share a host."""

_CGROUP = Path("/sys/fs/cgroup")


def default_host_bytes() -> int | None:
    """The limit where none is given; None where nobody tells what is free."""
    free = available_bytes()
    return None if free is None else max(int(free * DEFAULT_SHARE), 1)


def available_bytes() -> int | None:
    """Bytes that are free, by the system and by the control group of this process."""
    free = [n for n in (_system(), _control_group()) if n is not None]
    return min(free) if free else None


def usable_cores() -> int:
    """Cores that this process may run on: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _system() -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_group() -> int | None:
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    return max(int(limit) - int(used), 0) if limit.isdigit() and used.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
