"""Two processes of which one goes: it returns from its loop, raises in it, never closes, or is killed.

This file is also the program of the processes; what it does is its last argument.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading

from several import run

HEARTBEAT_S = 5


def test_a_process_that_never_closes(tmp_path: pathlib.Path) -> None:
    """It ends well, and the other is told."""
    assert run(__file__, tmp_path, 2, 1, "returns") == [0, 0], outputs(tmp_path)
    assert ": process 1 has left the loop" in outputs(tmp_path)[0]


def test_a_process_that_never_closes_and_has_no_thread(tmp_path: pathlib.Path) -> None:
    """The same with `host_size=0`."""
    assert run(__file__, tmp_path, 2, 1, "returns without thread") == [0, 0], outputs(tmp_path)
    assert ": process 1 has left the loop" in outputs(tmp_path)[0]


def test_a_process_whose_step_raises(tmp_path: pathlib.Path) -> None:
    """It ends with its own error, and the other with one that names it."""
    assert run(__file__, tmp_path, 2, 1, "raises") == [0, 1], outputs(tmp_path)
    assert ": process 1 has left the loop" in outputs(tmp_path)[0]
    assert "FloatingPointError: the step has raised" in outputs(tmp_path)[1]


def test_a_process_that_is_killed(tmp_path: pathlib.Path) -> None:
    """JAX's own heartbeat ends the others, whatever they wait for; nothing of ours holds them back."""
    statuses = run(__file__, tmp_path, 2, 1, "killed")
    assert statuses[1] == -signal.SIGKILL, outputs(tmp_path)
    assert statuses[0] not in (0, None, -signal.SIGKILL), outputs(tmp_path)


def outputs(folder: pathlib.Path) -> list[str]:
    return [(folder / f"output {rank}").read_text() for rank in (0, 1)]


def main() -> None:
    port, processes, rank, what = sys.argv[1], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    import jax
    import numpy as np

    from jaxprefetch import prefetch_to_device

    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, processes, rank, coordinator_bind_address=address, heartbeat_timeout_seconds=HEARTBEAT_S
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

    def source():
        for number in range(100):
            if rank == 1 and number > 3 and "without" not in what:
                threading.Event().wait()  # it has no more than these
            yield np.full((2, 2), number, np.float32)

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    batches = prefetch_to_device(source(), sharding=sharding, host_size=4 * ("without" not in what))
    for _ in range(3):
        next(batches)
    if rank == 1:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raises":
            with batches:
                raise FloatingPointError("the step has raised")
        return
    try:
        for _ in batches:
            pass
    except RuntimeError as error:
        print("told:", error, flush=True)


if __name__ == "__main__":
    main()
