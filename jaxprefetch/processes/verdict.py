"""What becomes of a batch that every process has announced: no JAX, no thread, no clock.

Synopsis:

    leaves = [("x", "float32[4, 2]", "for a global float32[8, 2]")]
    card = {"leaves": leaves, "ended": False, "length": None, "uneven": "error"}
    decide(0, [0, 1], card, {})                                        # {"go": True}: both have sent this card
    decide(12, [0, 1], None, {1: {"ended": 12, "uneven": "error"}})    # an error: process 1 has ended, process 0 not

A verdict is a dict that goes through JSON: {"go": True}, {"go": True, "length": 12}, {"end": why} or {"error": text}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxprefetch.errors import OPTION

Uneven = Literal["error", "drop", "pad"]
UNEVEN = ("error", "drop", "pad")

Leaves = Sequence[Sequence[str]]
"""For each leaf: its path, what this process has of it, what it is altogether (empty: the process's own matter)."""

CURE = (
    f"Let every process yield as many batches; {OPTION}uneven='drop') stops all where the first ends, uneven='pad' "
    "(with last_batch='pad') goes on with padding until all have ended."
)


def decide(number: int, processes: Sequence[int], first: Mapping[str, Any] | None, notes: Mapping[int, Any]) -> dict:
    """The verdict on batch `number`, which all processes have announced.

    Args:
        number: of the batch, in this pass since a restart.
        processes: all that take part.
        first: for batch 0, the card of whoever came first: `leaves` (None: it knows of no batch), whether it has
            `ended`, `length` (None: not known), `uneven`.
        notes: of the processes that have something to tell: for batch 0 a `card` that differs from the first; later
            `ended` (after how many batches), `leaves` where they are not those of the batch before, `uneven`.
    """
    if first is None:
        return _decide_later(number, processes, notes)
    cards = {process: notes.get(process, {}).get("card", first) for process in processes}
    modes = _groups({process: card["uneven"] for process, card in cards.items()})
    if len(modes) > 1:
        told = ", ".join(f"{names(group)} uneven={mode!r}" for mode, group in modes.items())
        return _error(number, f"the prefetchers were made differently: {told}. Make them alike in every process.")
    known = {process: card["leaves"] for process, card in cards.items() if card["leaves"] is not None}
    if (difference := _difference(known)) is not None:
        return _error(number, difference)
    ended = {process: 0 for process in processes if cards[process]["ended"]}
    without = [process for process in ended if process not in known]
    if without and len(ended) < len(processes) and first["uneven"] == "pad":
        return _error(
            number,
            f"{names(without)} {_has(without)} no batch at all, so that there is nothing to pad like. Let every "
            "process have a batch at least.",
        )
    if len(ended) == len(processes) or (ended and first["uneven"] != "pad"):
        return _uneven(number, processes, ended, first["uneven"])
    return _by_length(processes, {process: card["length"] for process, card in cards.items()}, first["uneven"])


def names(processes: Sequence[int]) -> str:
    """Process 3, processes 0-2, processes 0, 2-5 and 9."""
    spans: list[list[int]] = []
    for process in sorted(processes):
        if spans and process == spans[-1][1] + 1:
            spans[-1][1] = process
        else:
            spans.append([process, process])
    parts = []
    for a, b in spans:
        parts += [f"{a}-{b}"] if b > a + 1 else [str(process) for process in range(a, b + 1)]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"process {text}" if len(processes) == 1 else f"processes {text}"


def _decide_later(number: int, processes: Sequence[int], notes: Mapping[int, Any]) -> dict:
    ended = {process: note["ended"] for process, note in notes.items() if "ended" in note}
    changed = {process: note["leaves"] for process, note in notes.items() if "leaves" in note}
    if changed and len(changed) + len(ended) < len(processes):
        others = [process for process in processes if process not in changed and process not in ended]
        process = min(changed)
        return _error(
            number,
            f"{names(list(changed))} {_has(changed)} another shape than before ({_told(changed[process])}), and "
            f"{names(others)} {_has(others)} not. Let all change at the same batch; "
            f"{OPTION}last_batch='pad') gives all batches one shape.",
        )
    if (difference := _difference(changed)) is not None:
        return _error(number, difference)
    return _uneven(number, processes, ended, notes[min(ended)]["uneven"]) if ended else {"go": True}


def _uneven(number: int, processes: Sequence[int], ended: Mapping[int, int], uneven: Uneven) -> dict:
    if len(ended) == len(processes):
        return {"end": None}
    others = [process for process in processes if process not in ended]
    counts = [f"{names(group)} ended after {n} batches" for n, group in sorted(_groups(ended).items())]
    told = f"{', '.join(counts)}, {names(others)} {_has(others)} more"
    if uneven == "pad":
        return {"go": True}
    return {"end": told} if uneven == "drop" else _error(number, f"{told}. {CURE}")


def _by_length(processes: Sequence[int], lengths: Mapping[int, int | None], uneven: Uneven) -> dict:
    """All have batch 0; what follows from the lengths of their sources, if all are known."""
    known = [n for n in lengths.values() if n is not None]
    if len(known) < len(processes):
        return {"go": True}
    if min(known) == max(known):
        return {"go": True, "length": known[0]}
    if uneven != "error":
        return {"go": True, "length": min(known) if uneven == "drop" else max(known)}
    told = ", ".join(f"{names(group)} {_has(group)} {n}" for n, group in sorted(_groups(lengths).items()))
    return _error(0, f"the sources have different numbers of batches: {told}. {CURE}")


def _difference(leaves: Mapping[int, Leaves]) -> str | None:
    """Which leaf is not the same in all processes, and what each sends; None when all agree."""
    kinds = _groups({process: tuple((leaf[0], leaf[2]) for leaf in sent) for process, sent in leaves.items()})
    if len(kinds) < 2:
        return None
    (one, some), (other, others) = list(kinds.items())[:2]
    ours, theirs = leaves[some[0]], leaves[others[0]]
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    a, b = (sent[at] if at < len(sent) else None for sent in (ours, theirs))
    told = ", and ".join(f"{names(group)} {_sends(leaf, group)}" for group, leaf in ((some, a), (others, b)))
    where = (a or b or ("batch",))[0]
    return f"leaf {where} is not the same in all processes: {told}. Each yields its rows of one global array."


def _sends(leaf: Sequence[str] | None, processes: Sequence[int]) -> str:
    if leaf is None:
        return f"{_has(processes)} no such leaf"
    return f"{'sends' if len(processes) == 1 else 'send'} {leaf[0]}: {leaf[1]} ({leaf[2]})"


def _told(leaves: Leaves) -> str:
    return ", ".join(f"{leaf[0]}: {leaf[1]}" for leaf in leaves[:3]) + (" ..." if len(leaves) > 3 else "")


def _groups(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Processes by what they have in common."""
    groups: dict[Any, list[int]] = {}
    for process in sorted(values):
        groups.setdefault(values[process], []).append(process)
    return groups


def _has(processes: Any) -> str:
    return "has" if len(processes) == 1 else "have"


def _error(number: int, text: str) -> dict:
    return {"error": f"Batch {number}: {text}"}
