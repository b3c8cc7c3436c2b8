"""The processes that share the arrays of one prefetcher, and the name under which they find each other.

Synopsis:

    group = Group.of(devices, uneven="error")        # None: all devices are this process's
    agreement = group.begin_pass(service)            # of the first pass; then of the second
    group.leave(service)                             # the prefetcher is closed

Names come from counting: every process has to make its prefetchers over the same processes in the same order.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from jaxprefetch.processes.agreement import MOST_PROCESSES, Agreement
from jaxprefetch.processes.service import Service
from jaxprefetch.processes.verdict import Uneven

_made: collections.Counter[tuple[int, ...]] = collections.Counter()


class Group:
    """The processes of one prefetcher. Used by one thread at a time.

    Attributes:
        process: this one.
        devices: one of each process, in order of the processes.
        processes: all of them, in order.
        uneven: what becomes of sources of different length.
    """

    def __init__(self, process: int, devices: Iterable[Any], uneven: Uneven):
        first = {device.process_index: device for device in sorted(devices, key=lambda device: -device.id)}
        self.devices = tuple(first[number] for number in sorted(first))
        self.process, self.processes = process, tuple(sorted(first))
        self.uneven: Uneven = uneven
        if len(self.processes) > MOST_PROCESSES:
            raise ValueError(f"sharding: {len(self.processes)} processes; at most {MOST_PROCESSES} can agree.")
        number, _made[self.processes] = _made[self.processes], _made[self.processes] + 1
        members = ",".join(map(str, self.processes))
        if self.processes == tuple(range(self.processes[0], self.processes[-1] + 1)):
            members = f"{self.processes[0]}-{self.processes[-1]}"
        self._folder = f"jaxprefetch/{members}/{number}"
        self._passes = 0

    @staticmethod
    def of(devices: Iterable[Any], uneven: Uneven) -> Group | None:
        """The processes of these devices; None where there is nobody to agree with."""
        devices = set(devices)
        here = next((device.process_index for device in devices if _is_here(device)), None)
        alone = len({device.process_index for device in devices}) == 1
        return None if here is None or alone else Group(here, devices, uneven)

    def begin_pass(self, service: Service) -> Agreement:
        """What this process has to do with the next pass."""
        last = f"{self._folder}/{self._passes - 1}" if self._passes else None
        folder, self._passes = f"{self._folder}/{self._passes}", self._passes + 1
        return Agreement(service, folder, self.process, self.processes, last)

    def leave(self, service: Service) -> None:
        """This process will not use the keys any more; the last one to say so deletes them."""
        if service.add(f"{self._folder}/left", 1, {}) == len(self.processes):
            service.delete(self._folder)


def _is_here(device: Any) -> bool:
    return device.process_index == device.client.process_index()
