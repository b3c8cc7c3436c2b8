"""Who pulls batches in a pass: a thread or the loop itself, and what several processes agree on.

Synopsis:

    reading = Reading(host_size=4, max_host_bytes=None, group=Group.of(devices, "error"))
    reader = reading.begin_pass(Pipeline(source, stager), context, source, stager)
    reading.close()
"""

from __future__ import annotations

import contextlib

from jaxprefetch.host.inline import Inline
from jaxprefetch.host.pipeline import EnterContext, Pipeline
from jaxprefetch.host.reader import Reader
from jaxprefetch.host.resume import ResumableSource
from jaxprefetch.processes.cards import Cards, gone
from jaxprefetch.processes.gate import Gate
from jaxprefetch.processes.gathered import Gathered
from jaxprefetch.processes.group import Group
from jaxprefetch.processes.service import Service
from jaxprefetch.processes.skipping import SkipsFirst
from jaxprefetch.staging import Stager

AnyReader = Reader | Inline | Gate | Gathered


class Reading:
    """How the passes of one prefetcher are read.

    Args:
        host_size: batches pulled and not issued; 0: the loop pulls itself.
        max_host_bytes: host memory of staged batches; not kept to where processes agree without a service.
        group: the processes that take part; None: this one alone.
        whole: every batch of the source is delivered, so that its length is that of the pass.
    """

    def __init__(self, *, host_size: int, max_host_bytes: int | None, group: Group | None = None, whole: bool = True):
        self._host_size, self._max_host_bytes, self._group, self._whole = host_size, max_host_bytes, group, whole
        self._service = None if group is None else Service.find()
        self._begun = False

    @property
    def inline(self) -> bool:
        """Whether the loop pulls itself."""
        return not self._host_size

    @property
    def pads(self) -> bool:
        """Whether padding may follow the end of the source."""
        return self._group is not None and self._group.uneven == "pad"

    def begin_pass(
        self, pipeline: Pipeline, context: EnterContext, source: ResumableSource, stager: Stager, *, again: bool
    ) -> AnyReader:
        """What reads the next pass, not started yet.

        Args:
            again: the first batch was taken before a restart, and only shows what padding is like.
        """
        most = self._max_host_bytes
        if self._group is not None and self._service is None:  # a loop that waits for this batch settles the last later
            most = None
        if self._host_size:
            reader: Reader | Inline | SkipsFirst = Reader(
                pipeline, context=context, host_size=self._host_size, max_host_bytes=most
            )
        else:
            reader = Inline(pipeline, context)
        if self._group is None:
            return reader
        self._begun = True
        cards = Cards(self._group.process, self._group.uneven)
        if again:
            reader = SkipsFirst(reader, cards.see)
        if self._service is None:
            return Gathered(reader, self._group.devices, cards, stager.filler, inline=self.inline)
        agreement, length = self._group.begin_pass(self._service), source.length()
        if not self._whole:
            length = None
        elif again and length is not None:
            length -= 1
        return Gate(reader, agreement, cards, stager.filler, length=length, host_size=self._host_size)

    def close(self) -> None:
        """No pass will begin any more; the last one is closed. Again, it changes nothing."""
        group, self._group = self._group, None
        if group is not None and self._service is not None:
            with contextlib.suppress(RuntimeError):  # the service has gone
                if not self._begun:  # the others may wait for batch 0
                    group.begin_pass(self._service).fail(0, gone(group.process, 0), closed=True)
                group.leave(self._service)
