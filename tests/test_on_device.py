"""`on_device`: a compiled function between the put and the loop, which sees every batch once, in its place."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_ownership import CONSUMERS
from test_placement import CONTEXTS

from jaxprefetch import prefetch_to_device
from jaxprefetch.device import packing, times
from jaxprefetch.device.kept import KeptBatches
from jaxprefetch.host.reader import Reader


@pytest.fixture(params=[False, True], ids=["alone", "packed"], autouse=True)
def packs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test runs with leaves that travel alone and with leaves that travel packed."""
    if request.param:
        monkeypatch.setattr(packing, "PLATFORMS", ("cpu",))
        monkeypatch.setattr(packing, "FEWEST_LEAVES", 1)
    return request.param


def raw(number: int, rows: int = 8) -> dict[str, np.ndarray]:
    image = np.arange(rows * 6, dtype=np.uint8).reshape(rows, 6) + np.uint8(number)
    return {"image": image, "label": np.full(rows, number, np.int32)}


RAW = [raw(number) for number in range(6)]


def cast(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"image": batch["image"].astype(jnp.bfloat16) / jnp.bfloat16(2)}


def check(number: int, batch: dict[str, Any]) -> None:
    assert batch["image"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(batch["image"]), (raw(number)["image"] / 2).astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(batch["label"]), raw(number)["label"])


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


SHARDINGS = {
    "default": lambda: None,
    "device": lambda: jax.devices()[3],
    "rows": lambda: NamedSharding(mesh(), P("data")),
    "explicit": lambda: NamedSharding(
        jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2), P("data")
    ),
}
by_sharding = pytest.mark.parametrize("kind", SHARDINGS)


# ---- what is delivered


@by_sharding
@pytest.mark.parametrize("options", [{}, {"size": 1}, {"size": 3}, {"host_size": 0}, {"delete_used": True}], ids=str)
def test_every_batch_goes_through_the_function(kind: str, options: dict[str, Any]) -> None:
    """What the loop gets is the function's value, where and as jax.jit leaves it, and element_spec says so before."""
    sharding = SHARDINGS[kind]()
    wanted = jax.jit(cast)(jax.device_put(RAW[0], sharding))
    with prefetch_to_device(RAW, sharding=sharding, on_device=cast, **options) as batches:
        spec = batches.element_spec
        seen = 0
        for number, batch in enumerate(batches):
            check(number, batch)
            for name, leaf in batch.items():
                assert (leaf.sharding, leaf.committed) == (wanted[name].sharding, wanted[name].committed)
                assert (spec[name].shape, spec[name].dtype) == (leaf.shape, leaf.dtype)
                assert spec[name].sharding == leaf.sharding
            seen += 1
    assert seen == len(RAW)


