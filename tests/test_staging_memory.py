"""Which host memory a batch takes: none for what is sent from where it lies, a slot where it is worth one."""

from __future__ import annotations

import numpy as np
import pytest

from jaxprefetch.device.placement import Placement
from jaxprefetch.host.slots import Slots
from jaxprefetch.layout import StagingOptions
from jaxprefetch.staging import FEW_BYTES, Stager

LARGE = 2 * FEW_BYTES


def mapped_for(sent: str, **nbytes: int) -> int:
    """Bytes of the slots while a batch of such leaves is staged, of which those named in `sent` need no copy."""
    batch = {name: np.full(n, i + 1, np.uint8) for i, (name, n) in enumerate(sorted(nbytes.items()))}
    slots = Slots()
    directly = {id(batch[name]) for name in sent}
    stager = Stager(Placement(), StagingOptions(fresh_buffers=True), slots, lambda leaf: id(leaf) in directly)
    out = stager.stage(batch, 0, lambda nbytes: None)
    assert out is not None
    leaves = dict(zip(sorted(batch), out.leaves, strict=True))
    for name, leaf in batch.items():
        np.testing.assert_array_equal(leaves[name], leaf)
        assert np.shares_memory(leaves[name], leaf) == (name in sent)
    return slots.mapped_bytes


@pytest.mark.parametrize(
    ("sent", "nbytes", "mapped"),
    [
        ("a", {"a": LARGE, "b": 64}, False),
        ("ab", {"a": LARGE, "b": LARGE}, False),
        ("b", {"a": 8, "b": LARGE, "c": FEW_BYTES - 8}, False),
        ("a", {"a": LARGE, "b": FEW_BYTES + 1}, True),
        ("a", {"a": FEW_BYTES // 2, "b": 64}, True),
        ("", {"a": 64, "b": 8}, True),
        ("", {"a": LARGE, "b": LARGE}, True),
    ],
)
def test_few_bytes_beside_many_that_need_no_copy_take_no_slot(sent: str, nbytes: dict[str, int], mapped: bool) -> None:
    """A slot has room for the whole batch: it is not made for the labels of images that a loader has pinned."""
    assert (mapped_for(sent, **nbytes) > 0) == mapped


def test_an_empty_batch_takes_nothing() -> None:
    """There is nothing to copy."""
    slots = Slots()
    stager = Stager(Placement(), StagingOptions(), slots)
    assert stager.stage({}, 0, lambda nbytes: None) is not None
    assert slots.mapped_bytes == 0
