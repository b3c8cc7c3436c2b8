"""What the window decides: each rule as one case without time, and its guarantees under arbitrary histories."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxprefetch.device.window import Action, Do, Window

COST = {"gpu:0": 10}
OTHER = {"gpu:1": 10}
BOTH = {"gpu:0": 10, "gpu:1": 10}


def stage(window: Window, batches: int, cost=COST, **options) -> None:
    for _ in range(batches):
        window.stage(cost, **options)


def tell(window: Window, action: Action) -> None:
    """Carries out one action and reports the plainest fact."""
    do, number = action
    match do:
        case Do.SETTLE:
            window.settled(number)
        case Do.ISSUE:
            window.issue()
        case Do.FENCE:
            window.fence(number)
        case Do.AWAIT_FENCE:
            window.fence_done(number)
        case Do.PROVE_LANDING:
            window.proved(number)
        case Do.AWAIT_SOURCE | Do.AWAIT_STAGED:
            window.stage(COST)


def follow(window: Window, *until: Do) -> Action:
    """Does what the window asks for, until it asks for one of these."""
    while (action := window.decide())[0] not in until:
        assert action[0] not in (Do.HAND_OUT, Do.END, Do.NO_ROOM), f"{action} before any of {until}"
        tell(window, action)
    return action


def take(window: Window, batches: int = 1) -> None:
    """Calls `next()` so many times, with the plainest facts."""
    for _ in range(batches):
        window.call()
        follow(window, Do.HAND_OUT)
        window.hand_out()


def settle(window: Window, **options) -> None:
    """Calls `next()` and settles what the consumer had."""
    window.call()
    window.settled(window.taken - 1, **options)


def state(window: Window) -> dict:
    """All of the window's state, as it is now."""
    return copy.deepcopy(vars(window) | {"flight": vars(window.flight)})


# ---- settle k-1


def test_the_first_call_settles_nothing():
    """Before anything was handed out there is nothing to settle."""
    window = Window(2)
    stage(window, 1)
    window.call()
    assert window.decide() == (Do.ISSUE, 0)


def test_the_batch_before_is_settled_first():
    """A call settles the batch that the consumer is past before it issues anything."""
    window = Window(2)
    stage(window, 3)
    take(window)
    window.call()
    assert window.decide() == (Do.SETTLE, 0)


def test_the_call_that_ends_the_pass_settles_too():
    """The last batch is settled, and given back with `delete_used`, before the end is told."""
    window = Window(2, delete_used=True)
    stage(window, 1)
    window.end()
    take(window)
    window.call()
    assert window.decide() == (Do.SETTLE, 0)
    window.settled(0)
    assert (window.in_flight, window.released) == (0, 1)
    assert window.decide() == (Do.END, 1)


def test_the_consumers_batch_counts_until_the_next_is_handed_out():
    """Without `delete_used` batch k-1 is charged until `next(k)` returns."""
    window = Window(1)
    stage(window, 2)
    take(window)
    settle(window)
    assert (window.in_flight, window.flight.most_bytes) == (1, 10)
    window.issue()
    assert (window.in_flight, window.flight.most_bytes) == (2, 20)
    window.hand_out()
    assert (window.in_flight, window.flight.most_bytes) == (1, 10)


def test_delete_used_gives_the_batch_back_when_it_is_settled():
    """With `delete_used` batch k-1 is released inside `next(k)`, before anything is issued."""
    window = Window(1, delete_used=True)
    stage(window, 2)
    take(window)
    settle(window)
    assert (window.in_flight, window.released) == (0, 1)
    assert window.decide() == (Do.ISSUE, 1)


def test_a_foreign_batch_is_not_given_back_by_delete_used():
    """Arrays of the source's own stay with the consumer until the next hand-out, and one batch more may be held."""
    window = Window(1, delete_used=True)
    stage(window, 2, foreign=True)
    take(window)
    settle(window)
    assert window.in_flight == 1
    assert window.decide() == (Do.ISSUE, 1)
    window.issue()
    assert window.in_flight == 2
    window.hand_out()
    assert (window.in_flight, window.released) == (1, 1)


def test_a_disposed_batch_needs_a_fence_and_a_landing():
    """A batch that the consumer deleted is charged until the fence of its step is done and its copy is known to be."""
    window = Window(1, delete_used=True)
    stage(window, 2)
    take(window)
    settle(window, disposed=True)
    assert window.decide() == (Do.FENCE, 0)
    window.fence(0)
    assert window.decide() == (Do.AWAIT_FENCE, 0)
    window.fence_done(0)
    assert window.in_flight == 1
    assert window.decide() == (Do.PROVE_LANDING, 0)
    window.proved(0)
    assert (window.in_flight, window.released) == (0, 1)
    assert window.decide() == (Do.ISSUE, 1)


def test_a_disposed_batch_that_has_landed_needs_only_the_fence():
    """A landing seen before the batch was deleted counts."""
    window = Window(1, delete_used=True)
    stage(window, 2)
    take(window)
    window.landed(0)
    settle(window, disposed=True)
    window.fence(0)
    window.fence_done(0)
    assert window.in_flight == 0


@pytest.mark.parametrize(
    ("first", "second", "foreign", "left"),
    [
        (COST, COST, False, 1),
        (COST, BOTH, False, 1),
        (COST, OTHER, False, 2),
        (BOTH, COST, False, 2),
        (COST, COST, True, 2),
    ],
    ids=["same", "more", "other", "fewer", "foreign"],
)
def test_a_later_landing_proves_an_earlier_one_on_the_same_devices(first, second, foreign, left):
    """A later batch proves the copy of a disposed one if it was put on all of its devices, and by us."""
    window = Window(2, delete_used=True)
    window.stage(first)
    window.stage(second, foreign=foreign)
    take(window)
    settle(window, disposed=True)
    window.fence(0)
    window.fence_done(0)
    assert window.in_flight == 2
    window.landed(1)
    assert window.in_flight == left