@pytest.mark.parametrize(("hurried_ns", "now"), [(0, True), (1 << 62, False)])
@pytest.mark.parametrize("on_device", [None, cast], ids=["put", "cast"])
def test_the_reader_wakes_before_the_call_that_lets_go_of_the_gil(
    on_device: Any, hurried_ns: int, now: bool, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wants the GIL: woken after the call it would hold up the loop; without a call a hurried loop lets it sleep."""
    monkeypatch.setattr(times, "HURRIED_NS", hurried_ns)
    seen: list[Any] = []

    def noted(owner: Any, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **options: [seen.append((name, *args[3:])), method(*args, **options)][1]
        )

    noted(Reader, "give_room")
    noted(KeptBatches, "add")
    with prefetch_to_device(RAW, host_size=8, on_device=on_device) as batches:
        next(batches)
        seen.clear()
        next(batches)
    calls = on_device is not None or packs
    assert seen[-2:] == ([("give_room", True), ("add", 0)] if calls else [("add", 0), ("give_room", now)])


def test_it_is_traced_once_a_structure() -> None:
    """Batches of the same shapes share one compiled call; others get their own."""
    traced: list[Any] = []

    def counting(batch: Any) -> Any:
        traced.append(batch["image"].shape)
        return cast(batch)

    source = [raw(0), raw(1), raw(2, 4), raw(3), raw(4, 4)]
    with prefetch_to_device(source, on_device=counting) as batches:
        first = [len(batch["label"]) for batch in batches]
        again = [len(batch["label"]) for batch in batches]
    assert first == again == [8, 8, 4, 8, 4]
    assert traced == [(8, 6), (4, 6)]


@pytest.mark.parametrize("x64", [False, True])
def test_the_settings_are_those_of_the_call(x64: bool) -> None:
    """Traced with x64 and the default device as they were at the call, whatever is in force at the loop."""
    with jax.enable_x64(x64), jax.default_device(jax.devices()[5]):
        prefetcher = prefetch_to_device(RAW, on_device=lambda batch: jnp.asarray(batch["label"], float))
    with jax.enable_x64(not x64), prefetcher as batches:
        out = next(batches)
    assert out.dtype == (np.float64 if x64 else np.float32)
    assert out.devices() == {jax.devices()[5]}


@by_sharding
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_around_the_loop_change_nothing(context: str, kind: str) -> None:
    """Batches are the same whatever contexts are in force where the loop runs."""
    prefetcher = prefetch_to_device(RAW, sharding=SHARDINGS[kind](), on_device=cast)
    with CONTEXTS[context](), prefetcher as batches:
        taken = jax.device_get(list(batches))
    for number, batch in enumerate(taken):
        check(number, batch)
    assert len(taken) == len(RAW)


def test_leaves_on_the_host_pass_by() -> None:
    """Kept leaves are handed on as they are, wherever the function moves them; what it leaves out is gone."""

    def moving(batch: Any) -> Any:
        return {"meta": [batch["name"], {"deep": batch["ids"]}], "again": batch["name"], "x": batch["image"] + 1}

    source = [raw(i) | {"name": f"batch {i}", "ids": np.arange(i), "other": object()} for i in range(4)]
    with prefetch_to_device(source, on_device=moving, keep_on_host=("name", "ids", "other")) as batches:
        spec = batches.element_spec
        assert spec["meta"][0] is spec["again"] is str
        for i, batch in enumerate(batches):
            assert batch["meta"][0] == batch["again"] == f"batch {i}"
            np.testing.assert_array_equal(batch["meta"][1]["deep"], np.arange(i))
            assert isinstance(batch["meta"][1]["deep"], np.ndarray)
            np.testing.assert_array_equal(np.asarray(batch["x"]), raw(i)["image"] + 1)
            assert set(batch) == {"meta", "again", "x"}


@flax.struct.dataclass
class Pair:
    image: Any
    label: Any = None


def test_it_may_change_the_tree() -> None:
    """The function may return any tree, with constants and with leaves passed through or left out."""

    def change(pair: Pair) -> Any:
        return (Pair(pair.label), None, [jnp.zeros(3), 2.0], {"same": pair.label, "image": pair.image})

    with prefetch_to_device([Pair(**batch) for batch in RAW], on_device=change) as batches:
        for number, (pair, nothing, (zeros, two), rest) in enumerate(batches):
            assert nothing is None
            assert isinstance(pair, Pair)
            assert (float(two), zeros.shape) == (2.0, (3,))
            np.testing.assert_array_equal(np.asarray(pair.image), raw(number)["label"])
            np.testing.assert_array_equal(np.asarray(rest["image"]), raw(number)["image"])


def test_nothing_may_be_left() -> None:
    """A function that returns a tree without arrays still counts the batches."""
    with prefetch_to_device(RAW, on_device=lambda batch: {}) as batches:
        assert list(batches) == [{}] * len(RAW)


def test_a_forgotten_return_is_an_error() -> None:
    """None is no batch, whatever is in the tree: told at batch 0, and by element_spec, each time."""
    with prefetch_to_device(RAW, on_device=lambda batch: None) as batches:
        for ask in (lambda: batches.element_spec, lambda: next(batches), lambda: next(batches)):
            with pytest.raises(
                TypeError, match=r"on_device: returned None, expected the batch .* Let it return"
            ) as caught:
                ask()
    assert "jaxprefetch: raised when on_device was compiled for batch 0" in caught.value.__notes__


def test_the_mask_of_padded_batches_is_seen() -> None:
    """With last_batch='pad' the function gets the mask, too."""
    masked = lambda batch: jnp.where(batch["mask"], batch["label"], 0)  # noqa: E731
    source = [raw(0), raw(1, 3)]
    with prefetch_to_device(source, last_batch="pad", on_device=masked) as batches:
        assert [np.asarray(batch).tolist() for batch in batches] == [[0] * 8, [1] * 3 + [0] * 5]


@pytest.mark.parametrize("delete_used", [False, True])
def test_arrays_of_the_source_are_inputs(delete_used: bool) -> None:
    """jax.Array leaves of the source go through the function and are never deleted, even if it returns them."""
    made = [jax.device_put(np.full(4, i, np.float32)) for i in range(5)]
    source = [{"x": x, "y": np.full(4, i, np.float32)} for i, x in enumerate(made)]
    add = lambda batch: {"sum": batch["x"] + batch["y"], "x": batch["x"]}  # noqa: E731
    with prefetch_to_device(source, on_device=add, delete_used=delete_used) as batches:
        for i, batch in enumerate(batches):
            np.testing.assert_array_equal(np.asarray(batch["sum"]), np.full(4, 2 * i))
            np.testing.assert_array_equal(np.asarray(batch["x"]), np.full(4, i))
    for i, x in enumerate(made):
        np.testing.assert_array_equal(np.asarray(x), np.full(4, i))


# ---- what the loop does with it


@pytest.mark.parametrize("kind", ["default", "rows"])
@pytest.mark.parametrize("delete_used", [False, True])
@pytest.mark.parametrize("consumer", ["deletes", "donates", "skips", "waits"])
def test_the_consumer_may_do_what_it_likes(consumer: str, delete_used: bool, kind: str) -> None:
    """A loop that deletes or donates what it got sees the right values, within the bound."""
    use = {"deletes": lambda b: [leaf.delete() for leaf in b.values()], "donates": jax.jit(cast_away, donate_argnums=0)}
    source = [raw(number) for number in range(12)]
    number = -1
    with prefetch_to_device(source, sharding=SHARDINGS[kind](), on_device=cast, delete_used=delete_used) as batches:
        for number, batch in enumerate(batches):
            check(number, batch)
            use.get(consumer, CONSUMERS["skips"])(batch)
        statistics = batches.statistics()
    assert number == 11
    assert statistics.peak_in_flight <= statistics.bound
    assert statistics.peak_bytes_in_flight <= statistics.bytes_bound


def cast_away(batch: Any) -> Any:
    return jax.tree.map(lambda x: x + x, batch)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_delete_used_deletes_what_was_handed_out(size: int) -> None:
    """Batch k-1 is dead once batch k has been asked for; the one in the loop's hands stays alive."""
    with prefetch_to_device(RAW, size, on_device=cast, delete_used=True) as batches:
        taken: list[Any] = []
        for number in range(len(RAW)):
            taken.append(next(batches))
            check(number, taken[-1])
            assert [leaf.is_deleted() for batch in taken[:-1] for leaf in batch.values()] == [True] * 2 * number
    assert not taken[-1]["image"].is_deleted()


def test_kept_batches_do_not_change_and_are_counted() -> None:
    """Outputs that the loop keeps are batches that it keeps."""
    with prefetch_to_device(RAW, on_device=cast) as batches:
        kept = list(batches)
        assert batches.statistics().kept_by_consumer == len(RAW) - 1
        for number, batch in enumerate(kept):
            check(number, batch)
        del kept, batch
        assert batches.statistics().kept_by_consumer == 0


# ---- bytes


def doubled(batch: Any) -> Any:
    return batch.astype(jnp.int16)


@pytest.mark.parametrize("delete_used", [False, True])
def test_outputs_are_charged_from_the_hand_out(delete_used: bool, packs: bool) -> None:
    """A batch ahead counts with what was put, the one handed out with its outputs, too."""
    source = [np.full(1024, i, np.uint8) for i in range(9)]
    with prefetch_to_device(source, 2, host_size=0, on_device=doubled, delete_used=delete_used) as batches:
        next(batches)
        assert batches.statistics().bytes_in_flight == 1024 + 2048 + 1024
        list(batches)
        statistics = batches.statistics()
    assert statistics.peak_bytes_in_flight <= statistics.bytes_bound


def test_sharded_outputs_are_charged_by_device() -> None:
    """What each device gets of the outputs is what counts."""
    source = [np.zeros((8, 1024), np.uint8)] * 3
    with prefetch_to_device(source, 1, sharding=NamedSharding(mesh(), P("data")), on_device=doubled) as batches:
        next(batches)
        assert batches.statistics().bytes_in_flight == 2 * 1024 + 4 * 1024


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("most", "delete_used"), [(3 << 10, True), (6 << 10, False), (7 << 10, False), (9 << 10, True)]
)
def test_max_bytes_holds_with_outputs(most: int, delete_used: bool, size: int) -> None:
    """The cap holds for what was put and what was made of it, down to one batch with delete_used and two without."""
    source = [np.full(1024, i, np.uint8) for i in range(9)]
    options = {"max_bytes": most, "delete_used": delete_used, "on_device": doubled}
    with prefetch_to_device(source, size, **options) as batches:
        assert [int(batch[7]) for batch in batches] == list(range(9))
        statistics = batches.statistics()
    assert statistics.peak_bytes_in_flight <= most


