"""Leaves that are jax.Array already, leaves that are refused, and leaves that stay on the host."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from gated import Watch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device

X, Y = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.int32)


def deliver_one(batch: Any, **options: Any) -> Any:
    with prefetch_to_device([batch], **options) as prefetcher:
        (delivered,) = prefetcher
    return delivered


def named(*axes: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec(*axes))


# ---- arrays of the source's own


@pytest.mark.parametrize("delete_used", [False, True])
@pytest.mark.parametrize("where", ["uncommitted", "another device", "sharded"])
def test_arrays_of_the_source_are_passed(where: str, delete_used: bool) -> None:
    """Without a sharding, a jax.Array of the source is handed out itself, as committed as it was."""
    target = {"uncommitted": None, "another device": jax.devices()[5], "sharded": named("data")}[where]
    made = jax.device_put(X, target)
    out = deliver_one({"made": made, "x": X}, delete_used=delete_used)
    assert out["made"] is made
    assert not made.is_deleted()
    assert made.committed == (target is not None)


@pytest.mark.parametrize("before", [None, "device", "split", "replicated"])
@pytest.mark.parametrize("after", ["device", "split", "replicated"])
def test_arrays_of_the_source_are_moved(before: str | None, after: str) -> None:
    """With a sharding, a jax.Array of the source arrives there, committed, and stays alive where it was."""
    places = {None: None, "device": jax.devices()[5], "split": named("data"), "replicated": named()}
    made = jax.device_put(X, places[before])
    out = deliver_one(made, sharding=places[after], delete_used=True)
    assert out.sharding == jax.device_put(X, places[after]).sharding
    assert out.committed
    assert not made.is_deleted()
    np.testing.assert_array_equal(np.asarray(out), X)
    np.testing.assert_array_equal(np.asarray(made), X)


def test_weakly_typed_arrays_of_the_source_stay_so() -> None:
    """A weakly typed jax.Array keeps its weak type, moved or not, and element_spec says so."""
    made = jax.device_put(3)
    assert made.weak_type
    with prefetch_to_device([(made, made)], sharding=(None, jax.devices()[2])) as batches:
        assert [spec.weak_type for spec in batches.element_spec] == [True, True]
        assert [out.weak_type for out in next(batches)] == [True, True]


@pytest.mark.parametrize("x64", [False, True])
def test_arrays_of_the_source_keep_64_bits(x64: bool) -> None:
    """A jax.Array of 64 bits is passed as it is under either x64 setting."""
    with jax.enable_x64(True):
        made = jax.device_put(np.array([2**40]))
    with jax.enable_x64(x64):
        assert deliver_one(made) is made


@pytest.mark.parametrize("sharding", [None, "device", "split", "replicated"])
def test_typed_keys_arrive(sharding: str | None) -> None:
    """Typed PRNG keys are passed or moved like any other array, and draw the same numbers."""
    target = {None: None, "device": jax.devices()[2], "split": named("data"), "replicated": named()}[sharding]
    keys = jax.random.split(jax.random.key(0), 8)
    out = deliver_one({"keys": keys, "x": X}, sharding=target)["keys"]
    assert out.dtype == keys.dtype
    if target is not None:
        assert out.sharding == jax.device_put(keys, target).sharding
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))


def test_sharded_keys_are_passed() -> None:
    """Keys that are sharded as asked already arrive in that sharding, and the source's stay alive."""
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), named("data"))
    out = deliver_one(keys, sharding=named("data"), delete_used=True)
    assert out.sharding.is_equivalent_to(keys.sharding, 1)
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))


@pytest.mark.parametrize("delete", ["delete", "donate"])
def test_deleted_arrays_are_refused(delete: str) -> None:
    """A jax.Array that the source has deleted or donated is an error in the place of its batch."""
    gone = jax.device_put(X)
    gone.delete() if delete == "delete" else jax.jit(lambda x: x + 1, donate_argnums=0)(gone)
    with prefetch_to_device([{"x": X}, {"x": gone}]) as batches:
        next(batches)
        with pytest.raises(ValueError, match=r"Batch 1, leaf x: the source has deleted or donated this jax\.Array"):
            next(batches)


