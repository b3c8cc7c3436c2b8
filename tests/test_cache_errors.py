"""What a cache refuses: it is told with what was expected, and nothing has changed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cached import FOUR, MESH, SPEC, SPLIT, content, examples
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxprefetch import DeviceCache


@pytest.mark.parametrize(
    ("slots", "error", "text"),
    [
        ([0, 4, 8, 16], IndexError, r"row 3 names slot 16, but there are slots 0 to 15"),
        ([-1, 4, 8, 12], IndexError, r"row 0 names slot -1, but there are slots 0 to 15"),
        ([0, 4, 8, 14], IndexError, r"row 3 names slot 14, but it holds no example: the first 2 slots"),
        ([0, 4, 12, 8], ValueError, r"row 2 names slot 12, but that row is on another device, which has 4 slots"),
        ([0, 4, 8], ValueError, r"rows being a positive multiple of 4, got int64 of shape \(3,\)"),
        ([], ValueError, r"expected integers of shape \(rows,\)"),
        ([[0, 4, 8, 12]], ValueError, r"got int64 of shape \(1, 4\)"),
        ([0.0, 4.0, 8.0, 12.0], ValueError, r"expected integers .* got float64"),
    ],
)
def test_wrong_slots_are_errors_that_change_nothing(slots: Any, error: type[Exception], text: str) -> None:
    """A slot that is not there, holds nothing or is another device's is named; no take is counted."""
    with DeviceCache(16, examples(*range(8)), sharding=SPLIT) as cache:
        before = content(cache)
        with pytest.raises(error, match=f"take: .*{text}"):
            cache.take(slots)
        with pytest.raises((error, ValueError), match="insert"):
            cache.insert(examples(9, 9, 9, 9), slots)
        assert (content(cache), cache.takes, len(cache)) == (before, 0, 8)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"x": np.ones((4, 4), np.float32)},
            ValueError,
            "expected n, x, got x: n is missing. Pass a tree with the same keys",
        ),
        (
            {**examples(1, 2, 3, 4), "x": np.ones((4, 5), np.float32)},
            ValueError,
            r"leaf x: .*\(rows, 4\), got \(4, 5\)",
        ),
        ({**examples(1, 2, 3, 4), "x": np.ones(4, np.float32)}, ValueError, r"leaf x: .*shape \(rows, 4\), got \(4,\)"),
        (
            {**examples(1, 2, 3, 4), "n": np.ones(4)},
            ValueError,
            r"leaf n: expected int32, got float32.*astype\('int32'\)",
        ),
        ({**examples(1, 2, 3, 4), "n": 3}, ValueError, "leaf n: expected an array with an axis of rows, got int 3"),
        ({**examples(1, 2, 3, 4), "n": "four"}, TypeError, "leaf n: str cannot go to a device"),
        ({**examples(1, 2, 3, 4), "x": np.ones((8, 4), np.float32)}, ValueError, r"leaf x: expected 4 rows.* got 8"),
        (examples(1, 2, 3), ValueError, "expected a positive multiple of 4 rows, .* got 3"),
        (examples(), ValueError, "expected a positive multiple of 4 rows, .* got 0"),
        (examples(*range(20)), ValueError, "20 examples are more than the 16 slots"),
    ],
)
def test_wrong_examples_are_errors_that_change_nothing(given: Any, error: type[Exception], text: str) -> None:
    """Another structure, shape, dtype or number of rows names the leaf, and nothing is written."""
    with DeviceCache(16, examples(*range(8)), sharding=SPLIT) as cache:
        before = content(cache)
        with pytest.raises(error, match=f"insert.*{text}"):
            cache.insert(given)
        assert (content(cache), len(cache)) == (before, 8)
        cache.insert(examples(*range(20, 24)))
        assert content(cache)[2] == 20


def test_named_slots_are_one_for_each_row() -> None:
    """The same slot twice, or another number of them, is an error."""
    with DeviceCache(8, examples(*range(8))) as cache:
        with pytest.raises(ValueError, match="insert: expected 2 different slots, one for each row, got 1"):
            cache.insert(examples(1, 2), [3, 3])
        with pytest.raises(ValueError, match="insert: expected 2 different slots, one for each row, got 3"):
            cache.insert(examples(1, 2), [3, 4, 5])


@pytest.mark.parametrize(
    ("capacity", "given", "sharding", "error", "text"),
    [
        (0, SPEC, None, ValueError, "capacity: expected an integer of at least 1"),
        (6, SPEC, SPLIT, ValueError, "capacity: 6 slots cannot be split evenly over 4 devices. Take a multiple of 4"),
        (8, {}, None, ValueError, "there are no leaves"),
        (8, {"x": SPEC["x"], "n": np.ones(3)}, None, TypeError, "leaf x: pass arrays for all leaves"),
        (8, {"x": "text"}, None, TypeError, "examples, leaf x: str cannot go to a device"),
        (8, {"k": jax.random.split(jax.random.key(0), 8)}, None, TypeError, r"leaf k: .*key_data"),
        (8, {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}, NamedSharding(MESH, P("data", "model")), ValueError,
         "leaf x: axis 1 has 3 rows; the 2 devices along mesh axis 'model'"),
        (8, SPEC, {"x": SPLIT, "n": NamedSharding(FOUR, P())}, ValueError, "split axis 0 of all of them"),
        (8, SPEC, {"y": None}, ValueError, "examples: sharding .* y, got n, x: y is missing, n, x are too many"),
        (4, examples(*range(8)), None, ValueError, "examples: 8 examples are more than the 4 slots"),
    ],
)  # fmt: skip
def test_a_cache_that_cannot_be_is_an_error(
    capacity: Any, given: Any, sharding: Any, error: type[Exception], text: str
) -> None:
    """What does not fit together is told when the cache is made."""
    with pytest.raises(error, match=text):
        DeviceCache(capacity, given, sharding=sharding)


def test_an_empty_cache_has_no_batches() -> None:
    """Nothing can be taken before something was inserted."""
    with DeviceCache(8, SPEC) as cache:
        with pytest.raises(IndexError, match="row 0 names slot 0, but it holds no example"):
            cache.take([0])
        with pytest.raises(ValueError, match="holds no example yet"):
            next(cache.batches(4, jax.random.key(0)))
