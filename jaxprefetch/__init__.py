"""Batches that are already on their devices when the training loop asks for them.

Synopsis:

    from jaxprefetch import prefetch_to_device

    with prefetch_to_device(loader, size=2, sharding=sharding) as batches:
        for batch in batches:
            state, metrics = train_step(state, batch)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxprefetch.cache import DeviceCache
    from jaxprefetch.checkpoints import Checkpoints
    from jaxprefetch.evaluation import evaluate
    from jaxprefetch.fetch import HostFetcher, fetch_to_host
    from jaxprefetch.host.inbox import QueueClosed
    from jaxprefetch.host.source import WritesBatches
    from jaxprefetch.loop import TrainSummary, train_loop
    from jaxprefetch.prefetch import prefetch_to_device
    from jaxprefetch.prefetcher import DevicePrefetcher
    from jaxprefetch.queue import DeviceQueue
    from jaxprefetch.samples import batched
    from jaxprefetch.sampling import CacheBatches
    from jaxprefetch.statistics import PrefetchStatistics

__all__ = [
    "CacheBatches",
    "Checkpoints",
    "DeviceCache",
    "DevicePrefetcher",
    "DeviceQueue",
    "HostFetcher",
    "PrefetchStatistics",
    "QueueClosed",
    "TrainSummary",
    "WritesBatches",
    "batched",
    "evaluate",
    "fetch_to_host",
    "prefetch_to_device",
    "train_loop",
]
__version__ = "0.1.0"

_WHERE = {
    "CacheBatches": "sampling",
    "Checkpoints": "checkpoints",
    "DeviceCache": "cache",
    "DevicePrefetcher": "prefetcher",
    "DeviceQueue": "queue",
    "HostFetcher": "fetch",
    "PrefetchStatistics": "statistics",
    "QueueClosed": "host.inbox",
    "TrainSummary": "loop",
    "WritesBatches": "host.source",
    "batched": "samples",
    "evaluate": "evaluation",
    "fetch_to_host": "fetch",
    "prefetch_to_device": "prefetch",
    "train_loop": "loop",
}


def __getattr__(name: str) -> Any:
    """Imports what is behind a name when it is first asked for: the whole takes longer than a package may."""
    if name == "writers":
        return importlib.import_module(f"{__name__}.writers")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "writers"})