@pytest.mark.parametrize("sharding", [None, "device", "split"])
@pytest.mark.parametrize("delete", ["delete", "donate"])
def test_arrays_deleted_while_they_wait_are_refused(delete: str, sharding: str | None, monkeypatch: Any) -> None:
    """A jax.Array that dies between staging and the put is an error in the place of its batch, not a dead batch."""
    target = {None: None, "device": jax.devices()[5], "split": named("data")}[sharding]
    watch = Watch(monkeypatch)
    made = [jax.device_put(X + number) for number in range(4)]
    with prefetch_to_device([{"a": {"x": array}} for array in made], 1, sharding=target) as batches:
        batches.start_prefetch()
        watch.wait_reader_idle()
        made[2].delete() if delete == "delete" else jax.jit(lambda x: x + 1, donate_argnums=0)(made[2])
        for number in range(2):
            np.testing.assert_array_equal(np.asarray(next(batches)["a"]["x"]), X + number)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"(?s)^Leaf a/x: the source has deleted or donated .*\bbatch 2 was put"
            ):
                next(batches)


def test_an_array_in_two_batches_of_a_loop_that_donates_is_refused() -> None:
    """Where the loop donates an array that is in a later batch, too, the error of that batch says so."""
    made = jax.device_put(X)
    with prefetch_to_device([{"x": made}, {"x": X}, {"x": X}, {"x": made}], host_size=0) as batches:
        for _ in range(3):
            jax.jit(lambda x: x + 1, donate_argnums=0)(next(batches)["x"])
            assert made.is_deleted()
        with pytest.raises(
            ValueError, match=r"Batch 3, leaf x: .* or the loop has, if it was in an earlier batch, too"
        ):
            next(batches)


# ---- leaves that are refused

REFUSED = {
    "str": ("a name", "str cannot go to a device"),
    "bytes": (b"a name", "bytes cannot go to a device"),
    "object": (object(), "object cannot go to a device"),
    "large int": (2**70, "cannot go to a device|does not fit"),
    "object array": (np.array([None, "a"]), "arrays of dtype object cannot go"),
    "strings": (np.array(["a", "bc"]), "arrays of dtype <U2 cannot go"),
    "string dtype": (np.array(["a", "bc"], np.dtypes.StringDType()), "arrays of dtype StringDType.* cannot go"),
    "dates": (np.array(["2024-01-01"], "M8[D]"), "arrays of dtype datetime64.D. cannot go"),
    "structured": (np.zeros(2, [("a", "f4")]), "arrays of dtype .* cannot go"),
    "void": (np.zeros(2, "V8"), r"arrays of dtype \|V8 cannot go"),
    "long double": (np.zeros(2, np.longdouble), "arrays of dtype float128 cannot go"),
    "masked": (np.ma.masked_array([1, 2], [True, False]), r"masked arrays .* leaf.filled\(value\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_jax_cannot_hold_is_refused(what: str) -> None:
    """A leaf that JAX has no type for is an error with batch, leaf and cure, after the batches before it."""
    leaf, message = REFUSED[what]
    with prefetch_to_device([{"info": {"it": 1}}, {"info": {"it": leaf}}]) as batches:
        next(batches)
        with pytest.raises((TypeError, OverflowError), match=f"Batch 1, leaf info/it: .*({message})"):
            next(batches)


@pytest.mark.parametrize("what", REFUSED)
def test_what_jax_cannot_hold_can_be_kept(what: str) -> None:
    """Each such leaf is delivered as it is where keep_on_host names it."""
    leaf, _ = REFUSED[what]
    out = deliver_one({"info": {"it": leaf}, "x": X}, keep_on_host="info/it", sharding=named("data"))
    assert type(out["info"]["it"]) is type(leaf)
    assert str(out["info"]["it"]) == str(leaf)
    assert out["x"].sharding == named("data")


# ---- leaves that stay on the host


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("a/name", {"a/name"}),
        ("a", {"a/name", "a/x"}),
        (["a/x", "list/1"], {"a/x", "list/1"}),
        (("list",), {"list/0", "list/1"}),
        ([], set()),
        (None, set()),
        (lambda path, leaf: path.endswith("x"), {"a/x"}),
        (lambda path, leaf: leaf.dtype == np.int32, {"a/name", "list/1"}),
    ],
)
def test_keep_on_host_by_path_subtree_and_predicate(keep: Any, kept: set[str]) -> None:
    """keep_on_host keeps just the leaves that it names, by path, by subtree or by a function of path and leaf."""
    batch = {"a": {"name": Y, "x": X}, "ab": X, "list": [X, Y]}
    out = deliver_one(batch, keep_on_host=keep)
    paths = jax.tree_util.tree_flatten_with_path(out)[0]
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}
    assert {name for name, leaf in names.items() if not isinstance(leaf, jax.Array)} == kept
    jax.tree.map(np.testing.assert_array_equal, out, batch)


