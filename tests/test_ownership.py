"""Values never change: whatever the source does with its buffers and the consumer with its batches."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device

ROWS, BATCHES = 16, 12


def aligned(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """An array that XLA's CPU client would alias: 64-byte aligned and contiguous."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def value(number: int, leaf: str) -> np.ndarray:
    """What leaf `leaf` of batch `number` holds; both leaves have one shape and dtype."""
    return np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4) + 1000 * number + (500 if leaf == "y" else 0)


def one_buffer(batches: int = BATCHES) -> Iterator[dict[str, np.ndarray]]:
    """A source that writes all its batches into the same two aligned buffers, and scribbles over them at the end."""
    batch = {"x": aligned((ROWS, 4)), "y": aligned((ROWS, 4))}
    for number in range(batches):
        for leaf in batch:
            batch[leaf][...] = value(number, leaf)
        yield batch
        for leaf in batch:
            batch[leaf][...] = -1


def fresh_buffers(batches: int = BATCHES) -> Iterator[dict[str, np.ndarray]]:
    """A source that makes new aligned arrays for each batch."""
    for number in range(batches):
        batch = {leaf: aligned((ROWS, 4)) for leaf in "xy"}
        for leaf in batch:
            batch[leaf][...] = value(number, leaf)
        yield batch


def check(number: int, batch: dict[str, Any], leaves: str = "xy") -> None:
    for leaf in leaves:
        np.testing.assert_array_equal(np.asarray(batch[leaf]), value(number, leaf))


def shardings() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    return {
        "default": None,
        "device": jax.devices()[6],
        "rows": NamedSharding(mesh, PartitionSpec("data")),
        "columns": NamedSharding(mesh, PartitionSpec(None, "model")),
        "both": NamedSharding(mesh, PartitionSpec("data", "model")),
        "replicated": NamedSharding(mesh, PartitionSpec()),
        "one device": NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data")),
        "prefix": {"x": None, "y": NamedSharding(mesh, PartitionSpec("data"))},
    }


by_sharding = pytest.mark.parametrize("sharding", list(shardings()))


# ---- the source


@by_sharding
@pytest.mark.parametrize("options", [{}, {"size": 1}, {"size": 5}, {"host_size": 0}, {"last_batch": "pad"}], ids=str)
def test_a_source_may_reuse_one_buffer(sharding: str, options: dict[str, Any]) -> None:
    """All batches of a source with a single aligned buffer, kept until the end, still hold their own values."""
    target = shardings()[sharding]
    with prefetch_to_device(one_buffer(), sharding=target, **options) as batches:
        kept = list(batches)
    assert len(kept) == BATCHES
    for number, batch in enumerate(kept):
        check(number, batch)


def test_kept_leaves_do_not_change_either() -> None:
    """A leaf that stays on the host is the batch's own, too."""
    with prefetch_to_device(one_buffer(), keep_on_host="y") as batches:
        kept = list(batches)
    assert all(isinstance(batch["y"], np.ndarray) for batch in kept)
    for number, batch in enumerate(kept):
        check(number, batch)


def test_no_leaf_shares_a_buffer_with_another() -> None:
    """One array yielded as several leaves of several batches becomes as many buffers."""
    leaf = aligned((ROWS, 4))
    with prefetch_to_device([{"a": leaf, "b": [leaf, leaf[::1]]}] * 3) as batches:
        kept = list(batches)
    pointers = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(kept)]
    assert len({*pointers, address(leaf)}) == len(pointers) + 1


# ---- the promise of fresh buffers


@pytest.mark.parametrize("host_size", [0, 4])
def test_fresh_buffers_are_not_copied(host_size: int) -> None:
    """On a CPU the arrays alias the memory of a source that promises fresh buffers."""
    made = list(fresh_buffers())
    with prefetch_to_device(iter(made), fresh_buffers=True, host_size=host_size) as batches:
        for number, batch in enumerate(batches):
            check(number, batch)
            for leaf, array in batch.items():
                assert array.unsafe_buffer_pointer() == address(made[number][leaf])


def overlapping(kind: str) -> dict[str, np.ndarray]:
    base = aligned((64, 16))
    base[...] = np.arange(1024).reshape(64, 16)
    return {
        "the same": {"a": base, "b": base},
        "a view": {"a": base, "b": base[:8]},
        "a reshaped view": {"a": base, "b": base.reshape(-1)},
        "another start": {"a": base[:48], "b": base[16:]},
        "another start before": {"a": base[16:], "b": base[:48]},
        "inside": {"a": base[8:16], "b": base},
    }[kind]


@pytest.mark.parametrize(
    "kind", ["the same", "a view", "a reshaped view", "another start", "another start before", "inside"]
)
def test_fresh_leaves_that_overlap_become_separate(kind: str) -> None:
    """Leaves of one batch that share memory do not share it on the device, even with fresh buffers."""
    batch = overlapping(kind)
    assert np.shares_memory(batch["a"], batch["b"])
    with prefetch_to_device([batch], fresh_buffers=True) as batches:
        out = next(batches)
    spans = sorted((array.unsafe_buffer_pointer(), array.nbytes) for array in out.values())
    assert spans[0][0] + spans[0][1] <= spans[1][0]
    jax.tree.map(np.testing.assert_array_equal, out, batch)