def test_a_later_landing_does_not_release_what_is_still_held():
    """A batch that the consumer holds stays charged although its copy is known to have landed."""
    window = Window(2)
    stage(window, 2)
    take(window)
    window.landed(1)
    assert window.in_flight == 2


def test_where_the_fence_releases_landing_is_not_enough():
    """With `released_by="fence"` a settled batch is charged until the fence of its step is done."""
    window = Window(1, delete_used=True, released_by="fence")
    stage(window, 2)
    take(window)
    settle(window)
    assert window.in_flight == 1
    assert window.decide() == (Do.FENCE, 0)
    window.fence(0)
    assert window.decide() == (Do.AWAIT_FENCE, 0)
    window.fence_done(0)
    assert (window.in_flight, window.released) == (0, 1)


def test_a_done_fence_covers_all_before_it():
    """Fences finish in order, so that one releases the batches of all steps before it."""
    window = Window(3, delete_used=True, released_by="fence")
    stage(window, 3)
    take(window)
    for k in (1, 2):
        settle(window)
        window.fence(k - 1)
        window.hand_out()
    assert window.in_flight == 3
    window.fence_done(1)
    assert (window.in_flight, window.released) == (1, 2)


# ---- fill


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("delete_used", [False, True])
def test_the_window_is_filled_before_the_hand_out(size: int, delete_used: bool):
    """Batches up to k+size-1 are issued in order, then k goes out, and no fence is needed while the source keeps up."""
    window = Window(size, delete_used=delete_used)
    stage(window, size + 3)
    for k in range(3):
        window.call()
        if k:
            window.settled(k - 1)
        for number in range(k and k + size - 1, k + size):
            assert window.decide() == (Do.ISSUE, number)
            assert window.issue() == number
        assert window.decide() == (Do.HAND_OUT, k)
        assert window.hand_out() == k
    assert window.flight.peak_batches == (size if delete_used else size + 1)


def test_a_source_pulled_inline_is_asked_until_the_window_is_full():
    """When the consumer itself pulls the source, the window fills up by asking for batches, without any fence."""
    window = Window(3, inline=True)
    stage(window, 1)
    take(window)
    settle(window)
    asked = []
    while (action := window.decide())[0] is not Do.HAND_OUT:
        asked.append(action)
        tell(window, action)
    assert asked == [(Do.AWAIT_SOURCE, 3), (Do.ISSUE, 3)]
    assert window.issued == 4


def test_a_source_pulled_inline_is_not_asked_after_its_end():
    """An ended source is not pulled again."""
    window = Window(3, inline=True)
    stage(window, 2)
    window.call()
    window.issue()
    window.issue()
    assert window.decide() == (Do.AWAIT_SOURCE, 2)
    window.end()
    assert window.decide() == (Do.HAND_OUT, 0)


# ---- decide: batch k has not been issued


def test_the_source_is_awaited_for_a_batch_that_is_needed():
    """With nothing issued and nothing staged there is only the source to wait for."""
    window = Window(2)
    window.call()
    assert window.decide() == (Do.AWAIT_SOURCE, 0)
    stage(window, 1)
    assert window.decide() == (Do.ISSUE, 0)


def test_the_end_is_told_when_everything_was_handed_out():
    """What was staged before the end still goes out."""
    window = Window(2)
    stage(window, 3)
    window.end()
    take(window, 3)
    window.call()
    assert follow(window, Do.END) == (Do.END, 3)


def test_an_empty_source_ends_at_once():
    """A source without batches ends the first call."""
    window = Window(2)
    window.call()
    window.end()
    assert window.decide() == (Do.END, 0)


def test_a_needed_batch_that_does_not_fit_waits_for_the_oldest_fence():
    """Batch k waits until enough is released, first for the fence of the oldest batch, then for its landing."""
    window = Window(2, max_bytes=20)
    stage(window, 1)
    take(window)
    stage(window, 2)
    settle(window, disposed=True)
    window.fence(0)
    window.issue()
    assert window.decide() == (Do.HAND_OUT, 1)
    window.hand_out()
    settle(window, disposed=True)
    window.fence(1)
    assert window.decide() == (Do.AWAIT_FENCE, 0)
    window.fence_done(0)
    assert window.decide() == (Do.PROVE_LANDING, 0)
    window.proved(0)
    assert window.decide() == (Do.ISSUE, 2)


def test_a_needed_batch_that_can_never_fit_is_an_error():
    """Batch k does not fit beside what the consumer holds, and the figures say so."""
    window = Window(2, max_bytes=19)
    stage(window, 2)
    take(window)
    settle(window)
    assert window.decide() == (Do.NO_ROOM, 1)
    assert window.shortage() == (10, 10, 0)


def test_a_first_batch_above_the_limit_is_an_error():
    """A batch that is larger than the limit on one of its devices never fits."""
    window = Window(2, max_bytes=19)
    window.stage({"gpu:0": 10, "gpu:1": 20})
    window.call()
    assert window.decide() == (Do.NO_ROOM, 0)
    assert window.shortage() == (20, 0, 0)


# ---- decide: batch k has been issued


