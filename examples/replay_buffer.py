"""A replay buffer on the devices: actors fill it in the background, and every step draws from it at random.

    python examples/replay_buffer.py

Needs JAX only. JAXPREFETCH_SHORT=1 trains for fewer steps. What is learnt is the value of the states of a random walk
that ends at one of two doors, of which one pays 1: it is the chance to come to that door.
"""

import os
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import DeviceCache

STEPS = 600 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 3_000
STATES, ACTORS, ROWS = 9, 2, 256  # states between the doors
SPEC = {
    "state": jax.ShapeDtypeStruct((), jnp.int32),
    "after": jax.ShapeDtypeStruct((), jnp.int32),
    "reward": jax.ShapeDtypeStruct((), jnp.float32),
}


def walk(rng):
    """Steps of as many walkers."""
    state = rng.integers(1, STATES + 1, ROWS, np.int32)
    after = state + rng.choice(np.array([-1, 1], np.int32), ROWS)
    return {"state": state, "after": after, "reward": (after == STATES + 1).astype(np.float32)}


def act(seed, made, done):
    """Puts what it sees into a queue of the host's until it is told to stop."""
    rng = np.random.default_rng(seed)
    while not done.is_set():
        try:
            made.put(walk(rng), timeout=0.1)
        except queue.Full:
            pass


@jax.jit
def learn(values, batch):
    """TD(0) on a batch; the doors themselves are worth nothing more."""
    error = batch["reward"] + values[batch["after"]] - values[batch["state"]]
    count = jnp.zeros_like(values).at[batch["state"]].add(jnp.ones_like(error))
    change = jnp.zeros_like(values).at[batch["state"]].add(error) / jnp.maximum(count, 1)
    return (values + 0.1 * change).at[jnp.array([0, STATES + 1])].set(0.0)


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    made, done = queue.Queue(8), threading.Event()
    actors = [threading.Thread(target=act, args=(seed, made, done)) for seed in range(ACTORS)]
    for actor in actors:
        actor.start()
    values = jax.device_put(np.zeros(STATES + 2, np.float32), replicated)
    try:
        with DeviceCache(32 * ROWS, SPEC, sharding=split, max_bytes="1GiB") as cache:
            cache.insert(made.get())  # something to begin with
            cache.refresh(iter(made.get, None), every_takes=2, deterministic=False)  # no step waits for an actor
            batches = cache.batches(ROWS, jax.random.key(0))
            for step in range(STEPS):
                values = learn(values, next(batches))
                if step % 20 == 0:
                    values.block_until_ready()  # XLA's CPU client can lock up where steps that exchange sums pile up
            print(f"{cache.takes} steps, {cache.refreshes} times {ROWS} new transitions, {len(cache):,} in the buffer")
    finally:
        done.set()
        for actor in actors:
            actor.join()
    expected = np.arange(1, STATES + 1) / (STATES + 1)
    print("values  ", np.round(np.asarray(values)[1:-1], 2))
    print("expected", np.round(expected, 2))


if __name__ == "__main__":
    main()
