"""Batches of registered classes: rebuilt from real leaves only, whatever their constructors check."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device


def named(*axes: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec(*axes))


def rows(n: int = 8) -> np.ndarray:
    return np.arange(2 * n, dtype=np.float32).reshape(n, 2)


@jax.tree_util.register_pytree_node_class
class Checked:
    """Takes nothing but arrays with two axes."""

    def __init__(self, x: Any):
        if not isinstance(x, (np.ndarray, jax.Array)) or x.ndim != 2:
            raise TypeError(f"x: expected an array with two axes, got {x!r}")
        self.x = x

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> Checked:
        return cls(*children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Shaped:
    """Looks at shapes only."""

    x: Any

    def __post_init__(self) -> None:
        if len(self.x.shape) != 2:
            raise ValueError("x: two axes")


SHARDINGS = {
    "one": lambda: named("data"),
    "default": lambda: None,
    "prefix": lambda: {"node": named("data"), "y": None},
    "deep prefix": lambda: {"node": [named("data")], "y": jax.devices()[3]},
}


@pytest.mark.parametrize("last_batch", ["error", "drop", "pad"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_nodes_that_check_their_leaves_arrive(sharding: str, last_batch: Any) -> None:
    """A class that takes nothing but arrays is never built with anything else."""
    source = [{"node": [Checked(rows())], "y": rows()} for _ in range(3)]
    with prefetch_to_device(source, sharding=SHARDINGS[sharding](), last_batch=last_batch) as batches:
        for out in batches:
            assert type(out["node"][0]) is Checked
            np.testing.assert_array_equal(np.asarray(out["node"][0].x), rows())
            assert ("mask" in out) == (last_batch == "pad")
            if sharding != "default":
                assert out["node"][0].x.sharding == named("data")


@pytest.mark.parametrize("short", [8, 5])
def test_the_mask_stands_beside_a_node_that_checks_its_leaves(short: int) -> None:
    """With pad, a batch that is such a class becomes (batch, mask), and its leaf is padded."""
    with prefetch_to_device([Checked(rows()), Checked(rows(short))], sharding=named("data"), last_batch="pad") as it:
        for n, (batch, mask) in zip((8, short), it, strict=True):
            assert type(batch) is Checked
            np.testing.assert_array_equal(np.asarray(batch.x)[:n], rows(n))
            np.testing.assert_array_equal(np.asarray(mask), np.arange(8) < n)


def test_a_prefix_may_hold_the_class_itself() -> None:
    """A prefix with nodes of the batch's own class places their leaves; one of another class is an error."""
    make = Shaped.__new__
    prefix, wrong = make(Shaped), make(Shaped)
    prefix.x, wrong.x = named("data"), [named("data")]
    with prefetch_to_device([Shaped(rows())], sharding=prefix) as batches:
        assert next(batches).x.sharding == named("data")
    with (
        prefetch_to_device([Shaped(rows())], sharding=wrong) as batches,
        pytest.raises(ValueError, match="Batch 0: sharding is not a prefix"),
    ):
        next(batches)


def test_element_spec_of_a_node_that_looks_at_shapes() -> None:
    """element_spec gives such a class the shapes of its leaves, as jax.eval_shape does."""
    with prefetch_to_device([Shaped(rows())]) as batches:
        spec = batches.element_spec
    assert type(spec) is Shaped
    assert spec.x.shape == (8, 2)


def test_element_spec_of_a_node_that_wants_arrays_is_its_own_error() -> None:
    """Where a class refuses shapes, element_spec raises what it raises, with a note, and the batches arrive."""
    with prefetch_to_device([Checked(rows())] * 2) as batches:
        with pytest.raises(
            TypeError, match=r"(?s)two axes, got ShapeDtypeStruct.*jaxprefetch: raised by a node of the"
        ):
            _ = batches.element_spec
        assert [out.x.shape for out in batches] == [(8, 2)] * 2


# ---- where the mask goes


@jax.tree_util.register_pytree_with_keys_class
class Config(dict):
    """A dict whose class is registered: what belongs into it is up to that class."""

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        return [(jax.tree_util.DictKey(key), value) for key, value in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: Any, children: Any) -> Config:
        return cls(zip(keys, children, strict=True))


def test_the_mask_stands_beside_a_registered_dict() -> None:
    """A batch of a registered subclass of dict becomes (batch, mask) and keeps its class."""
    with prefetch_to_device([Config(x=rows())], last_batch="pad", mask_key="x") as batches:
        batch, mask = next(batches)
    assert type(batch) is Config
    np.testing.assert_array_equal(np.asarray(batch["x"]), rows())
    assert mask.shape == (8,)


DICTS = {
    "dict": lambda: {"x": rows(), "a": 1},
    "OrderedDict": lambda: collections.OrderedDict(x=rows(), a=1),
    "defaultdict": lambda: collections.defaultdict(list, x=rows(), a=1),
    "UserDict": lambda: collections.UserDict(x=rows(), a=1),
}


@pytest.mark.parametrize("kind", DICTS)
def test_the_mask_is_a_key_of_the_dicts_that_jax_knows(kind: str) -> None:
    """Dicts of each kind keep their type, and order, and get the mask as a key; the source's own stays as it is."""
    raw = DICTS[kind]()
    with prefetch_to_device([raw, raw], last_batch="pad") as batches:
        for out in batches:
            assert type(out) is (dict if kind == "UserDict" else type(raw))
            assert set(out) == {"x", "a", "mask"}
            np.testing.assert_array_equal(np.asarray(out["x"]), rows())
            assert out["a"] == 1
            assert out["mask"].dtype == bool
            if kind == "OrderedDict":
                assert list(out) == ["x", "a", "mask"]
            if kind == "defaultdict":
                assert out.default_factory is list
    assert set(raw) == {"x", "a"}


@pytest.mark.parametrize("key", [7, -1, 1])
def test_mask_key_is_of_the_kind_of_the_keys(key: int) -> None:
    """A batch with integer keys takes an integer as mask_key."""
    with prefetch_to_device([{0: rows(), 2: rows()}] * 2, last_batch="pad", mask_key=key) as batches:
        for out in batches:
            assert set(out) == {0, 2, key}
            np.testing.assert_array_equal(np.asarray(out[0]), rows())
            np.testing.assert_array_equal(np.asarray(out[2]), rows())
            assert out[key].dtype == bool


def test_a_mask_key_that_cannot_be_sorted_among_the_keys_is_an_error() -> None:
    """JAX sorts the keys of a dict; the error names mask_key, the keys and the cure, in the place of the batch."""
    text = (
        "^Batch 1: padding adds the mask as 'mask', which cannot be sorted among the batch's keys 0, 2. "
        "Pass a mask_key of their type.$"
    )
    with prefetch_to_device([{"x": rows()}, {0: rows(), 2: rows()}], last_batch="pad") as batches:
        next(batches)
        with pytest.raises(ValueError, match=text):
            next(batches)


def test_a_node_that_checks_its_fields_passes_through_on_device() -> None:
    """What on_device returns is rebuilt from arrays only, and element_spec alone raises what the class refuses."""
    with prefetch_to_device([Checked(rows())] * 3, on_device=lambda batch: Checked(batch.x * 2)) as batches:
        for out in batches:
            np.testing.assert_array_equal(out.x, rows() * 2)
        with pytest.raises(TypeError, match="two axes, got ShapeDtypeStruct"):
            _ = batches.element_spec