def test_the_first_batch_waits_for_nothing():
    """Batch 0 goes out although the next is not staged: no step keeps the device busy."""
    window = Window(2)
    stage(window, 1)
    window.call()
    window.issue()
    assert window.decide() == (Do.HAND_OUT, 0)


def awaiting() -> Window:
    """A window in `next(1)` with batch 1 issued, nothing staged, and step 0 fenced."""
    window = Window(2)
    stage(window, 2)
    take(window)
    settle(window)
    window.fence(0)
    return window


def test_an_empty_source_costs_one_fence_a_step():
    """Only when nothing is staged is the step before fenced, once, and then the next batch is awaited."""
    window = Window(2)
    stage(window, 2)
    take(window)
    settle(window)
    assert window.decide() == (Do.FENCE, 0)
    window.fence(0)
    assert window.decide() == (Do.AWAIT_STAGED, 1)


def test_a_batch_staged_while_the_device_is_busy_is_issued_first():
    """The next batch arrives in time and goes to the device before batch k goes out."""
    window = awaiting()
    stage(window, 1)
    assert window.decide() == (Do.ISSUE, 2)
    window.issue()
    assert window.decide() == (Do.HAND_OUT, 1)


@pytest.mark.parametrize("landed_first", [False, True])
def test_an_idle_device_is_not_kept_waiting(landed_first: bool):
    """Batch k goes out when the fence of step k-1 is done and k has landed, not with one of the two."""
    window = awaiting()
    facts = [lambda: window.fence_done(0), lambda: window.landed(1)]
    first, second = reversed(facts) if landed_first else facts
    first()
    assert window.decide() == (Do.AWAIT_STAGED, 1)
    second()
    assert window.decide() == (Do.HAND_OUT, 1)


def test_an_old_fence_told_late_undoes_nothing():
    """The fence of an earlier step says nothing new once a later one is done."""
    window = awaiting()
    window.hand_out()
    settle(window)
    stage(window, 1)
    window.issue()
    window.fence(1)
    window.fence_done(1)
    window.landed(2)
    window.fence_done(0)
    assert window.decide() == (Do.HAND_OUT, 2)


def test_an_end_while_awaiting_hands_out():
    """When the source ends there is nothing left to wait for."""
    window = awaiting()
    window.end()
    assert window.decide() == (Do.HAND_OUT, 1)


def test_a_full_window_hands_out_without_looking_at_the_source():
    """With `size` batches issued it does not matter what is staged."""
    window = Window(2)
    stage(window, 3)
    take(window)
    settle(window)
    window.issue()
    assert window.staged == 0
    assert window.decide() == (Do.HAND_OUT, 1)


def test_a_next_batch_that_cannot_fit_is_left_staged():
    """When no open fence could make the next batch fit, batch k goes out, and the cut is counted."""
    window = Window(3, max_bytes=20)
    stage(window, 3)
    window.call()
    window.issue()
    window.issue()
    assert window.decide() == (Do.HAND_OUT, 0)
    window.hand_out()
    assert (window.staged, window.cut_by_bytes) == (1, 1)


def test_a_full_count_is_not_a_cut_by_bytes():
    """Hand-outs with all of `size` ahead are not counted as cut."""
    window = Window(2, max_bytes=30)
    stage(window, 4)
    take(window, 2)
    assert window.cut_by_bytes == 0


def with_an_open_fence() -> Window:
    """A window in `next(1)` whose next batch is staged and fits only without batch 0, which was deleted."""
    window = Window(2, delete_used=True)
    stage(window, 3)
    take(window)
    settle(window, disposed=True)
    window.fence(0)
    return window


def test_an_open_fence_that_makes_the_next_fit_is_awaited():
    """The next batch is worth waiting for while an open fence holds its place."""
    window = with_an_open_fence()
    assert window.decide() == (Do.AWAIT_FENCE, 0)
    window.fence_done(0)
    assert window.decide() == (Do.PROVE_LANDING, 0)
    window.proved(0)
    assert window.decide() == (Do.ISSUE, 2)


def test_an_open_fence_that_makes_too_little_room_is_not_awaited():
    """Batch k goes out at once when the next would not fit even without everything that can be waited for."""
    window = Window(2, delete_used=True, max_bytes=25)
    for n in (10, 10, 20):
        window.stage({"gpu:0": n})
    take(window)
    settle(window, disposed=True)
    window.fence(0)
    assert window.decide() == (Do.HAND_OUT, 1)


def test_an_idle_device_is_not_kept_waiting_for_room():
    """Batch k goes out although room could be made for the next, when its own step could start now."""
    window = Window(2, delete_used=True, max_bytes=19)
    for cost in (COST, OTHER, COST):
        window.stage(cost)
    take(window)
    settle(window, disposed=True)
    window.fence(0)
    window.fence_done(0)
    assert window.decide() == (Do.PROVE_LANDING, 0)
    window.landed(1)
    assert window.decide() == (Do.HAND_OUT, 1)
    window.hand_out()
    assert window.cut_by_bytes == 0  # the count alone was reason enough


def test_bytes_are_limited_on_each_device():
    """The limit holds on every device by itself."""
    window = Window(3, max_bytes=25)
    window.stage({"gpu:0": 10, "gpu:1": 20})
    window.stage({"gpu:0": 15, "gpu:1": 5})
    window.stage({"gpu:0": 1})
    window.call()
    window.issue()
    window.issue()
    assert window.flight.most_bytes == window.flight.peak_bytes == 25
    assert window.decide() == (Do.HAND_OUT, 0)


# ---- what hand-outs add