def test_the_predicate_sees_every_batch() -> None:
    """A predicate that looks at the leaf decides for each batch, not for the first of its structure only."""
    batches = [{"y": Y}, {"y": "text"}, {"y": Y}]
    with prefetch_to_device(batches, keep_on_host=lambda path, leaf: isinstance(leaf, str)) as delivered:
        kinds = [isinstance(batch["y"], jax.Array) for batch in delivered]
    assert kinds == [True, False, True]


@pytest.mark.parametrize("keep", ["c", "a/nam", ["a", "b/x"], "batch"])
def test_keep_on_host_of_an_unknown_path_is_an_error(keep: Any) -> None:
    """A path that no leaf has is an error that lists the leaves."""
    with (
        prefetch_to_device([{"a": {"name": "text", "x": X}, "b": Y}], keep_on_host=keep) as batches,
        pytest.raises(ValueError, match=r"Batch 0: keep_on_host names '.*', .* Leaves: a/name, a/x, b"),
    ):
        next(batches)


def test_a_kept_leaf_may_be_missing_from_a_batch() -> None:
    """A named leaf that is None in some batch is delivered as None there."""
    with prefetch_to_device([{"x": X, "meta": "m"}, {"x": X, "meta": None}], keep_on_host="meta") as batches:
        assert [batch["meta"] for batch in batches] == ["m", None]


@pytest.mark.parametrize("fresh", [None, False, True])
def test_kept_arrays_are_copied_unless_fresh(fresh: bool | None) -> None:
    """A kept array is the source's own only where the source promises fresh buffers."""
    source = np.arange(3)
    kept = deliver_one({"x": X, "ids": source}, keep_on_host="ids", fresh_buffers=fresh)["ids"]
    assert np.shares_memory(kept, source) == bool(fresh)
    assert kept.dtype == source.dtype
    np.testing.assert_array_equal(kept, source)


def test_element_spec_of_kept_leaves() -> None:
    """element_spec shows the shape of kept numbers, keys among them, and the type of other kept leaves."""
    keys = jax.random.split(jax.random.key(0), 3)
    batch = {"ids": np.arange(3), "half": np.zeros(2, ml_dtypes.bfloat16), "name": "a", "keys": keys}
    with prefetch_to_device([batch], keep_on_host=list(batch)) as batches:
        spec = batches.element_spec
        out = next(batches)
    assert (spec["ids"].shape, spec["ids"].dtype) == ((3,), np.arange(3).dtype)
    assert spec["half"].dtype == ml_dtypes.bfloat16
    assert (spec["keys"].shape, spec["keys"].dtype) == ((3,), keys.dtype)
    assert spec["name"] is str
    assert out["keys"] is keys


def test_an_array_that_dies_between_the_put_and_the_hand_out_is_an_error_there() -> None:
    """The same array in every batch of a loop that donates it is an error at the second batch, which names the leaf."""
    array = jax.numpy.arange(4.0)
    taken = []
    with prefetch_to_device([{"x": array}] * 4) as batches:
        for _ in range(2):
            with pytest.raises(ValueError, match="Batch 1, leaf x: the source has deleted or donated"):
                for batch in batches:
                    taken.append(batch)
                    batch["x"].delete()
    assert len(taken) == 1