def test_fresh_buffers_survive_donation() -> None:
    """Donating a batch does not write into the arrays that the source made."""
    made = list(fresh_buffers())
    step = jax.jit(lambda batch: jax.tree.map(lambda x: x * 0 - 1, batch), donate_argnums=0)
    with prefetch_to_device(iter(made), fresh_buffers=True) as batches:
        for batch in batches:
            jax.block_until_ready(step(batch))
    for number, batch in enumerate(made):
        check(number, batch)


def test_memory_of_the_source_is_let_go() -> None:
    """Once a batch is gone, nothing of ours keeps its fresh source array alive."""
    made = [np.ones((ROWS, 4), np.float32) for _ in range(4)]
    references = [weakref.ref(array) for array in made]
    source = iter([{"x": array} for array in made])
    del made
    with prefetch_to_device(source, fresh_buffers=True) as batches:
        for _batch in batches:
            pass
    del _batch, source
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


# ---- delete_used


@pytest.mark.parametrize("size", [1, 2, 3])
def test_delete_used_deletes_the_batch_before(size: int) -> None:
    """Batch k-1 is deleted by the call that returns batch k, not sooner, and the last one by the call that ends."""
    with prefetch_to_device(one_buffer(), size, delete_used=True) as batches:
        taken: list[Any] = []
        for number in range(BATCHES):
            taken.append(next(batches))
            check(number, taken[-1])
            alive = [not leaf.is_deleted() for batch in taken for leaf in batch.values()]
            assert alive == [False] * 2 * number + [True] * 2
        with pytest.raises(StopIteration, match=r"^$"):
            next(batches)
        assert all(leaf.is_deleted() for batch in taken for leaf in batch.values())


def test_close_leaves_the_held_batch_alone() -> None:
    """With delete_used, closing does not delete the batch in the loop's hands."""
    with prefetch_to_device(one_buffer(), delete_used=True) as batches:
        next(batches)
        held = next(batches)
    check(1, held)


@pytest.mark.parametrize("sharding", [None, "device", "same"])
def test_delete_used_spares_arrays_of_the_source(sharding: str | None) -> None:
    """delete_used deletes what was made from host data and never a jax.Array of the source's, nor its buffer."""
    target = {None: None, "device": jax.devices()[1], "same": jax.devices()[0]}[sharding]
    made = [jax.device_put(value(number, "x"), jax.devices()[0]) for number in range(4)]
    source = [{"x": array, "y": value(number, "y")} for number, array in enumerate(made)]
    with prefetch_to_device(source, sharding=target, delete_used=True) as batches:
        taken = list(batches)
    for number, array in enumerate(made):
        np.testing.assert_array_equal(np.asarray(array), value(number, "x"))
    assert all(batch["y"].is_deleted() for batch in taken)


# ---- the consumer


def deletes(batch: dict[str, jax.Array]) -> None:
    for leaf in batch.values():
        leaf.delete()


donate = jax.jit(lambda x: x + 1, donate_argnums=0)

CONSUMERS: dict[str, Callable[[dict[str, jax.Array]], Any]] = {
    "deletes": deletes,
    "deletes one leaf": lambda batch: batch["x"].delete(),
    "donates": lambda batch: (donate(batch["x"]), donate(batch["y"])),
    "donates one leaf": lambda batch: donate(batch["y"]),
    "donates one and deletes another": lambda batch: (donate(batch["y"]), batch["x"].delete()),
    "skips": lambda batch: None,
    "waits": jax.block_until_ready,
}


@by_sharding
@pytest.mark.parametrize("delete_used", [False, True])
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_consumer_may_do_what_it_likes(consumer: str, delete_used: bool, sharding: str) -> None:
    """A loop that deletes, donates, skips or waits for batches, or parts of them, sees the right values."""
    use = CONSUMERS[consumer]
    number = -1
    options = {"sharding": shardings()[sharding], "delete_used": delete_used}
    with prefetch_to_device(one_buffer(), **options) as batches:
        for number, batch in enumerate(batches):
            check(number, batch)
            use(batch)
    assert number == BATCHES - 1


def test_the_consumer_may_change_its_mind() -> None:
    """A loop that treats every batch in another way sees the right values, and what it keeps does not change."""
    kept = {}
    with prefetch_to_device(one_buffer(40), 3) as batches:
        for number, batch in enumerate(batches):
            check(number, batch)
            uses = [*CONSUMERS.values()]
            if number % 3:
                uses[number % len(uses)](batch)
            else:
                kept[number] = batch
    assert len(kept) == 14
    for number, batch in kept.items():
        check(number, batch)