@pytest.mark.parametrize(("most", "delete_used", "at"), [(3071, True, 0), (3071, False, 0), (6143, False, 1)])
def test_a_batch_whose_outputs_do_not_fit_is_an_error(most: int, delete_used: bool, at: int) -> None:
    """A cap that leaves no room for outputs is an error at the first batch that needs it, with its figures."""
    source = [np.zeros(1024, np.uint8)] * 3
    with prefetch_to_device(source, on_device=doubled, max_bytes=most, delete_used=delete_used) as batches:
        for _ in range(at):
            next(batches)
        made = r"\(2,048 of them are for what on_device makes\)"
        told = rf"Batch {at} needs 3,072 bytes on a device {made}, {at * 3072:,} are held"
        with pytest.raises(ValueError, match=told):
            next(batches)


# ---- errors


@pytest.mark.parametrize("value", [3, "cast", {"image": cast}])
def test_what_cannot_be_called_is_refused(value: Any) -> None:
    """on_device has to be a function."""
    with pytest.raises(
        TypeError, match=f"on_device: expected a function from batch to batch, got {type(value).__name__}"
    ):
        prefetch_to_device(RAW, on_device=value)


def fails(batch: Any) -> Any:
    if batch["image"].shape[0] == 4:
        raise LookupError("not four")
    return cast(batch)


