"""AlexNet's throughput under each method, as a share of the throughput with batches that lie on the devices already.

results = {}
throughput.alexnet_part(settings, results, log=print)
results["float32"]["methods"]["jaxprefetch, pinned, size 2"]["share"]["median"]
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import alexnet
import environment
import jax
import numpy as np
import peers
import pinned
import timing
import torch_peer
from budget import Budget, measured
from environment import Settings

from jaxprefetch.host.slots import ALIGNMENT, Slot, Slots

DTYPES = {"uint8": np.uint8, "float32": np.float32}
Log = Callable[[str], None]

SECONDS = 170
SLOTS = 8
"""As many as ours may make, and their memory has to be there."""
WORKERS = ("0", "4")
"""Worker processes of PyTorch's loader: without them it pins the batches in the loop, with them in a thread."""


def methods(torch: torch_peer.Torch, dtype: str, net: alexnet.Net, tiny: bool) -> list[peers.Method]:
    """All methods in the order of a round; the resident loop comes twice, to be near each."""
    return [
        peers.resident(),
        *(peers.ours(how) for how in ("pageable", "read_into", "batched", "pinned")),
        *(peers.ours(how, native=False) for how in ("pageable", "batched")),
        peers.plain(),
        peers.plain("pinned"),
        peers.double_buffer(),
        peers.resident(),
        peers.flax(),
        peers.grain(),
        peers.grain("pinned"),
        peers.datarax(),
        *(torch.train(how, dtype, net, tiny) for how in ("resident", *(("0", "1") if tiny else WORKERS))),
    ]


def synchronising_methods() -> list[peers.Method]:
    """The methods for a loop that waits for its loss in every step."""
    return [
        peers.resident(),
        peers.ours("pageable"),
        peers.ours("pinned"),
        peers.plain(),
        peers.plain("pinned"),
        peers.flax(),
    ]


def alexnet_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures a loop that runs ahead, with uint8 and float32 images."""
    net = _net(settings)
    with torch_peer.started(settings.gpus) as torch:

        def run(dtype: str, turns: timing.Turns) -> None:
            contenders = methods(torch, dtype, net, settings.tiny)
            _contest(settings, dtype, contenders, turns, (results, log), limit=True)

        timing.share_out(["uint8"] if settings.tiny else list(DTYPES), settings.rounds, SECONDS, run)


def sync_part(settings: Settings, results: dict, log: Log) -> None:
    """Measures a loop that waits for its loss in every step, with uint8 images."""
    turns = timing.Turns(settings.rounds, SECONDS)
    _contest(settings, "uint8", synchronising_methods(), turns, (results, log), sync=True)


def _contest(
    settings: Settings, dtype: str, contenders, turns: timing.Turns, to: tuple, sync: bool = False, limit: bool = False
) -> None:
    results, log = to
    place, net = environment.place(settings.gpus), _net(settings)
    step = alexnet.train_step(net, place)
    with pinned.both(net.spec(DTYPES[dtype], settings.gpus), 4, place.client) as host:
        log(f"{dtype}: batches of {host['pinned'].nbytes / environment.MIB:.1f} MiB, pinned: {host['pinned'].pinned}")
        pinned.touch(SLOTS * host["pinned"].nbytes)
        loop = timing.Loop(lambda: alexnet.make_state(net, place), step)
        about = {"batch_bytes": host["pinned"].nbytes // settings.gpus, "pinned": host["pinned"].pinned}
        contest = timing.Contest(timing.in_loop(loop, host, place, settings.budget(), sync), about)
        contenders = [*contenders, _copying(host["pageable"])] if limit else contenders
        try:
            contest.run(dtype, contenders, turns, results, log)
        finally:
            if dtype in results:
                results[dtype]["loss_is_finite"] = _loss_is_finite(loop)


def _copying(host: pinned.HostBatches) -> peers.Method:
    """Copies from ordinary arrays to where they are sent from: no loop that is fed with them can be faster."""

    def measure(budget: Budget, pace_ms: float | None) -> dict:
        slots = Slots()
        views = [_views(slots.take(host.nbytes + (1 << 16)), host.batches[0]) for _ in range(2)]

        def run(count: int) -> float:
            start = time.perf_counter()
            for batch, out in itertools.islice(zip(host.forever(), itertools.cycle(views)), count):
                slots.copier.copy([(out[name], leaf) for name, leaf in batch.items()])
            return time.perf_counter() - start

        return measured(run, budget, pace_ms)

    return peers.Method("copies on the host alone", measure=measure)


def _views(slot: Slot, batch: pinned.Batch) -> pinned.Batch:
    views, offset = {}, 0
    for name, leaf in batch.items():
        views[name] = slot.view(offset, leaf.dtype, leaf.shape)
        offset += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT
    return views


def _net(settings: Settings) -> alexnet.Net:
    return alexnet.tiny() if settings.tiny else alexnet.full()


def _loss_is_finite(loop: timing.Loop) -> bool:
    leaves = jax.tree.leaves(loop.state["params"])
    return all(bool(np.isfinite(np.asarray(leaf.ravel()[:100])).all()) for leaf in leaves)
