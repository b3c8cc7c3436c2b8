"""Slots on a GPU: batches from ordinary arrays are copied into registered memory that is used again and again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprefetch import prefetch_to_device

pytestmark = pytest.mark.gpu

SHAPE = (256, 4096)  # 4 MiB of float32
total = jax.jit(lambda batch: jnp.sum(batch["x"], dtype=jnp.float32) + batch["y"])


def reusing_one_buffer(n: int):
    """A source that writes every batch into the same array."""
    x = np.empty(SHAPE, np.float32)
    for i in range(n):
        x[:] = i
        yield {"x": x, "y": np.float32(i)}


def slots(batches):
    """The memory that its batches are sent from."""
    return batches._stager._memory


def expected(i: int) -> float:
    return i * SHAPE[0] * SHAPE[1] + i


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("host_size", [0, 1, 4])
@pytest.mark.parametrize("use", ["keep the result", "delete", "donate", "skip", "delete_used"])
def test_values_are_right_while_slots_are_reused(size, host_size, use) -> None:
    """100 batches from one buffer of the source arrive as they were, in few slots, whatever the loop does with them."""
    results = []
    donating = jax.jit(lambda batch: (batch["x"] * 2, batch["y"] * 2, total(batch)), donate_argnums=0)
    with prefetch_to_device(
        reusing_one_buffer(100), size, host_size=host_size, delete_used=use == "delete_used"
    ) as batches:
        for i, batch in enumerate(batches):
            if use == "skip" and i % 3:
                continue
            results.append((i, donating(batch)[-1] if use == "donate" else total(batch)))
            if use == "delete":
                for leaf in jax.tree.leaves(batch):
                    leaf.delete()
        mapped = slots(batches).mapped_bytes
    assert [float(result) for _, result in results] == [pytest.approx(expected(i)) for i, _ in results]
    assert mapped <= (max(host_size, 1) + size + 3) * (5 << 20)


def test_batches_that_are_kept_do_not_change() -> None:
    """A loop that keeps every batch finds all of them as they were delivered."""
    with prefetch_to_device(reusing_one_buffer(40)) as batches:
        kept = list(batches)
    for i, batch in enumerate(kept):
        assert np.unique(np.asarray(batch["x"])).tolist() == [i]


def test_memory_is_registered_and_given_back() -> None:
    """Slots are sent from directly while the prefetcher lives, and nothing is mapped when it is closed."""
    with prefetch_to_device(reusing_one_buffer(10)) as batches:
        next(batches)
        memory = slots(batches)
        assert memory._register is not None  # else it was refused
        assert memory.mapped_bytes
    del batches
    gc.collect()
    jax.device_put(np.zeros(1)).block_until_ready()  # JAX lets go of what it has sent at the next put
    assert memory.mapped_bytes == 0


def test_changing_lengths_share_slots() -> None:
    """Batches of twenty lengths are sent from a bounded number of slots."""
    rng = np.random.default_rng(0)
    lengths = np.repeat(rng.integers(900_000, 1_100_000, 20), 10)
    rng.shuffle(lengths)

    def source():
        for n in lengths:
            yield np.full(n, n, np.int32)

    with prefetch_to_device(source(), max_host_bytes="64MiB") as batches:
        for n, batch in zip(lengths, batches, strict=True):
            assert batch.shape == (n,)
            assert int(batch[0]) == int(batch[-1]) == n
        assert slots(batches).mapped_bytes <= 64 << 20


@pytest.mark.parametrize("end", ["the end", "an error", "sys.exit", "no close"])
def test_a_process_ends_well_with_slots_in_use(end) -> None:
    """Whatever is registered or on its way when the interpreter ends: its own exit code, and no message."""
    code = textwrap.dedent(f"""
        import sys
        import numpy as np
        from jaxprefetch import prefetch_to_device
        batches = prefetch_to_device((np.full((64, 1 << 20), i, np.uint8) for i in range(1000)), 3)
        for i, batch in enumerate(batches):
            if i == 3:
                break
        if {end!r} == "an error":
            raise SystemExit(3)
        if {end!r} == "sys.exit":
            sys.exit(3)
        if {end!r} == "the end":
            batches.close()
    """)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has taken most of the memory
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert run.returncode == (3 if end in ("an error", "sys.exit") else 0), run.stderr
    assert not run.stderr
