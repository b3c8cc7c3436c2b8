"""PyTorch's loaders and torchdata's: resumed by their own state, or by replay; never in another order unseen.

pip install ".[test,interop]" && pytest -m interop
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxprefetch import prefetch_to_device
from jaxprefetch.host.states import from_json, to_json

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning"),  # the loader's workers
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11 with torch 2.13
]


class Rows:
    """A map-style data set of 21 rows."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> np.float32:
        return np.float32(index)


def loader(kind: str = "DataLoader", **options: Any) -> Any:
    import torch
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    made = {"DataLoader": DataLoader, "StatefulDataLoader": StatefulDataLoader}[kind]
    options = {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(0)} | options
    return made(Rows(), **options)


def rows(batches: Any) -> list[list[int]]:
    return [np.asarray(batch).astype(int).tolist() for batch in batches]


def resumed(make, resume, taken, ended, passes):
    """The batches of so many passes after the place, without and with a restart there."""
    with prefetch_to_device(make(), resume=resume) as batches:
        for _ in range(taken):
            next(batches)
        if ended:
            assert next(batches, None) is None
        state = json.dumps(to_json(batches.get_state()))
        expected = [rows(batches) for _ in range(passes)]
    with prefetch_to_device(make(), resume=resume) as batches:
        batches.set_state(from_json(json.loads(state)))
        return expected, [rows(batches) for _ in range(passes)]


@pytest.mark.parametrize(("taken", "ended"), [(0, False), (1, False), (4, False), (7, False), (7, True)])
@pytest.mark.parametrize(
    ("kind", "workers", "resume", "passes"),
    [
        ("DataLoader", 0, "replay", 3),
        ("StatefulDataLoader", 0, "replay", 3),
        ("StatefulDataLoader", 1, None, 3),
        ("StatefulDataLoader", 0, None, 1),  # torchdata 0.11 shuffles the next pass in another order than without us
    ],
)
def test_loaders_go_on_where_they_were(kind, workers, resume, passes, taken, ended):
    """After a restart the same batches follow as without it."""
    if ended and (kind, workers, resume) == ("StatefulDataLoader", 0, None):
        taken, ended = 6, False
    expected, got = resumed(lambda: loader(kind, num_workers=workers), resume, taken, ended, passes)
    assert got == expected


def test_shuffling_without_a_generator_is_refused():
    """A loader whose order comes from the global random state does not repeat it."""
    with pytest.raises(ValueError, match="this DataLoader shuffles with the global random state"):
        prefetch_to_device(loader(generator=None), resume="replay")
    prefetch_to_device(loader(generator=None, shuffle=False), resume="replay").close()


@pytest.mark.parametrize("generator", [None, 0])
@pytest.mark.parametrize("place", ["batch_sampler", "sampler"])
def test_shuffling_below_a_sampler_of_batches_is_refused(place, generator):
    """So it is where the random sampler is one that another takes its indices from."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    data = torch.arange(12)
    own = None if generator is None else torch.Generator().manual_seed(generator)
    batches = BatchSampler(RandomSampler(data, generator=own), 4, False)
    made = DataLoader(data, **({"batch_size": None} if place == "sampler" else {}) | {place: batches})
    if own is None:
        with pytest.raises(ValueError, match="this DataLoader shuffles with the global random state"):
            prefetch_to_device(made, resume="replay")
    else:
        prefetch_to_device(made, resume="replay").close()


def test_plain_loader_is_refused_with_the_cure():
    """PyTorch's own loader has no state."""
    with (
        prefetch_to_device(loader()) as batches,
        pytest.raises(TypeError, match=r'a DataLoader cannot be resumed.*pass resume="replay"'),
    ):
        batches.get_state()
