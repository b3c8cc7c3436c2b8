"""What is free for this process: its control groups and those above, without what the page cache holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxprefetch.host import memory

GIB = 1 << 30
NO_LIMIT = {2: "max", 1: 9223372036854771712}
NAMES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class System:
    """Files as the kernel shows them."""

    def __init__(self, folder: Path, version: int, path: str, free: int = 64 * GIB):
        self.version = version
        self.where = {"proc": folder / "proc", "cgroup": folder / "cgroup"}
        self._write(self.where["proc"] / "meminfo", f"MemTotal: 1 kB\nMemAvailable:   {free // 1024} kB\n")
        lines = f"0::{path}\n" if version == 2 else f"7:memory:{path}\n4:cpu,cpuacct:{path}\n0::/other\n"
        self._write(self.where["proc"] / "self" / "cgroup", lines)

    def memory(self, path: str, limit: object, used: int, cached: int) -> None:
        names = NAMES[self.version]
        folder = self._folder("memory", path)
        self._write(folder / names[0], f"{limit}\n")
        self._write(folder / names[1], f"{used}\n")
        self._write(folder / "memory.stat", f"anon 5\n{names[2]} {cached}\nunevictable 0\n")

    def cpu(self, path: str, cores: float | None) -> None:
        folder, quota = self._folder("cpu", path), None if cores is None else int(cores * 100_000)
        if self.version == 2:
            self._write(folder / "cpu.max", f"{'max' if quota is None else quota} 100000\n")
        else:
            self._write(folder / "cpu.cfs_quota_us", f"{-1 if quota is None else quota}\n")
            self._write(folder / "cpu.cfs_period_us", "100000\n")

    def _folder(self, controller: str, path: str) -> Path:
        root = self.where["cgroup"] / controller if self.version == 1 else self.where["cgroup"]
        return root / path.lstrip("/")

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


by_version = pytest.mark.parametrize("version", [2, 1])


@by_version
def test_the_page_cache_counts_as_free(version, tmp_path) -> None:
    """After a data set was read, the files that the group has in memory leave as much free as before."""
    system = System(tmp_path, version, "/")
    system.memory("/", 8 * GIB, used=8 * GIB - 1, cached=7 * GIB)
    assert memory.available_bytes(**system.where) == 7 * GIB + 1


@by_version
def test_the_groups_own_limit_is_found_by_its_path(version, tmp_path) -> None:
    """The limit of the group that the process is in counts, though the root has none."""
    system = System(tmp_path, version, "/jobs/mine")
    system.memory("/", NO_LIMIT[version], used=20 * GIB, cached=0)
    system.memory("/jobs/mine", 4 * GIB, used=GIB, cached=0)
    assert memory.available_bytes(**system.where) == 3 * GIB


@by_version
@pytest.mark.parametrize("tightest", ["/", "/jobs", "/jobs/mine"])
def test_the_tightest_of_a_group_and_those_above_counts(version, tightest, tmp_path) -> None:
    """Of the process's group and all above it the one that leaves least decides."""
    system = System(tmp_path, version, "/jobs/mine")
    for path in ("/", "/jobs", "/jobs/mine"):
        system.memory(path, 32 * GIB if path != tightest else 6 * GIB, used=2 * GIB, cached=GIB)
    assert memory.available_bytes(**system.where) == 5 * GIB


@by_version
@pytest.mark.parametrize("path", ["/docker/0123", "/../../system.slice"])
def test_a_path_that_is_not_to_be_seen_stands_for_the_root(version, path, tmp_path) -> None:
    """In a container that shows its own group as the root, the host's path of it is not looked for in vain."""
    system = System(tmp_path, version, path)
    system.memory("/", 2 * GIB, used=GIB, cached=0)
    assert memory.available_bytes(**system.where) == GIB


@by_version
def test_the_system_may_have_less_than_the_group_allows(version, tmp_path) -> None:
    """A limit is no promise: what the system has free counts if it is less."""
    system = System(tmp_path, version, "/", free=GIB)
    system.memory("/", 8 * GIB, used=0, cached=0)
    assert memory.available_bytes(**system.where) == GIB


def test_nobody_tells(tmp_path) -> None:
    """Without these files there is no figure, and no limit by default."""
    assert memory.available_bytes(proc=tmp_path, cgroup=tmp_path) is None
    assert memory.default_host_bytes(proc=tmp_path, cgroup=tmp_path) is None


@by_version
@pytest.mark.parametrize(("used", "default"), [(8 * GIB, 256 << 20), (0, 2 * GIB)], ids=["full", "empty"])
def test_the_default_has_a_floor(version, used, default, tmp_path) -> None:
    """The default is a quarter of what is free, and 256 MiB where the group is full."""
    system = System(tmp_path, version, "/")
    system.memory("/", 8 * GIB, used=used, cached=0)
    assert memory.default_host_bytes(**system.where) == default


@by_version
@pytest.mark.parametrize(
    ("own", "above", "cores"),
    [(None, None, 64), (3.5, None, 3), (None, 2, 2), (8, 2, 2), (0.5, 4, 1), (100, None, 64)],
)
def test_cores_by_the_tightest_quota(version, own, above, cores, tmp_path, monkeypatch) -> None:
    """Whole cores of the tightest quota of the group and those above count, one at least."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    system = System(tmp_path, version, "/jobs/mine")
    system.cpu("/jobs", above)
    system.cpu("/jobs/mine", own)
    assert memory.usable_cores(**system.where) == cores