def assert_keeps_ahead(window: Window, ahead: int, most: int) -> None:
    """Five calls hand out with so many batches ahead, and no device ever holds more bytes than `most`."""
    for _ in range(5):
        window.call()
        follow(window, Do.HAND_OUT)
        assert window.issued - window.taken == ahead
        window.hand_out()
    assert window.flight.peak_bytes <= most


def making(window: Window, batches: int, out: int = 10, **options) -> None:
    """Stages batches whose hand-out adds so many bytes."""
    for _ in range(batches):
        window.stage(COST, out={"gpu:0": out}, **options)


def test_a_hand_out_adds_what_it_makes():
    """A batch is charged with its outputs from its hand-out until it is released."""
    window = Window(1)
    making(window, 2, out=5)
    window.call()
    window.issue()
    assert window.flight.most_bytes == 10
    window.hand_out()
    assert window.flight.most_bytes == window.flight.peak_bytes == 15
    settle(window)
    window.issue()
    assert window.flight.most_bytes == 25
    window.hand_out()
    assert (window.flight.most_bytes, window.flight.peak_bytes) == (15, 30)


@pytest.mark.parametrize(("most", "ahead"), [(20, 1), (29, 1), (30, 2), (39, 2), (40, 3)])
def test_a_batch_is_issued_only_if_every_hand_out_will_find_room(most: int, ahead: int):
    """With delete_used: what is ahead and what one hand-out adds; the batch before is gone by then."""
    window = Window(3, delete_used=True, max_bytes=most)
    making(window, 9)
    assert_keeps_ahead(window, ahead, most)


@pytest.mark.parametrize(("most", "ahead"), [(40, 1), (49, 1), (50, 2), (60, 3)])
def test_the_outputs_of_the_batch_before_count(most: int, ahead: int):
    """Without delete_used the hand-out finds the batch before still there, with its outputs."""
    window = Window(3, max_bytes=most)
    making(window, 9)
    take(window)
    assert_keeps_ahead(window, ahead, most)


def test_a_later_batch_with_large_outputs_is_held_back():
    """What batch 1 makes of itself has to find room beside batch 2, before 2 is issued."""
    window = Window(3, delete_used=True, max_bytes=50)
    making(window, 1, out=0)
    making(window, 1, out=30)
    making(window, 1, out=0)
    take(window)
    assert window.issued == 3
    window = Window(3, delete_used=True, max_bytes=49)
    making(window, 1, out=0)
    making(window, 1, out=30)
    making(window, 1, out=0)
    take(window)
    assert window.issued == 2


def test_outputs_that_never_fit_are_an_error_with_their_figures():
    """A batch that fits, but not with what it becomes, is not issued."""
    window = Window(2, delete_used=True, max_bytes=19)
    making(window, 1)
    window.call()
    assert window.decide() == (Do.NO_ROOM, 0)
    assert window.shortage() == (20, 0, 10)


def test_a_hand_out_waits_for_room_that_only_a_wait_keeps():
    """The batch before was deleted: its memory is awaited before the next one makes its outputs."""
    window = Window(2, delete_used=True, max_bytes=30)
    making(window, 2)
    take(window)
    window.end()
    settle(window, disposed=True)
    assert window.decide() == (Do.FENCE, 0)
    window.fence(0)
    assert window.decide() == (Do.AWAIT_FENCE, 0)
    with pytest.raises(RuntimeError, match="batch 1 cannot be handed out"):
        window.hand_out()
    window.fence_done(0)
    assert window.decide() == (Do.PROVE_LANDING, 0)
    window.proved(0)
    assert window.decide() == (Do.HAND_OUT, 1)


# ---- the device has no memory


def retry_after_the_step(window: Window, step: int):
    """The second try waits for the step before: what it used may be given back then."""
    assert window.decide() == (Do.FENCE, step)
    window.fence(step)
    assert window.decide() == (Do.AWAIT_FENCE, step)
    window.fence_done(step)


def test_a_refused_batch_that_is_not_needed_waits_for_its_turn():
    """When the device has no memory for the next batch, batch k goes out first."""
    window = Window(2)
    stage(window, 2)
    window.call()
    window.issue()
    window.refuse()
    assert window.decide() == (Do.HAND_OUT, 0)
    window.hand_out()
    settle(window)
    retry_after_the_step(window, 0)
    assert window.decide() == (Do.ISSUE, 1)
    window.issue()
    stage(window, 1)
    assert window.decide() == (Do.ISSUE, 2)


def test_a_needed_batch_is_tried_twice():
    """A batch that is needed is put once more, and refused again it is an error, however often one asks."""
    window = Window(2)
    stage(window, 1)
    window.call()
    window.refuse()
    assert window.decide() == (Do.ISSUE, 0)
    window.refuse()
    assert window.decide() == (Do.NO_ROOM, 0)
    window.call()
    assert window.decide() == (Do.NO_ROOM, 0)


def test_a_refused_batch_is_tried_again_only_after_the_open_fences():
    """What can be released is awaited before the second try."""
    window = Window(1)
    stage(window, 1)
    take(window)
    settle(window, disposed=True)
    window.fence(0)
    stage(window, 2)
    window.issue()
    window.hand_out()
    settle(window)
    window.refuse()
    assert window.decide() == (Do.AWAIT_FENCE, 0)
    window.fence_done(0)
    retry_after_the_step(window, 1)
    assert window.decide() == (Do.ISSUE, 2)


# ---- calls and passes


def test_a_call_after_an_interrupt_continues():
    """Calling again inside a call loses nothing and repeats nothing."""
    window = awaiting()
    before = state(window)
    window.call()
    assert state(window) == before
    assert window.decide() == (Do.AWAIT_STAGED, 1)


