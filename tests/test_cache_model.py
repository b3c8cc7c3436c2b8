"""A cache under arbitrary histories, against plain lists."""

from __future__ import annotations

from typing import Any

from cached import SPEC, SPLIT, content, examples, numbers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxprefetch import DeviceCache


class Model(RuleBasedStateMachine):
    """A cache over four devices, against a list of the examples and a queue of the slots of each device."""

    EACH = 3

    @initialize()
    def make(self) -> None:
        self.cache = DeviceCache(4 * self.EACH, SPEC, sharding=SPLIT)
        self.slots: list[list[int | None]] = [[None] * self.EACH for _ in range(4)]
        self.queues = [list(range(self.EACH)) for _ in range(4)]
        self.made = 0

    def write(self, places: list[list[int]], slots: Any = None) -> None:
        n = 4 * len(places[0])
        new = list(range(self.made, self.made + n))
        self.made += n
        self.cache.insert(examples(*new), slots)
        for device, own in enumerate(places):
            for place in own:
                self.slots[device][place] = new.pop(0)
            self.queues[device] = [place for place in self.queues[device] if place not in own] + own

    @property
    def filled(self) -> int:
        return sum(n is not None for n in self.slots[0])

    @rule(each=st.integers(1, EACH))
    def insert(self, each: int) -> None:
        self.write([queue[:each] for queue in self.queues])

    @precondition(lambda self: self.filled)
    @rule(data=st.data())
    def insert_named(self, data: st.DataObject) -> None:
        each = data.draw(st.integers(1, self.filled))
        order = st.permutations(range(self.filled))
        places = [data.draw(order)[:each] for _ in range(4)]
        self.write(places, [d * self.EACH + place for d, own in enumerate(places) for place in own])

    @precondition(lambda self: self.filled)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        each = data.draw(st.integers(1, 4))
        own = st.lists(st.integers(0, self.filled - 1), min_size=each, max_size=each)
        places = [data.draw(own) for _ in range(4)]
        slots = [d * self.EACH + place for d, some in enumerate(places) for place in some]
        expected = [self.slots[d][place] for d, some in enumerate(places) for place in some]
        assert numbers(self.cache.take(slots)) == expected

    @rule()
    def save_and_restore(self) -> None:
        state = self.cache.get_state()
        self.cache.close()
        self.cache = DeviceCache(4 * self.EACH, SPEC, sharding=SPLIT)
        self.cache.set_state(state)

    @invariant()
    def it_is_as_the_model_is(self) -> None:
        if hasattr(self, "cache"):
            assert len(self.cache) == 4 * self.filled
            assert content(self.cache) == [n or 0 for own in self.slots for n in own]

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()


TestModel = Model.TestCase
TestModel.settings = settings(stateful_step_count=15)