@pytest.mark.parametrize("host_size", [0, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_error_of_the_function_comes_in_its_place(at: int, size: int, host_size: int) -> None:
    """What it raises comes at its batch, with a note, again at each call, after all batches before."""
    source = [raw(i, 4 if i == at else 8) for i in range(6)]
    with prefetch_to_device(source, size, host_size=host_size, on_device=fails) as batches:
        for number in range(at):
            check(number, next(batches))
        for _ in range(2):
            with pytest.raises(LookupError, match="not four") as caught:
                next(batches)
    notes = [note for note in caught.value.__notes__ if note.startswith("jaxprefetch")]
    assert notes == [f"jaxprefetch: raised when on_device was compiled for batch {at}"]


def test_what_cannot_be_traced_is_an_error() -> None:
    """A function that needs the values is an error of JAX's, at batch 0, and element_spec raises it, too."""
    with prefetch_to_device(RAW, on_device=lambda batch: batch if batch["label"][0] else None) as batches:
        with pytest.raises(jax.errors.TracerBoolConversionError, match="bool"):
            batches.element_spec  # noqa: B018 -- asking raises
        with pytest.raises(jax.errors.TracerBoolConversionError, match="bool"):
            next(batches)


def test_a_text_in_its_place_is_an_error() -> None:
    """What is no array cannot come out of it, unless it was kept on the host."""
    with prefetch_to_device(RAW, on_device=lambda batch: "text") as batches, pytest.raises(TypeError, match="str"):
        next(batches)


def test_leaves_in_different_places_are_an_error() -> None:
    """Leaves on different devices cannot go into one computation."""
    sharding = {"image": jax.devices()[1], "label": jax.devices()[2]}
    with (
        prefetch_to_device(RAW, sharding=sharding, on_device=cast) as batches,
        pytest.raises(ValueError, match="incompatible devices") as caught,
    ):
        next(batches)
    assert "on_device was compiled for batch 0" in caught.value.__notes__[-1]


def test_arrays_of_the_source_are_told_apart_by_their_weak_types() -> None:
    """A strongly typed array after a weakly typed one is computed with as jax.jit does, not as its predecessor."""
    source = [jnp.asarray(2.0), jnp.float32(70000.0), jnp.asarray(3.0)]
    with prefetch_to_device(source, on_device=lambda x: x * 2.0) as batches:
        weak = [out.weak_type for out in batches]
    assert weak == [raw.weak_type for raw in source] == [True, False, True]
