"""Sources for `jaxprefetch` that make their batches in its slots: whole ones, or sample by sample.

source = sources.ReadsInto(host_batches)
source.element_spec, source.read_into(out)                  # a tree of ShapeDtypeStruct; the number of rows
source = jaxprefetch.batched(sources.samples(host_batches), sources.rows(host_batches))
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax
import numpy as np
from pinned import Batch, HostBatches


class ReadsInto:
    """A source that writes each slot when it first sees it, and from then on finds it written.

    So it costs nothing in the long run, as little as the sources of the other methods, whose arrays are there from the
    start. What is measured is the way from the slot to the device.
    """

    def __init__(self, batches: HostBatches):
        self._turns = batches.forever()
        self._seen: set[int] = set()
        self._name = next(iter(batches.batches[0]))
        self._rows = rows(batches)
        self.element_spec = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batches.batches[0].items()
        }

    def read_into(self, out: Batch) -> int:
        """Writes the next batch to `out`, unless that slot holds one already; returns its rows."""
        address = out[self._name].ctypes.data
        if address not in self._seen:
            self._seen.add(address)
            for name, leaf in next(self._turns).items():
                np.copyto(out[name], leaf)
        return self._rows


def rows(batches: HostBatches) -> int:
    """Returns the rows of one batch, for all devices together."""
    return len(next(iter(batches.batches[0].values())))


def samples(batches: HostBatches) -> Iterator[Batch]:
    """Yields the rows of the batches, one sample after the other, without an end."""
    made = [
        {name: leaf[row, ...] for name, leaf in batch.items()}
        for batch in batches.batches
        for row in range(rows(batches))
    ]
    return itertools.cycle(made)
