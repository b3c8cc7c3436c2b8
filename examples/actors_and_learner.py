"""Actor threads play a small game, and a learner trains on what they put into a `DeviceQueue`: no thread moves arrays.

    python examples/actors_and_learner.py

Needs JAX only. JAXPREFETCH_SHORT=1 trains for fewer steps. The game: a hidden rule says which of four buttons pays off
for what is on the screen; the actors press buttons by the newest policy, the learner reinforces what paid off.
"""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import DeviceQueue, QueueClosed

STEPS = 60 if os.environ.get("JAXPREFETCH_SHORT") == "1" else 400
ACTORS, ROWS, SCREEN, BUTTONS = 4, 256, 8, 4
RULE = np.random.default_rng(0).standard_normal((SCREEN, BUTTONS)).astype(np.float32)


class Policy:
    """The newest weights, on the host, where actors look them up."""

    def __init__(self, weights):
        self.weights = weights


def act(seed, policy, queue):
    """Plays until the queue is closed. The queue bounds how far the actors are ahead of the learner."""
    try:
        play(np.random.default_rng(seed), policy, queue)
    except QueueClosed:  # the learner is done
        pass
    finally:  # an actor that fails ends the others, and the learner's wait
        queue.close()


def play(rng, policy, queue):
    """Puts one batch after the other."""
    while True:
        screen = rng.standard_normal((ROWS, SCREEN), np.float32)
        noise = rng.gumbel(size=(ROWS, BUTTONS)).astype(np.float32)
        pressed = np.argmax(screen @ policy.weights + noise, axis=1).astype(np.int32)
        reward = (pressed == np.argmax(screen @ RULE, axis=1)).astype(np.float32)
        queue.put({"screen": screen, "pressed": pressed, "reward": reward})


@jax.jit
def learn(weights, batch):
    """A step of REINFORCE."""

    def loss_of(weights):
        log_probs = jax.nn.log_softmax(batch["screen"] @ weights)
        chosen = jnp.take_along_axis(log_probs, batch["pressed"][:, None], axis=1)[:, 0]
        return -jnp.mean(chosen * (batch["reward"] - batch["reward"].mean()))

    return weights - 3 * jax.grad(loss_of)(weights), batch["reward"].mean()


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    policy = Policy(np.zeros((SCREEN, BUTTONS), np.float32))
    weights = jax.device_put(policy.weights, replicated)

    with DeviceQueue(4, sharding=split, max_bytes="1GiB") as queue:
        actors = [threading.Thread(target=act, args=(seed, policy, queue)) for seed in range(ACTORS)]
        for actor in actors:
            actor.start()
        for step in range(STEPS):
            weights, reward = learn(weights, queue.get())
            if step % 10 == 0:
                policy.weights = np.asarray(weights)
            if step % (STEPS // 4) == 0:
                print(f"step {step}: {float(reward):.2f} of the buttons pay off")
    for actor in actors:
        actor.join()
    print(f"step {STEPS}: {float(reward):.2f} of the buttons pay off")


if __name__ == "__main__":
    main()
