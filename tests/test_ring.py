"""The ages of a cache's slots, against a list for each device."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxprefetch.ring import Ring


class Lists(RuleBasedStateMachine):
    """Each device has a list of its places, the oldest first; what is replaced goes to the end."""

    @initialize(shards=st.integers(1, 3), each=st.integers(1, 6))
    def make(self, shards: int, each: int) -> None:
        self.ring = Ring(shards, each)
        self.each = each
        self.lists = [list(range(each)) for _ in range(shards)]
        self.filled: set[int] = set()

    def replace(self, places: list[list[int]]) -> None:
        self.ring.replaced(np.array(places))
        for own, new in zip(self.lists, places, strict=True):
            own[:] = [place for place in own if place not in new] + new
        self.filled.update(places[0])

    @rule(data=st.data())
    def replace_the_oldest(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, self.each))
        places = self.ring.oldest(n)
        assert places.tolist() == [own[:n] for own in self.lists]
        self.replace(places.tolist())

    @precondition(lambda self: self.filled)
    @rule(data=st.data())
    def replace_some(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, len(self.filled)))
        order = st.permutations(sorted(self.filled))
        self.replace([data.draw(order)[:n] for _ in self.lists])

    @rule()
    def save_and_restore(self) -> None:
        ring = Ring(len(self.lists), self.each)
        ring.restore(self.ring.by_age(), self.ring.filled)
        self.ring = ring

    @invariant()
    def it_is_as_the_lists_are(self) -> None:
        if hasattr(self, "ring"):
            assert self.ring.by_age().tolist() == self.lists
            assert set(range(self.ring.filled)) == self.filled


TestLists = Lists.TestCase
