"""What the window can ask for, and the fact to report when it is done."""

from __future__ import annotations

from enum import Enum, auto


class Do(Enum):
    """What the caller has to do next; each says which fact to report afterwards."""

    SETTLE = auto()  # wait until the batch has landed, or find it deleted or donated: settled(batch, disposed=...)
    ISSUE = auto()  # put the batch: issue(), or refuse() when the device has no memory for it
    FENCE = auto()  # dispatch a fence behind the step of this batch: fence(batch)
    AWAIT_FENCE = auto()  # wait for that fence: fence_done(batch)
    PROVE_LANDING = auto()  # wait until a batch put after this one, or a marker, has landed: proved(batch)
    AWAIT_SOURCE = auto()  # wait until the source has delivered or ended: stage() or end()
    AWAIT_STAGED = auto()  # look at the fence of step batch-1 and at the landing of batch, then wait a little for both
    HAND_OUT = auto()  # return the batch: hand_out()
    END = auto()  # the source has ended or failed, and everything before that has been handed out
    NO_ROOM = auto()  # the batch is needed and can never fit: an error


Action = tuple[Do, int]
"""One of these, and the batch that it is about."""
