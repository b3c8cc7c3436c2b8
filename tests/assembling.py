"""Sources that write their batches themselves, and slots that are reused on the CPU, with what is sent from them.

sent = Sent(monkeypatch)                     # prefetchers made from now on have slots
source = Rows({"x": images}, batch_size=8)   # read_into copies rows of these arrays
sent.addresses                               # where the arrays of each batch lay when they were put, and
sent.nbytes                                  # how large they were
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxprefetch import prefetch
from jaxprefetch.device.plan import Plan
from jaxprefetch.host.slots import Slots
from jaxprefetch.staging import Stager


def address(array: np.ndarray) -> int:
    """Where the array begins."""
    return array.__array_interface__["data"][0]


class Sent:
    """What is put, and where it lay; a copy of it goes to the device, which would read the slot itself on a CPU."""

    def __init__(self, monkeypatch: Any):
        self.slots = Slots()
        self.addresses: list[list[int]] = []
        self.nbytes: list[list[int]] = []
        put = Plan.put

        def noted(plan: Plan, leaves: Any) -> list[Any]:
            sent = [i for i in (*plan.offsets, *plan.by_shard) if isinstance(leaves[i], np.ndarray)]
            self.addresses.append([address(leaves[i]) for i in sent])
            self.nbytes.append([leaves[i].nbytes for i in sent])
            return put(plan, [np.array(leaf) if i in sent else leaf for i, leaf in enumerate(leaves)])

        monkeypatch.setattr(Plan, "put", noted)
        monkeypatch.setattr(
            prefetch, "stager", lambda placement, options, limit: Stager(placement, options, self.slots)
        )

    def free(self) -> int:
        """Slots that can be taken without mapping more."""
        return sum(map(len, self.slots._free.values()))


class Reads:
    """An iterator that writes its batches: rows of arrays, in order.

    Attributes:
        written: where the arrays lay that were written into, by batch.
        calls: how often `read_into` was called.
    """

    def __init__(self, arrays: Any, batch_size: int):
        self.arrays, self.batch_size = arrays, batch_size
        self.at = self.calls = 0
        self.written: list[list[int]] = []
        self.closed = False

    @property
    def element_spec(self) -> Any:
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct((self.batch_size, *array.shape[1:]), array.dtype), self.arrays
        )

    def read_into(self, out: Any) -> int:
        self.calls += 1
        rows = min(self.batch_size, len(jax.tree.leaves(self.arrays)[0]) - self.at)
        for target, array in zip(jax.tree.leaves(out), jax.tree.leaves(self.arrays), strict=True):
            target[:rows] = array[self.at : self.at + rows]
        self.written.append([address(target) for target in jax.tree.leaves(out)])
        self.at += rows
        return rows

    def __iter__(self) -> Reads:
        return self

    def __next__(self) -> Any:
        raise AssertionError("read_into is there")

    def close(self) -> None:
        self.closed = True


class Rows:
    """A source of these that can be gone through again; keeps its passes."""

    def __init__(self, arrays: Any, batch_size: int):
        self.arrays, self.batch_size = arrays, batch_size
        self.passes: list[Reads] = []

    def __iter__(self) -> Iterator[Any]:
        self.passes.append(Reads(self.arrays, self.batch_size))
        return self.passes[-1]
