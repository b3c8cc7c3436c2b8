"""AlexNet's throughput under each method, as a share of the throughput with batches that lie on the devices already.

results = {}
throughput.alexnet_part(settings, results, log=print)
results["float32"]["methods"]["jaxprefetch, pinned, size 2"]["share"]["median"]
"""

from __future__ import annotations

from collections.abc import Callable

import alexnet
import environment
import jax
import numpy as np
import peers
import pinned
import timing
from environment import Settings

DTYPES = {"uint8": np.uint8, "float32": np.float32}
Log = Callable[[str], None]


def methods() -> list[peers.Method]:
    """All methods in the order of a round; the resident loop comes several times, to be near each."""
    return [
        peers.resident(),
        peers.ours("pinned"),
        peers.ours("pinned", delete_used=True),
        peers.ours("pinned", 3),
        peers.resident(),
        peers.ours("pinned", 3, delete_used=True),
        peers.ours("pageable"),
        peers.plain("pageable"),
        peers.plain("pinned"),
        peers.flax("pageable"),
        peers.flax("pinned"),
        peers.grain("pageable"),
        peers.grain("pinned"),
    ]


def synchronising_methods() -> list[peers.Method]:
    """The methods for a loop that waits for its loss in every step."""
    return [
        peers.resident(),
        peers.ours("pinned"),
        peers.ours("pageable"),
        peers.plain("pageable"),
        peers.plain("pinned"),
        peers.flax("pageable"),
    ]


def alexnet_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures a loop that runs ahead, with uint8 and float32 images."""
    for dtype in ["uint8"] if settings.tiny else DTYPES:
        _contest(settings, dtype, methods(), results, log, sync=False)


def sync_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures a loop that waits for its loss in every step, with uint8 images."""
    _contest(settings, "uint8", synchronising_methods(), results, log, sync=True)


def _contest(settings: Settings, dtype: str, contenders, results: dict, log: Log, sync: bool) -> None:
    place = environment.place(settings.gpus)
    net = alexnet.tiny() if settings.tiny else alexnet.full()
    step = alexnet.train_step(net, place)
    with pinned.both(net.spec(DTYPES[dtype], settings.gpus), 4, place.client) as host:
        log(f"{dtype}: batches of {host['pinned'].nbytes / environment.MIB:.1f} MiB, pinned: {host['pinned'].pinned}")
        loop = timing.Loop(lambda: alexnet.make_state(net, place), step)
        contest = timing.Contest(loop, place, host, settings.budget(), sync)
        about = {"batch_bytes": host["pinned"].nbytes // settings.gpus, "pinned": host["pinned"].pinned}
        for _ in range(settings.rounds):
            contest.round(contenders, lambda line: log(f"{dtype}: {line}"))
            results[dtype] = about | contest.results()
        results[dtype]["loss_is_finite"] = _loss_is_finite(loop)
        contest.check()


def _loss_is_finite(loop: timing.Loop) -> bool:
    leaves = jax.tree.leaves(loop.state["params"])
    return all(bool(np.isfinite(np.asarray(leaf.ravel()[:100])).all()) for leaf in leaves)
