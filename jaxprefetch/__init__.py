"""Batches that are already on their devices when the training loop asks for them.

Synopsis:

    from jaxprefetch import prefetch_to_device

    with prefetch_to_device(loader, size=2, sharding=sharding) as batches:
        for batch in batches:
            state, metrics = train_step(state, batch)
"""

from jaxprefetch.cache import DeviceCache
from jaxprefetch.checkpoints import Checkpoints
from jaxprefetch.evaluation import evaluate
from jaxprefetch.fetch import HostFetcher, fetch_to_host
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
    "TrainSummary",
    "WritesBatches",
    "batched",
    "evaluate",
    "fetch_to_host",
    "prefetch_to_device",
    "train_loop",
]
__version__ = "0.1.0"
