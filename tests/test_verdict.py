"""What is decided when all processes have announced a batch, from what they have told."""

from __future__ import annotations

import pytest

from jaxprefetch.processes.verdict import decide, names

X = ["x", "float32[4, 2]", "for a global float32[16, 2] split by PartitionSpec('data',) over {'data': 4}"]
FOUR = [0, 1, 2, 3]


def card(leaves=(X,), length=None, uneven="error"):
    leaves = None if leaves is None else [list(leaf) for leaf in leaves]
    return {"leaves": leaves, "ended": leaves is None, "length": length, "uneven": uneven}


def ended(*processes: int, after: int = 12, uneven: str = "error"):
    return {process: {"ended": after, "uneven": uneven} for process in processes}


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        ([3], "process 3"),
        ([0, 1], "processes 0 and 1"),
        ([0, 1, 2], "processes 0-2"),
        ([0, 2, 3, 4, 9], "processes 0, 2-4 and 9"),
        ([5, 1], "processes 1 and 5"),
    ],
)
def test_names(processes, text):
    """Processes are named briefly, however many there are."""
    assert names(processes) == text


def test_all_alike():
    """Where nobody has anything to tell, the batch passes."""
    assert decide(0, FOUR, card(), {}) == {"go": True}
    assert decide(7, FOUR, None, {}) == {"go": True}


def test_all_end():
    """Where all end at the same batch it is the end, in every mode."""
    for uneven in ("error", "drop", "pad"):
        assert decide(12, FOUR, None, ended(*FOUR, uneven=uneven)) == {"end": None}
        assert decide(0, FOUR, card(None, uneven=uneven), {}) == {"end": None}


def test_some_end():
    """Where some end before the others the mode decides."""
    text = "Batch 12: process 3 ended after 12 batches, processes 0-2 have more"
    assert decide(12, FOUR, None, ended(3))["error"].startswith(text)
    told = {"end": "processes 0 and 2 ended after 12 batches, processes 1 and 3 have more"}
    assert decide(12, FOUR, None, ended(0, 2, uneven="drop")) == told
    assert decide(14, FOUR, None, ended(0, 2, after=12, uneven="pad")) == {"go": True}


def test_padding_ends_with_the_last():
    """With padding it is the end when all have ended, whenever that was."""
    notes = ended(0, after=3, uneven="pad") | ended(1, 2, 3, after=9, uneven="pad")
    assert decide(9, FOUR, None, notes) == {"end": None}


def test_lengths():
    """Known lengths are agreed on at batch 0: the shortest, the longest, or an error."""
    others = {2: {"card": card(length=15)}, 3: {"card": card(length=11)}}

    def verdict(uneven):
        notes = {process: {"card": note["card"] | {"uneven": uneven}} for process, note in others.items()}
        return decide(0, FOUR, card(length=12, uneven=uneven), notes)

    assert decide(0, FOUR, card(length=12), {}) == {"go": True, "length": 12}
    assert verdict("drop") == {"go": True, "length": 11}
    assert verdict("pad") == {"go": True, "length": 15}
    told = "process 3 has 11, processes 0 and 1 have 12, process 2 has 15"
    assert told in verdict("error")["error"]


def test_a_length_that_one_does_not_know():
    """Where one process does not know its length, all count."""
    assert decide(0, FOUR, card(length=12), {1: {"card": card()}}) == {"go": True}


def test_different_leaves():
    """The first leaf that differs is told, with what each group sends."""
    wide = ["x", "float32[6, 2]", "for a global float32[24, 2] split by PartitionSpec('data',) over {'data': 4}"]
    found = decide(0, FOUR, card(), {1: {"card": card([wide])}, 3: {"card": card([wide])}})["error"]
    assert found.startswith("Batch 0: leaf x is not the same in all processes: processes 0 and 2 send x: float32[4, 2]")
    assert "and processes 1 and 3 send x: float32[6, 2] (for a global float32[24, 2]" in found


def test_what_is_each_process_s_own_may_differ():
    """Leaves that stay on the host or on a process's own devices are not compared but for their names."""
    assert decide(0, [0, 1], card([["a", "3", ""]]), {1: {"card": card([["a", "5", ""]])}}) == {"go": True}


def test_a_leaf_that_one_has_not():
    """A missing leaf is told."""
    found = decide(0, [0, 1], card([X]), {1: {"card": card([X, ["y", "f", "g"]])}})["error"]
    assert "leaf y is not the same in all processes: process 0 has no such leaf, and process 1 sends y: f (g)" in found


def test_a_change_in_some_only():
    """A later batch may have another shape in all processes only, and the same."""
    change = {"leaves": [["x", "float32[2, 2]", "for a global float32[8, 2]"]]}
    found = decide(5, FOUR, None, {1: change})["error"]
    assert found.startswith("Batch 5: process 1 has another shape than before (x: float32[2, 2]), and processes 0, 2")
    assert decide(5, FOUR, None, dict.fromkeys(FOUR, change)) == {"go": True}
    other = {"leaves": [["x", "float32[1, 2]", "for a global float32[4, 2]"]]}
    assert "leaf x is not the same" in decide(5, FOUR, None, dict.fromkeys(FOUR, change) | {2: other})["error"]


def test_one_without_any_batch():
    """A process that has none at all does not know what padding looks like."""
    found = decide(0, FOUR, card(uneven="pad"), {2: {"card": card(None, uneven="pad")}})["error"]
    assert found.startswith("Batch 0: process 2 has no batch at all")
    assert decide(0, FOUR, card(None, uneven="drop"), {2: {"card": card(uneven="drop")}})["end"].startswith(
        "processes 0"
    )


def test_made_differently():
    """All prefetchers have to have the same mode."""
    found = decide(0, FOUR, card(), {1: {"card": card(uneven="drop")}})["error"]
    assert "processes 0, 2 and 3 uneven='error', process 1 uneven='drop'" in found
