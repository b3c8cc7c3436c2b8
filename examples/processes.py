"""Several processes train together: each yields its own rows, of shards that are not of the same length.

    python examples/processes.py                    # on one machine: starts two processes with two CPU devices each

On a cluster the same program runs once for each process, and `jax.distributed.initialize` finds the others:

    Slurm       srun --nodes=2 --ntasks-per-node=4 --gpus-per-task=1 python examples/processes.py --cluster
    ssh         export JAX_COORDINATOR_ADDRESS=host0:1234 JAX_NUM_PROCESSES=2
                for i in 0 1; do
                    ssh host$i "cd $PWD; JAX_COORDINATOR_ADDRESS=$JAX_COORDINATOR_ADDRESS JAX_PROCESS_ID=$i" \\
                        "JAX_NUM_PROCESSES=$JAX_NUM_PROCESSES python examples/processes.py --cluster" &
                done; wait
    Kubernetes  a JobSet "train" whose replicatedJob "worker" is an Indexed Job, with this in its container:
                    command: [sh, -c, JAX_PROCESS_ID=$JOB_COMPLETION_INDEX python examples/processes.py --cluster]
                    env: JAX_COORDINATOR_ADDRESS  train-worker-0-0.train:1234
                         JAX_NUM_PROCESSES        as many as its completions

What to expect: `uneven="pad"` lets the process with fewer batches go on with padding until the others have ended too;
the mask leaves it out of the loss. Nobody waits in a collective for a process that has ended or failed.
"""

import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device

PROCESSES, DEVICES, ROWS = 2, 2, 64


def shard(process):
    """This process's batches: each has another number of them, and nobody knows how many before."""
    random = np.random.default_rng(process)
    weights = np.arange(8, dtype=np.float32)
    for _ in range(40 + 15 * process):
        x = random.normal(size=(ROWS, 8)).astype(np.float32)
        yield {"x": x, "y": x @ weights}


@jax.jit
def train_step(weights, batch):
    def loss_of(weights):
        errors = jnp.square(batch["x"] @ weights - batch["y"])
        return errors.mean(where=batch["mask"])  # over all processes

    loss, slopes = jax.value_and_grad(loss_of)(weights)
    return weights - 0.05 * slopes, loss


def train():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    weights = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec()))
    source = shard(jax.process_index())
    with prefetch_to_device(source, sharding=rows, last_batch="pad", uneven="pad") as batches:
        for steps, batch in enumerate(batches, 1):  # noqa: B007
            weights, loss = train_step(weights, batch)
    print(f"process {jax.process_index()} of {jax.process_count()}: {steps} steps, loss {loss:.2e}", flush=True)


def start_all():
    """Stands in for the cluster: two processes on this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, port]
    workers = [subprocess.Popen([*command, str(process)], env=environment) for process in range(PROCESSES)]
    return max(abs(worker.wait()) for worker in workers)


def main():
    if len(sys.argv) == 1:
        return start_all()
    if sys.argv[1] == "--cluster":
        given = {name: os.environ.get(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID")}
        number = {name.lower(): int(value) for name, value in given.items() if value is not None}
        jax.distributed.initialize(**number)  # JAX_COORDINATOR_ADDRESS it reads itself, the rest under Slurm, too
    else:
        address = f"127.0.0.1:{sys.argv[1]}"
        jax.distributed.initialize(address, PROCESSES, int(sys.argv[2]), coordinator_bind_address=address)
    return train()


if __name__ == "__main__":
    sys.exit(main())