def test_a_new_pass_goes_on_with_the_numbers():
    """After the end a new pass continues the numbering, and what the consumer holds stays charged."""
    window = Window(2)
    stage(window, 2)
    window.end()
    take(window, 2)
    window.call()
    assert follow(window, Do.END) == (Do.END, 2)
    window.restart()
    assert not window.ended
    with pytest.raises(RuntimeError, match=r"decide\(\) outside of a call"):
        window.decide()
    assert (window.in_flight, window.issued) == (1, 2)
    window.call()
    assert window.decide() == (Do.AWAIT_SOURCE, 2)
    stage(window, 2)
    take(window, 2)
    assert (window.taken, window.released) == (4, 3)


def test_numbers_say_what_is_where():
    """`staged`, `issued`, `taken`, `in_flight` and `released` follow a batch on its way."""
    window = Window(2)
    seen = []
    for fact in (
        lambda: stage(window, 1),
        window.call,
        window.issue,
        window.hand_out,
        lambda: settle(window),
        lambda: stage(window, 1),
        window.issue,
        window.hand_out,
    ):
        fact()
        seen.append((window.staged, window.issued, window.taken, window.in_flight, window.released))
    assert seen[0] == seen[1] == (1, 0, 0, 0, 0)
    assert seen[2:5] == [(0, 1, 0, 1, 0), (0, 1, 1, 1, 0), (0, 1, 1, 1, 0)]
    assert seen[5:] == [(1, 1, 1, 1, 0), (0, 2, 1, 2, 0), (0, 2, 2, 1, 1)]


# ---- facts that cannot be true


def in_next_1() -> Window:
    """A window of two in `next(1)`: batches 0 and 1 issued, 0 handed out, 2 staged, nothing settled."""
    window = Window(2, delete_used=True, max_bytes=25)
    stage(window, 3)
    take(window)
    window.call()
    return window


def in_next_1_of_3() -> Window:
    """A window of three in `next(1)`: three batches issued, 0 handed out and not settled, 3 staged."""
    window = Window(3)
    stage(window, 3)
    take(window)
    stage(window, 1)
    window.call()
    return window


def ended() -> Window:
    window = Window(2)
    window.end()
    return window


def issued() -> Window:
    """A window whose source has ended after one batch, which is on its way."""
    window = staged_only(1)
    window.call()
    window.issue()
    window.end()
    return window


def staged_only(batches: int) -> Window:
    window = Window(2)
    stage(window, batches)
    return window


def in_call(n: int, most: int | None) -> Window:
    window = Window(2, max_bytes=most)
    window.stage({"gpu:0": n})
    window.call()
    return window


def full() -> Window:
    """A window of two in `next(0)` with two issued and one staged, for which there would be room."""
    window = staged_only(3)
    window.call()
    window.issue()
    window.issue()
    return window


def released() -> Window:
    window = in_next_1()
    window.settled(0)
    return window


def uncalled() -> Window:
    window = Window(2)
    stage(window, 2)
    take(window)
    return window


ILLEGAL = {
    "staged after the end": (ended, lambda w: w.stage(COST), "a batch was staged after the end"),
    "a pass before the last batch was taken": (
        issued,
        lambda w: w.restart(),
        "a pass was begun before the last one was over",
    ),
    "a pass within a pass": (in_next_1, lambda w: w.restart(), "a pass was begun before the last one was over"),
    "issued outside of a call": (lambda: staged_only(1), lambda w: w.issue(), "no batch is staged"),
    "issued without one staged": (awaiting, lambda w: w.issue(), "no batch is staged"),
    "issued too far ahead": (full, lambda w: w.issue(), "batch 2 does not fit"),
    "issued above the count": (in_next_1, lambda w: w.issue(), "batch 2 does not fit"),
    "issued above the bytes": (lambda: in_call(26, 25), lambda w: w.issue(), "batch 0 does not fit"),
    "issued unsettled": (in_next_1_of_3, lambda w: w.issue(), "batch 0 has not been settled"),
    "refused without one staged": (awaiting, lambda w: w.refuse(), "no batch is staged"),
    "landed before the issue": (in_next_1, lambda w: w.landed(2), "batch 2 is not in flight"),
    "proved before the issue": (in_next_1, lambda w: w.proved(2), "batch 2 is not in flight"),
    "landed after the release": (released, lambda w: w.landed(0), "batch 0 is not in flight"),
    "settled twice": (awaiting, lambda w: w.settled(0), "batch 0 is not the next to settle"),
    "settled before it was taken": (awaiting, lambda w: w.settled(1), "batch 1 is not the next to settle"),
    "fenced twice": (awaiting, lambda w: w.fence(0), "step 0 needs no fence"),
    "fenced before it was taken": (awaiting, lambda w: w.fence(1), "step 1 needs no fence"),
    "a fence done that is not there": (awaiting, lambda w: w.fence_done(1), "step 1 has no fence"),
    "a fence done before the first": (awaiting, lambda w: w.fence_done(-1), "step -1 has no fence"),
    "handed out unsettled": (in_next_1, lambda w: w.hand_out(), "batch 1 cannot be handed out"),
    "handed out unissued": (lambda: in_call(10, None), lambda w: w.hand_out(), "batch 0 cannot be handed out"),
    "handed out uncalled": (uncalled, lambda w: w.hand_out(), "batch 1 cannot be handed out"),
    "asked outside of a call": (lambda: staged_only(1), lambda w: w.decide(), r"decide() outside of a call"),
}


