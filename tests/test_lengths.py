"""Which sources tell how many batches they have, where several processes rely on it."""

from __future__ import annotations

import grain
import numpy as np
import pytest

from jaxprefetch.host.loaders import exact_length
from jaxprefetch.host.resume import ResumableSource

BATCHES = [{"x": np.zeros(4)}] * 7


class Loader:
    """As PyTorch's: it has a data set, and a length that counts batches."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return 3

    def __iter__(self):
        return iter(BATCHES)


class IterableDataset:
    """As PyTorch's: what it says is a guess."""

    def __len__(self):
        return 6

    def __getitem__(self, number):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("source", "length"),
    [
        (BATCHES, 7),
        (tuple(BATCHES), 7),
        (grain.MapDataset.source(BATCHES), 7),
        (Loader(BATCHES), 3),
        (iter(BATCHES), None),
        ((batch for batch in BATCHES), None),
        (set("abc"), None),
        (Loader(IterableDataset()), None),
    ],
)
def test_lengths_that_are_exact(source, length):
    """Sequences tell it, and loaders over sequences; nothing else is believed."""
    assert exact_length(source) == length


def test_the_length_of_the_rest():
    """After a resume by replay it is that of what is left of the pass, then of whole passes again."""
    source = ResumableSource(BATCHES, "replay")
    source.go_to(1, 5, None)
    assert [source.length(), source.length()] == [2, 7]


def test_the_length_behind_a_place_of_the_source_s_own():
    """A source that knows its own place does not tell how much is left."""
    source = ResumableSource(grain.MapDataset.source(BATCHES))
    source.go_to(0, 3, {"next_index": 3})
    assert [source.length(), source.length()] == [None, 7]
