"""What a process tells the others of its batches, and the errors that come of what they tell.

Synopsis:

    cards = Cards(process=1, uneven="error")
    cards.card(staged, length=12)        # of batch 0: leaves, length, mode
    cards.note(staged, None)             # of a later one: None where it is like the batch before
    cards.note(End(), 12)                # {"ended": 12, "uneven": "error"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding

from jaxprefetch.host.pipeline import End
from jaxprefetch.processes.verdict import Uneven


class Cards:
    """Describes batches in order.

    Args:
        process: this one.
        uneven: the mode of its prefetcher.
    """

    def __init__(self, process: int, uneven: Uneven):
        self.process, self.uneven = process, uneven
        self._plan: Any = None
        self._leaves: list[list[str]] | None = None  # of the batch before

    def card(self, item: Any, length: int | None) -> dict[str, Any]:
        """Of batch 0, or of its absence."""
        if not isinstance(item, End):
            self.see(item)
        return {"leaves": self._leaves, "ended": isinstance(item, End), "length": length, "uneven": self.uneven}

    def see(self, item: Any) -> None:
        """What the next batch is compared with."""
        self._plan, self._leaves = item.plan, [_described(leaf) for leaf in item.plan.leaves]

    def note(self, item: Any, ended_at: int | None) -> dict[str, Any] | None:
        """Of a later batch; None where there is nothing to tell.

        Args:
            ended_at: how many batches there were, if `item` is the end.
        """
        if isinstance(item, End):
            return {"ended": ended_at, "uneven": self.uneven}
        if item.plan is self._plan:
            return None
        before = self._leaves
        self.see(item)
        return None if self._leaves == before else {"leaves": self._leaves}

    def is_like_the_last(self, item: Any) -> bool:
        """Whether there is nothing to tell of it."""
        return not isinstance(item, End) and item.plan is self._plan


def gone(process: int, number: int) -> str:
    """The error of those who wait for batches of a process that takes no more."""
    return (
        f"Batch {number}: process {process} has left the loop (it has closed its prefetcher, or an error has), and "
        "this process wants more. Leave the loop at the same batch in every process; that one's log may tell more."
    )


def told(error: BaseException, process: int, number: int) -> str:
    """The error of the other processes, when the source of one has failed."""
    text = f"Batch {number}: process {process} has failed: {type(error).__name__}: {error}"
    return text if len(text) < 2000 else text[:2000] + " ..."


def error_of(verdict: Mapping[str, Any]) -> Exception:
    """What a verdict raises: another process has failed, or the input of all does not fit together."""
    return (RuntimeError if "process" in verdict else ValueError)(verdict["error"])


def wrong_length(said: int | None, number: int, *, ended: bool) -> ValueError:
    """The error for a source that is not as long as it says."""
    has = f"it has ended after {number}" if ended else "it has more"
    return ValueError(
        f"Batch {number}: len(source) is {said}, and {has}. Several processes rely on what len() says: let it be the "
        "number of batches of a pass, or iterate something without it (iter(source))."
    )


def _described(leaf: Any) -> list[str]:
    """A leaf's path, what this process has of it, and what it is in all of them; the last is empty if it is its own."""
    if leaf.target is None or leaf.target.is_local:
        return [leaf.path, str(leaf.spec), ""]
    sharding = leaf.spec.sharding
    place = f"{sharding.spec} over {dict(sharding.mesh.shape)}" if isinstance(sharding, NamedSharding) else sharding
    whole = f"{list(leaf.spec.shape)} split by {place}"
    return [leaf.path, f"{leaf.dtype}{list(leaf.shape)}", f"for a global {leaf.dtype}{whole}"]
