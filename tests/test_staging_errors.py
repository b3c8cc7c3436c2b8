"""Errors while a batch is staged: what the source's own code raises keeps its type and is told with the batch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxprefetch import prefetch_to_device

X = np.arange(4, dtype=np.float32)


class Odd(Exception):
    """An error of the source's own."""


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """One that refuses notes."""

    code: int


class Lazy:
    """A leaf that is read when it becomes an array."""

    def __init__(self, error: Exception):
        self.error = error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise self.error


@jax.tree_util.register_pytree_node_class
class Broken:
    """A node that raises when it is flattened."""

    def __init__(self, error: Exception):
        self.error = error

    def tree_flatten(self) -> Any:
        raise self.error

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Broken:
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tagged:
    x: Any
    tag: Any = dataclasses.field(metadata={"static": True})


def refuses(path: str, leaf: Any) -> bool:
    """For keep_on_host."""
    if isinstance(leaf, Exception):
        raise leaf
    return False


BATCHES: dict[str, Callable[[Exception], Any]] = {
    "__array__": lambda error: {"a": {"x": Lazy(error)}},
    "node": lambda error: {"a": Broken(error)},
    "predicate": lambda error: {"a": error},
}


def fails(batch: Any, host_size: int) -> BaseException:
    """The error of batch 1, after batch 0 has arrived."""
    with prefetch_to_device([{"a": X}, batch], host_size=host_size, keep_on_host=refuses) as batches:
        next(batches)
        with pytest.raises((Odd, Frozen), match="17") as caught:
            next(batches)
    return caught.value


@pytest.mark.parametrize("host_size", [0, 4])
@pytest.mark.parametrize("where", BATCHES)
def test_errors_of_the_source_s_code_keep_their_type(where: str, host_size: int) -> None:
    """What a leaf, a node or the predicate raises arrives itself, with the batch in a note."""
    error = Odd("17")
    assert fails(BATCHES[where](error), host_size) is error
    assert error.__notes__[-1] == "jaxprefetch: raised while batch 1 was staged"


@pytest.mark.parametrize("host_size", [0, 4])
@pytest.mark.parametrize("where", BATCHES)
def test_errors_that_refuse_notes_arrive(where: str, host_size: int) -> None:
    """An exception to which no note can be added arrives without one."""
    error = Frozen(17)
    assert fails(BATCHES[where](error), host_size) is error


def test_an_array_that_cannot_be_made_is_told_with_its_leaf() -> None:
    """What `__array__` raises has batch and leaf in a note."""
    error = fails(BATCHES["__array__"](Odd("17")), 4)
    assert error.__notes__[0] == "jaxprefetch: Batch 1, leaf a/x: raised where Lazy became a NumPy array"


def test_static_fields_that_cannot_be_compared_are_told_with_their_batch() -> None:
    """Where JAX cannot compare static fields, as those that are arrays, its error has the batch in a note."""
    with prefetch_to_device([Tagged(X, np.arange(2)), Tagged(X, np.arange(2))]) as batches:
        next(batches)
        with pytest.raises(ValueError, match="jaxprefetch: raised while batch 1 was staged"):
            next(batches)


@pytest.mark.parametrize("options", [{}, {"sharding": {"a": None}}, {"keep_on_host": "b"}], ids=str)
def test_errors_of_ours_need_no_note(options: dict[str, Any]) -> None:
    """Errors that name their batch by themselves are not told twice."""
    with (
        prefetch_to_device([{"x": object()}], **options) as batches,
        pytest.raises((TypeError, ValueError), match=r"(?s)^Batch 0.*\.$") as caught,
    ):
        next(batches)
    assert not hasattr(caught.value, "__notes__")


def test_float0_is_refused() -> None:
    """The tangents of integers, which hold nothing, are an error with batch, leaf and cure."""
    tangents = np.zeros(3, jax.dtypes.float0)
    text = r"Batch 0, leaf g: arrays of dtype .*float0.* cannot go to a device. prefetch_to_device.*keep_on_host"
    with prefetch_to_device([{"g": tangents}]) as batches, pytest.raises(TypeError, match=text):
        next(batches)
    with prefetch_to_device([{"g": tangents, "x": X}], keep_on_host="g") as batches:
        assert next(batches)["g"].dtype == jax.dtypes.float0


@pytest.mark.parametrize("host_size", [0, 4])
@pytest.mark.parametrize("last_batch", ["error", "pad"])
@pytest.mark.parametrize("value", [np.full(4, -1e300), np.float64(1e300), 1e300, -1e300j, np.full(4, 1e-300)], ids=repr)
def test_floats_that_are_too_large_become_infinite(value: Any, last_batch: Any, host_size: int) -> None:
    """With x64 off, floats beyond the range of 32 bits become infinite or zero, wherever NumPy makes that an error."""
    with np.errstate(all="ignore"):
        expected = np.asarray(value).astype(np.complex64 if isinstance(value, complex) else np.float32)
    with warnings.catch_warnings(), np.errstate(all="raise"), jax.enable_x64(False):
        warnings.simplefilter("error")
        source = [{"x": X, "value": value}] * 3
        with prefetch_to_device(source, host_size=host_size, last_batch=last_batch) as batches:
            taken = [batch["value"] for batch in batches]
    assert len(taken) == 3
    for out in taken:
        np.testing.assert_array_equal(np.asarray(out), expected)