@pytest.mark.parametrize(("make", "fact", "text"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_a_fact_that_cannot_be_true_changes_nothing(make, fact, text):
    """An illegal fact raises, says what is wrong, and leaves the window as it was."""
    window = make()
    before = state(window)
    with pytest.raises(RuntimeError, match=f"^window: {re.escape(text)}$"):
        fact(window)
    assert state(window) == before


# ---- arbitrary histories


@dataclass
class Entry:
    """What is true of one issued batch, as told to the window."""

    cost: dict[str, int]
    foreign: bool
    out: dict[str, int]
    referenced: bool = True
    landed: bool = False
    fenced: bool = False  # its release needs the fence of its step
    disposed: bool = False


def both(entry: Entry) -> list[dict[str, int]]:
    return [entry.cost, entry.out]


def sums(costs: Iterable[dict[str, int]]) -> dict[str, int]:
    """Bytes on each device."""
    total: dict[str, int] = {}
    for cost in costs:
        for device, n in cost.items():
            total[device] = total.get(device, 0) + n
    return total


class Ledger:
    """An accounting of its own of what was told, and of what is in flight because of it."""

    def __init__(self, size: int, delete_used: bool, max_bytes: int | None, by_fence: bool):
        self.size, self.delete_used, self.max_bytes, self.by_fence = size, delete_used, max_bytes, by_fence
        self.staged: list[tuple[dict[str, int], bool, dict[str, int]]] = []
        self.batches: list[Entry] = []
        self.taken = self.settled = self.refusals = 0
        self.fence = self.done = -1
        self.calling = self.ended = self.any_foreign = False

    @property
    def limit(self) -> int:
        return self.size if self.delete_used and not self.any_foreign else self.size + 1

    def in_flight(self) -> list[int]:
        return [j for j, e in enumerate(self.batches) if e.referenced or not e.landed or (e.fenced and self.done < j)]

    def unreferenced(self) -> list[int]:
        """Batches that only a wait keeps in flight."""
        return [j for j in self.in_flight() if not self.batches[j].referenced]

    def charged(self, but: list[int] | None = None) -> dict[str, int]:
        return sums(
            cost
            for j in set(self.in_flight()) - set(but or [])
            for cost in (self.batches[j].cost, self.batches[j].out if j < self.taken else {})
        )

    def fits(self, but: list[int] | None = None) -> bool:
        """The next staged batch is within the limits, if those batches are left out of account."""
        held = self.batches[self.taken - 1] if self.taken else None
        most = self.size + (not self.delete_used or (held is not None and held.foreign and held.referenced))
        within = all(max(sums(costs).values(), default=0) <= self.most for costs in self.hand_outs(but or []))
        return within and len(set(self.in_flight()) - set(but or [])) < most

    @property
    def most(self) -> float:
        return float("inf") if self.max_bytes is None else self.max_bytes

    def hand_outs(self, but: list[int]) -> Iterator[list[dict[str, int]]]:
        """All that is on the devices at each hand-out up to that of the next staged batch, if it is issued now."""
        cost, foreign, out = self.staged[0]
        batches = [*self.batches, Entry(cost, foreign, out)]
        for k in range(self.taken, len(batches)):
            ahead = [entry.cost for entry in batches[k:]] + [batches[k].out]
            last = batches[k - 1] if k else None
            if k == self.taken:
                before = [cost for j in set(self.in_flight()) - set(but) if j < k for cost in both(self.batches[j])]
            elif self.delete_used and not self.by_fence and not last.foreign:
                before = []
            else:
                before = both(last)
            yield ahead + before

    def out_fits(self) -> bool:
        """There is room for what the next hand-out adds."""
        out = self.batches[self.taken].out
        return max(sums([self.charged(), out]).values(), default=0) <= self.most

    def issue(self) -> int:
        self.batches.append(Entry(*self.staged.pop(0), fenced=self.by_fence))
        self.refusals = 0
        return len(self.batches) - 1

    def land(self, number: int) -> None:
        batch = self.batches[number]
        batch.landed = True
        for earlier in self.batches[:number]:
            if not batch.foreign and set(earlier.cost) <= set(batch.cost):
                earlier.landed = True

    def settle(self, number: int, disposed: bool) -> None:
        batch = self.batches[number]
        self.settled = number + 1
        batch.disposed, batch.fenced = disposed, batch.fenced or disposed
        batch.referenced = not self.delete_used or batch.foreign
        if not disposed:
            self.land(number)

    def hand_out(self) -> int:
        if self.taken:
            self.batches[self.taken - 1].referenced = False
        self.taken, self.calling = self.taken + 1, False
        return self.taken - 1

    def idle(self) -> bool:
        """The step of batch k could start now."""
        return self.done >= self.taken - 1 and self.batches[self.taken].landed

    def justifies(self, action: Action, inline: bool) -> bool:
        """The action is the right one, by the rules and by nothing but what was told."""
        do, j = action
        k, issued = self.taken, len(self.batches)
        if self.settled < k or do is Do.SETTLE:
            return do is Do.SETTLE and j == self.settled == k - 1
        ahead, blocked = issued > k, bool(self.staged) and (self.refusals > 0 or not self.fits())
        room = bool(self.staged) and issued < k + self.size and not blocked
        asleep = not self.staged and not self.ended and issued < k + self.size
        owed = k > 0 and k - 1 in self.in_flight() and self.batches[k - 1].fenced and self.fence < k - 1
        retry = self.refusals == 1 and not ahead and bool(self.staged) and self.fits() and not self.unreferenced()
        if do is Do.FENCE:
            return j == k - 1 > self.fence and (owed or retry or (ahead and asleep and not self.idle()))
        if owed:
            return False
        if do is Do.ISSUE:
            return j == issued < k + self.size and self.fits() and (room or (retry and self.done >= k - 1))
        if room:
            return False
        if do is Do.AWAIT_FENCE and retry:
            return j == k - 1 == self.fence > self.done
        if do in (Do.AWAIT_FENCE, Do.PROVE_LANDING):
            open_fence = self.batches[j].fenced and self.done < j
            useful = ahead and blocked and not self.refusals and self.fits(self.unreferenced()) and not self.idle()
            due = useful or not self.out_fits() if ahead else blocked
            return due and j == min(self.unreferenced()) and open_fence == (do is Do.AWAIT_FENCE)
        if do is Do.AWAIT_SOURCE:
            return j == issued and asleep and (inline or not ahead)
        if do is Do.AWAIT_STAGED:
            return j == k > 0 and ahead and asleep and not inline and self.fence == k - 1 and not self.idle()
        if do is Do.END:
            return j == k == issued and self.ended and not self.staged
        if do is Do.NO_ROOM:
            stuck = not self.unreferenced() and (self.refusals > 1 or not self.fits())
            return j == k == issued and bool(self.staged) and stuck
        useless = blocked and (self.refusals > 0 or not self.fits(self.unreferenced()))
        full = issued == k + self.size or (self.ended and not self.staged)
        return (
            j == k
            and ahead
            and self.out_fits()
            and (full or useless or self.idle() or (k == 0 and not (inline and asleep)))
        )


DEVICES = ["gpu:0", "gpu:1", "gpu:2"]
amounts = st.sampled_from([0, 1, 49, 50, 100])
costs = st.one_of(
    amounts.map(lambda n: dict.fromkeys(DEVICES[:2], n)),
    st.dictionaries(st.sampled_from(DEVICES), amounts),
)
seldom = st.sampled_from([False] * 7 + [True])


class Histories(RuleBasedStateMachine):
    """Any true facts in any order; the guarantees hold after each of them."""

    @initialize(
        size=st.integers(1, 4),
        delete_used=st.booleans(),
        released_by=st.sampled_from(["landing", "fence"]),
        inline=seldom,
        max_bytes=st.sampled_from([None, None, 400, 250, 200, 150, 100]),
        foreign=st.booleans(),
        disposing=st.booleans(),
        making=st.booleans(),
    )
    def begin(self, size, delete_used, released_by, inline, max_bytes, foreign, disposing, making):
        self.window = Window(size, delete_used=delete_used, max_bytes=max_bytes, released_by=released_by, inline=inline)
        self.ledger = Ledger(size, delete_used, max_bytes, released_by == "fence")
        self.inline, self.foreign, self.disposing, self.making = inline, foreign, disposing, making
        self.released: set[int] = set()

    # -- facts that the world may bring at any time

    @precondition(lambda self: not self.ledger.ended)
    @rule(cost=costs, foreign=st.booleans(), out=costs)
    def stage(self, cost, foreign, out):
        foreign, out = foreign and self.foreign, out if self.making else {}
        self.window.stage(cost, foreign=foreign, out=out)
        self.ledger.staged.append((cost, foreign, out))
        self.ledger.any_foreign |= foreign

    @rule(really=seldom)
    def end(self, really):
        if really:
            self.window.end()
            self.ledger.ended = True

    def unlanded(self) -> list[int]:
        return [j for j in self.ledger.in_flight() if not self.ledger.batches[j].disposed]

    @precondition(lambda self: self.unlanded())
    @rule(data=st.data())
    def land(self, data):
        number = data.draw(st.sampled_from(self.unlanded()))
        self.window.landed(number)
        self.ledger.land(number)

    @precondition(lambda self: self.ledger.done < self.ledger.fence)
    @rule(data=st.data())
    def finish_a_fence(self, data):
        number = data.draw(st.integers(self.ledger.done + 1, self.ledger.fence))
        self.window.fence_done(number)
        self.ledger.done = number

    # -- the consumer's calls

    @rule()
    def call(self):
        """Calls `next()`, or calls it again after an interrupt."""
        before = state(self.window)
        self.window.call()
        assert state(self.window) == before or not self.ledger.calling
        self.ledger.calling = True

    @precondition(lambda self: self.ledger.calling)
    @rule(data=st.data())
    def act(self, data):
        """Does one thing that the window asks for."""
        self.carry_out(self.decided(), data)

    @precondition(lambda self: self.ledger.calling)
    @rule(data=st.data())
    def finish_the_call(self, data):
        """Does what the window asks for until the call is over, which takes a bounded number of rounds."""
        for _ in range(5 * self.ledger.size + 12):
            action = self.decided()
            self.carry_out(action, data)
            self.is_within_the_limits()
            if action[0] in (Do.HAND_OUT, Do.END, Do.NO_ROOM):
                return
        raise AssertionError(f"the call does not end; the last action was {action}")

    @precondition(lambda self: self.ledger.ended and not self.ledger.staged and not self.ahead())
    @rule()
    def restart(self):
        self.window.restart()
        self.ledger.ended = self.ledger.calling = False

    def ahead(self) -> int:
        return len(self.ledger.batches) - self.ledger.taken

    def decided(self) -> Action:
        """The action, which is justified; asking for it changed nothing."""
        before = state(self.window)
        action = self.window.decide()
        assert self.window.decide() == action
        assert state(self.window) == before
        assert self.ledger.justifies(action, self.inline), action
        return action

    def carry_out(self, action: Action, data) -> None:
        window, ledger = self.window, self.ledger
        do, number = action
        match do:
            case Do.SETTLE:
                disposed = self.disposing and data.draw(st.booleans(), label="disposed")
                window.settled(number, disposed=disposed)
                ledger.settle(number, disposed)
            case Do.ISSUE if data.draw(seldom, label="refused"):
                window.refuse()
                ledger.refusals += 1
            case Do.ISSUE:
                assert window.issue() == ledger.issue() == number
            case Do.FENCE:
                window.fence(number)
                ledger.fence = number
            case Do.AWAIT_FENCE:
                window.fence_done(number)
                ledger.done = number
            case Do.PROVE_LANDING:
                window.proved(number)
                for batch in ledger.batches[: number + 1]:
                    batch.landed = True
            case Do.AWAIT_SOURCE | Do.AWAIT_STAGED:
                self.bring_news(action, data)
            case Do.HAND_OUT:
                assert window.hand_out() == ledger.hand_out() == number

    def bring_news(self, action: Action, data) -> None:
        """One fact that ends the wait."""
        do, number = action
        news = ["staged"] * 5 + ["ended"]
        if do is Do.AWAIT_STAGED and self.ledger.done < self.ledger.fence:
            news.append("fenced")
        if do is Do.AWAIT_STAGED and not self.ledger.batches[number].landed:
            news.append("landed")
        match data.draw(st.sampled_from(news), label="news"):
            case "staged":
                self.stage(data.draw(costs), data.draw(st.booleans()), data.draw(costs))
            case "ended":
                self.end(True)
            case "fenced":
                self.window.fence_done(number - 1)
                self.ledger.done = number - 1
            case "landed":
                self.window.landed(number)
                self.ledger.land(number)

    # -- facts that cannot be true

    @rule(data=st.data())
    def say_what_cannot_be_true(self, data):
        """An illegal fact raises and changes nothing."""
        fact, text = data.draw(st.sampled_from(self.illegal_facts()))
        before = state(self.window)
        with pytest.raises(RuntimeError, match=f"^window: .*{text}"):
            fact()
        assert state(self.window) == before

    def illegal_facts(self) -> list:
        window, ledger = self.window, self.ledger
        issued, gone = len(ledger.batches), sorted(self.released)
        facts = [(lambda j=j: window.landed(j), "is not in flight") for j in (-1, issued, *gone[-2:])]
        facts += [(lambda j=j: window.proved(j), "is not in flight") for j in (issued, *gone[:1])]
        facts += [(lambda j=j: window.settled(j), "not the next to settle") for j in (ledger.settled - 1, ledger.taken)]
        facts += [(lambda j=j: window.fence(j), "needs no fence") for j in (ledger.fence, ledger.taken)]
        facts.append((lambda: window.fence_done(ledger.fence + 1), "has no fence"))
        if ledger.ended:
            facts.append((lambda: window.stage({}), "staged after the end"))
        if not ledger.ended or ledger.staged:
            facts.append((window.restart, "before the last one was over"))
        if not ledger.staged:
            facts.append((window.refuse, "no batch is staged"))
        if not ledger.staged or not ledger.calling:
            facts.append((window.issue, "no batch is staged"))
        elif self.ahead() == ledger.size or not ledger.fits():
            facts.append((window.issue, f"batch {issued} does not fit"))
        if not ledger.calling:
            facts.append((window.decide, "outside of a call"))
        if not ledger.calling or not self.ahead() or ledger.settled < ledger.taken or not ledger.out_fits():
            facts.append((window.hand_out, f"batch {ledger.taken} cannot be handed out"))
        return facts

    # -- the guarantees

    @invariant()
    def is_within_the_limits(self):
        """Never more batches than the bound, never more bytes than the limit on any device."""
        in_flight, charged = self.ledger.in_flight(), self.ledger.charged()
        assert len(in_flight) <= self.ledger.limit
        assert self.ledger.max_bytes is None or all(n <= self.ledger.max_bytes for n in charged.values())
        assert self.window.in_flight == len(in_flight) <= self.window.flight.peak_batches <= self.ledger.limit
        assert self.window.flight.most_bytes == max(charged.values(), default=0) <= self.window.flight.peak_bytes

    @invariant()
    def releases_every_batch_once(self):
        """What was released stays so, and every batch is either in flight or released."""
        in_flight = set(self.ledger.in_flight())
        assert not self.released & in_flight
        self.released = set(range(len(self.ledger.batches))) - in_flight
        assert self.window.released == len(self.released)
        assert self.window.issued == len(self.ledger.batches)

    @invariant()
    def keeps_the_order(self):
        """Numbers follow each other, and at most `size` batches are ahead."""
        assert self.window.taken == self.ledger.taken
        assert self.window.staged == len(self.ledger.staged)
        assert self.ledger.taken - 1 <= self.ledger.settled <= self.ledger.taken
        assert 0 <= self.ahead() <= self.ledger.size


TestHistories = Histories.TestCase


def test_a_late_source_is_given_the_memory_of_batches_that_were_disposed_of() -> None:
    """Where nothing is staged for a moment, deleted batches are proved to have landed before the source is awaited."""
    window = Window(size=1)
    window.call()
    window.stage({"gpu": 10})
    window.issue()
    window.hand_out()
    window.call()
    window.settled(0, disposed=True)
    window.fence(0)
    assert window.decide() == (Do.AWAIT_SOURCE, 1)
    window.source_is_late = True
    assert window.decide() == (Do.PROVE_LANDING, 0)
    window.proved(0)
    assert window.decide() == (Do.AWAIT_SOURCE, 1)
    window.stage({"gpu": 10})
    assert not window.source_is_late
