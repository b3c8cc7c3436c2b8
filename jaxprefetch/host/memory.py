"""How much host memory this process may take, and how many cores.

Synopsis:

    available_bytes()                   # what is free now, within the limits of the container; None where nobody tells
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

DEFAULT_SHARE = 0.25
"""Of what is free, for batches that wait: several processes may share a host."""

LEAST_DEFAULT_BYTES = 256 << 20
"""However little is free, the limit that nobody asked for lets some batches wait."""

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def default_host_bytes(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """The limit where none is given; None where nobody tells what is free."""
    free = available_bytes(proc=proc, cgroup=cgroup)
    return None if free is None else max(int(free * DEFAULT_SHARE), LEAST_DEFAULT_BYTES)


def available_bytes(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that are free, by the system and by the control groups of this process.

    References: "Memory Interface Files" of the kernel's cgroup-v2.rst, "Stat file" of its cgroup-v1/memory.rst.
    """
    groups = map(_free_in_group, _groups("memory", proc, cgroup))
    free = [n for n in (_free_in_system(proc), *groups) if n is not None]
    return min(free) if free else None


def usable_cores(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Cores that this process may run on: its affinity, and the quotas of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [n for n in map(_cores_of_group, _groups("cpu", proc, cgroup)) if n is not None]
    return min(cores, *quotas) if quotas else cores


def _groups(controller: str, proc: Path, cgroup: Path) -> Iterator[Path]:
    """Folders of the process's own group and of all above it, of version 2 and of version 1.

    In a container the path may be the host's, of which only the root is to be seen; that is then the container's own.
    """
    paths: dict[str, str] = {}  # by controller; version 2 has one path, without a name
    for line in _read(proc / "self" / "cgroup").splitlines():
        names, path = line.split(":", 2)[1:]
        paths |= dict.fromkeys(names.split(","), path)
    for name in ("", controller):
        parts = PurePosixPath(paths.get(name, "/")).parts[1:]
        for depth in range(0 if ".." in parts else len(parts), -1, -1):  # "..": outside of what is mounted here
            yield cgroup.joinpath(name, *parts[:depth])


def _free_in_system(proc: Path) -> int | None:
    kib = _field(proc / "meminfo", "MemAvailable:")
    return None if kib is None else kib * 1024


def _free_in_group(folder: Path) -> int | None:
    """What the group's limit leaves; the files it has read but not used lately are dropped by the kernel at need."""
    limit, used, cached = _number(folder / "memory.max"), _number(folder / "memory.current"), "inactive_file"
    if limit is None:
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        cached = "total_inactive_file"
    if limit is None or used is None:
        return None
    return max(limit - max(used - (_field(folder / "memory.stat", cached) or 0), 0), 0)


def _cores_of_group(folder: Path) -> int | None:
    quota, period = _number(folder / "cpu.max"), _number(folder / "cpu.max", 1)
    if quota is None:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return max(1, quota // period) if quota and period else None


def _number(path: Path, position: int = 0) -> int | None:
    """A number in the file; None where there is none, or `max` or -1, which are no limit."""
    words = _read(path).split()[position:]
    return int(words[0]) if words and words[0].isdigit() else None


def _field(path: Path, name: str) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
