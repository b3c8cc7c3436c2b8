"""What PyTorch's loader pins is sent to a GPU from where it lies (jaxlib 0.11 and later); what it does not, from slots.

Needs a PyTorch with CUDA beside JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_rows import Filled

from jaxprefetch import prefetch_to_device
from jaxprefetch.device.plan import Plan

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's own call of itself, gone since its #174584 (seen in torch 2.10).
    pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor:DeprecationWarning"),
]

ROWS, BATCHES = 64, 24
LARGE = {"float32": 1 << 15, "uint8": 1 << 15, "bfloat16": 1 << 15}  # 2 MiB a batch and more: they travel alone


@pytest.fixture(autouse=True)
def torch_has_cuda() -> None:
    """Memory is pinned by it."""
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Where the arrays lie that are put, batch by batch."""
    addresses, put = [], Plan.put

    def noting(plan: Plan, leaves: Any) -> Any:
        addresses.append({leaf.ctypes.data for leaf in leaves if isinstance(leaf, np.ndarray)})
        return put(plan, leaves)

    monkeypatch.setattr(Plan, "put", noting)
    return addresses


def loader(values: dict[str, int], workers: int, *, pinned: bool) -> Any:
    """One that notes where the tensors lie that it yields, batch by batch: in `addresses`."""
    from torch.utils.data import DataLoader

    class Noting(DataLoader):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                assert all(tensor.is_pinned() == pinned for tensor in batch.values())
                self.addresses.append({tensor.data_ptr() for tensor in batch.values()})
                yield batch

    context = "forkserver" if workers else None
    made = Noting(
        Filled(BATCHES * ROWS, values), ROWS, num_workers=workers, pin_memory=pinned, multiprocessing_context=context
    )
    made.addresses = []
    return made


@jax.jit
def is_right(batch: dict[str, jax.Array], number: int) -> jax.Array:
    """Whether this batch has the rows that it should have, in each of its leaves."""
    rows = ((number * ROWS + jnp.arange(ROWS)) % 251)[:, None]
    return jnp.stack([jnp.all(leaf == rows.astype(leaf.dtype)) for leaf in batch.values()]).all()


def all_are_right(batches: Any) -> bool:
    """Of a pass, whose steps nobody waits for before its end."""
    results = [is_right(batch, number) for number, batch in enumerate(batches)]
    return len(results) == BATCHES and all(map(bool, results))


def mapped_bytes(batches: Any) -> int:
    """Of its slots."""
    return batches._stager._memory.mapped_bytes


@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_tensors_are_sent_from_where_they_lie(workers: int, sent: list[set[int]]) -> None:
    """Every batch is put from the tensors that the loader yielded, with the right values, and no slot is made."""
    made = loader(LARGE, workers, pinned=True)
    with prefetch_to_device(made) as batches:
        assert all_are_right(batches)
        assert mapped_bytes(batches) == 0
    assert sent == made.addresses


def test_pinned_batches_that_are_kept_do_not_change() -> None:
    """A loop that keeps every batch finds all of them as they were, whatever PyTorch puts into its memory since."""
    with prefetch_to_device(loader(LARGE, 0, pinned=True)) as batches:
        kept = list(batches)
    assert {name: leaf.dtype.name for name, leaf in kept[0].items()} == {name: name for name in LARGE}
    assert all_are_right(kept)


def test_small_pinned_tensors_travel_packed(sent: list[set[int]]) -> None:
    """A large tensor is put from where it lies, and small ones beside it together, without a slot for the batch."""
    made = loader({"float32": 1 << 15, "uint8": 1, "int16": 2, "bfloat16": 3}, 0, pinned=True)
    with prefetch_to_device(made) as batches:
        assert all_are_right(batches)
        assert mapped_bytes(batches) == 0
    found = [(len(put), len(put & yielded)) for put, yielded in zip(sent, made.addresses, strict=True)]
    assert found == [(2, 1)] * BATCHES


@pytest.mark.parametrize(("workers", "pinned", "fresh_buffers"), [(0, False, None), (1, False, None), (0, True, False)])
def test_other_tensors_go_through_slots(
    workers: int, pinned: bool, fresh_buffers: bool | None, sent: list[set[int]]
) -> None:
    """Tensors in ordinary memory are copied, and those that `fresh_buffers=False` says may be written again."""
    made = loader(LARGE, workers, pinned=pinned)
    with prefetch_to_device(made, fresh_buffers=fresh_buffers) as batches:
        assert all_are_right(batches)
        assert mapped_bytes(batches) > 0
    assert not any(put & yielded for put, yielded in zip(sent, made.addresses, strict=True))
