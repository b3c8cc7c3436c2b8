"""Programs of several processes: a test file's scenarios, each run by all processes at once.

    SCENARIOS = Scenarios()

    @SCENARIOS.add
    def ends(rank: int, folder: Path) -> None: ...          # in every process; folder is shared

    reports = SCENARIOS.fixture(__file__, processes=2, devices=2)
    def test_ends(reports): reports.check("ends")

    if __name__ == "__main__":
        SCENARIOS.main()

The processes are started once for a file. What one does is written down as it ends: "right", or the traceback.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 110
Scenario = Callable[[int, Path], None]


class Reports:
    """What became of the scenarios."""

    def __init__(self, folder: Path, processes: int):
        self.folder, self._processes = folder, processes

    def check(self, name: str) -> None:
        """All processes got through this scenario with the right values."""
        for rank in range(self._processes):
            path = self.folder / f"{name} {rank}"
            output = (self.folder / f"output {rank}").read_text()[-5000:]
            told = path.read_text() if path.exists() else f"process {rank} did not get through {name}:\n{output}"
            assert told == "right", f"process {rank}: {told}"


class Scenarios(dict[str, Scenario]):
    """By name, in the order in which they are run."""

    def add(self, run: Scenario) -> Scenario:
        """Decorates one."""
        self[run.__name__] = run
        return run

    def fixture(self, file: str, *, processes: int, devices: int, pipes: tuple[str, ...] = ()) -> Any:
        """A fixture that runs them all, once for the file; `pipes` are made in the folder that they share."""

        @pytest.fixture(scope="module")
        def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
            folder = tmp_path_factory.mktemp("processes")
            for pipe in pipes:
                os.mkfifo(folder / pipe)
            run(file, folder, processes, devices)
            return Reports(folder, processes)

        return reports

    def main(self) -> None:
        """What a process does: all scenarios, or those that are named."""
        port, folder, processes, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
        faulthandler.dump_traceback_later(LIMIT_S - 5, exit=True)
        import jax

        jax.config.update("jax_numpy_dtype_promotion", "strict")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            address, processes, rank, initialization_timeout=LIMIT_S, coordinator_bind_address=address
        )
        for name, scenario in self.items():
            try:
                scenario(rank, folder)
            except Exception:
                (folder / f"{name} {rank}").write_text(traceback.format_exc())
            else:
                (folder / f"{name} {rank}").write_text("right")


def run(file: str, folder: Path, processes: int, devices: int, *more: str) -> list[int]:
    """Runs a file as so many processes with so many CPU devices each; returns their exit statuses."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, file, str(free_port()), str(folder), str(processes)]
    with contextlib.ExitStack() as stack:
        workers = []
        for rank in range(processes):
            output = stack.enter_context(open(folder / f"output {rank}", "w"))
            worker = subprocess.Popen([*arguments, str(rank), *more], env=environment, stdout=output, stderr=output)
            stack.callback(worker.wait)
            stack.callback(worker.kill)  # before the wait; without effect where the process has ended
            workers.append(worker)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for worker in workers:
                worker.wait(LIMIT_S)
        return [worker.poll() for worker in workers]


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
