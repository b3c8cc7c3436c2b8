"""PyTorch's DataLoader: every kind of tensor, its worker processes, and what it does with its buffers.

pip install ".[test,interop]" && pytest -m interop
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from interop_rows import Rows, in_order, rows, tell

from jaxprefetch import batched, prefetch_to_device
from jaxprefetch.host import forks
from jaxprefetch.host.copying import Copier
from jaxprefetch.host.leaves import as_host

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning"),  # JAX's own, of loader's workers
]

EXACT = ["bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "float32", "complex64", "bfloat16"]
EXACT += [f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")]


class Pair(NamedTuple):
    x: Any
    y: Any


def loader(rows: Any = None, **options: Any) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(Rows() if rows is None else rows, **{"batch_size": 4} | options)


def deliver_one(batch: Any, **options: Any) -> Any:
    with prefetch_to_device([batch], **options) as batches:
        (delivered,) = batches
    return delivered


# ---- tensors


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_tensors_arrive_bit_by_bit(name, transposed):
    """Every dtype of up to 32 bits (64 for complex) arrives with its bits, bfloat16 and float8 among them."""
    import torch

    dtype = getattr(torch, name)
    raw = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, 64 * dtype.itemsize, np.uint8)
    tensor = torch.from_numpy(raw).view(dtype).reshape(8, 8)
    out = deliver_one({"x": tensor.T if transposed else tensor})["x"]
    assert out.dtype == name
    out = np.asarray(out).T if transposed else np.asarray(out)
    assert np.ascontiguousarray(out).tobytes() == raw.tobytes()


@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
def test_tensors_of_64_bits_follow_the_setting(name):
    """64-bit tensors keep their bits under x64, and are narrowed without it."""
    import torch

    tensor = torch.arange(4).to(getattr(torch, name))
    with jax.enable_x64(True):
        assert deliver_one(tensor).dtype == name
    out = deliver_one(tensor)
    assert out.dtype.itemsize == tensor.dtype.itemsize // 2
    np.testing.assert_array_equal(np.asarray(out), np.arange(4))


def test_collated_containers_keep_their_structure():
    """Tuples, dicts, namedtuples and what is nested in them are collated by PyTorch and arrive as they are."""
    import torch

    samples = [(Pair(torch.ones(2) * i, {"a": torch.tensor([i]).bfloat16()}), [i, float(i)]) for i in range(4)]
    (expected,) = loader(samples)
    (out,) = prefetch_to_device(loader(samples))
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    assert type(out[0]) is Pair
    assert out[0].y["a"].dtype == "bfloat16"
    np.testing.assert_array_equal(np.asarray(out[0].x), expected[0].x.numpy())
    np.testing.assert_array_equal(np.asarray(out[1][0]), [0, 1, 2, 3])


def test_tensors_of_every_kind_of_view_arrive():
    """Tensors with a gradient, with a conjugation to be done, with steps, or without axes have their values."""
    import torch

    z = torch.tensor([1 + 2j, 3 - 4j])
    batch = {"grad": torch.ones(3, requires_grad=True), "conj": z.conj(), "step": torch.arange(6.0)[::2]}
    batch |= {"scalar": torch.tensor(2.5).bfloat16(), "leaf": torch.nn.Parameter(torch.ones(2).bfloat16())}
    out = deliver_one(batch)
    np.testing.assert_array_equal(np.asarray(out["grad"]), np.ones(3))
    np.testing.assert_array_equal(np.asarray(out["conj"]), [1 - 2j, 3 + 4j])
    np.testing.assert_array_equal(np.asarray(out["step"]), [0, 2, 4])
    assert (out["scalar"].shape, float(out["scalar"])) == ((), 2.5)
    assert out["leaf"].dtype == "bfloat16"


def unfit(what: str) -> Any:
    import torch

    if what == "coo":
        return torch.eye(2).to_sparse()
    if what == "csr":
        return torch.eye(2).to_sparse_csr()
    if what in ("jagged", "strided"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=getattr(torch, what))
    if what == "quantised":
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    return torch.empty(3, device="meta") if what == "meta" else torch.empty(3, dtype=getattr(torch, what))


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning", "ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize(
    ("what", "cure"),
    [
        ("coo", r"torch\.sparse_coo .*Yield tensor\.to_dense"),
        ("csr", r"torch\.sparse_csr .*Yield tensor\.to_dense"),
        ("jagged", r"torch\.jagged .*Pad it"),
        ("strided", "Pad it"),
        ("quantised", r"torch\.qint8.*int_repr\(\)"),
        ("meta", "no data"),
        ("complex32", r"torch\.complex32.*Convert it to a dtype that NumPy or ml_dtypes has"),
        ("float4_e2m1fn_x2", "Convert it to a dtype"),
    ],
)
def test_tensors_without_an_array_form_are_refused(what, cure):
    """Sparse, nested and quantised tensors, and dtypes that JAX lacks, are an error with batch, leaf and cure."""
    import torch

    with prefetch_to_device([{"a": {"t": torch.ones(3)}}, {"a": {"t": unfit(what)}}]) as batches:
        next(batches)
        with pytest.raises(TypeError, match=f"^Batch 1, leaf a/t: this .*{cure}.* keep_on_host"):
            next(batches)


def test_strings_are_refused_or_kept():
    """Strings, which PyTorch collates to a list, are an error naming the leaf, or stay on the host."""
    samples = [{"x": np.float32(i), "name": f"n{i}"} for i in range(4)]
    with prefetch_to_device(loader(samples)) as batches, pytest.raises(TypeError, match="leaf name/0: str cannot go"):
        next(batches)
    (out,) = prefetch_to_device(loader(samples), keep_on_host="name")
    assert out["name"] == ["n0", "n1", "n2", "n3"]


def test_samples_of_tensors_become_batches():
    """`batched` stacks tensors, bfloat16 ones too."""
    import torch

    samples = [{"x": torch.full((3,), i / 2).bfloat16(), "y": torch.tensor(i)} for i in range(6)]
    first, last = prefetch_to_device(batched(samples, 4))
    assert (first["x"].shape, first["x"].dtype, last["x"].shape) == ((4, 3), "bfloat16", (2, 3))
    np.testing.assert_array_equal(np.asarray(last["x"], np.float32)[:, 0], [2.0, 2.5])


# ---- memory


def test_tensors_are_not_copied_before_they_are_staged():
    """A leaf is a view of the tensor's memory, and with fresh_buffers a CPU device reads it right there."""
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
        tensor = torch.ones(1 << 12).to(dtype)
        assert as_host(tensor, "")[...].__array_interface__["data"][0] == tensor.data_ptr()
    tensor = torch.ones(1 << 12)
    out = deliver_one(tensor, fresh_buffers=True)
    assert out.unsafe_buffer_pointer() == tensor.data_ptr()
    assert deliver_one(tensor).unsafe_buffer_pointer() != tensor.data_ptr()


def test_a_loader_that_reuses_its_buffer_is_safe():
    """A collate function that fills the same tensor each time: what was delivered does not change."""
    import torch

    x, y = torch.empty(4, 3), torch.empty(4, dtype=torch.int32)

    def fill(samples):
        for i, sample in enumerate(samples):
            x[i], y[i] = torch.from_numpy(sample["x"]), int(sample["y"])
        return {"x": x, "y": y}

    with prefetch_to_device(loader(collate_fn=fill)) as batches:
        assert rows(list(batches)) == in_order(4)


# ---- workers


@pytest.fixture
def fork_is_new(monkeypatch):
    """As if no source had forked yet."""
    monkeypatch.setattr(forks, "_said", [])


@pytest.fixture
def quiet_child_signal():
    """PyTorch's handler, which a loader on the main thread installs, raises wherever that thread is just then."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, handler)


def said(caplog) -> int:
    return sum("the source forks processes" in record.getMessage() for record in caplog.records)


def test_forked_workers_are_said_once_and_gone_after_each_pass(fork_is_new, caplog):
    """Forked workers make right batches pass by pass, end with their pass, and are warned of once, with the cure."""
    with prefetch_to_device(loader(num_workers=2, multiprocessing_context="fork")) as batches:
        for _ in range(3):
            assert rows(batches) == in_order(4)
            assert not multiprocessing.active_children()
    assert said(caplog) == 1
    assert 'DataLoader(..., multiprocessing_context="forkserver")' in caplog.text


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_that_are_not_forked_need_no_warning(context, fork_is_new, caplog):
    """Workers from a fork server or started anew go on from pass to pass if they are persistent."""
    made = loader(num_workers=1, multiprocessing_context=context, persistent_workers=True)
    with prefetch_to_device(made) as batches:
        assert [rows(batches) for _ in range(2)] == [in_order(4)] * 2
    assert not said(caplog)


def test_workers_forked_before_need_no_warning(fork_is_new, caplog):
    """Persistent workers that the loop has started itself are used as they are."""
    made = loader(num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    iter(made)
    with prefetch_to_device(made) as batches:
        assert [rows(batches) for _ in range(2)] == [in_order(4)] * 2
    assert not said(caplog)


def test_a_worker_that_dies_is_an_error_in_its_place(quiet_child_signal, tmp_path):
    """Batches before it arrive in order, then PyTorch's own error, each time again; nothing hangs."""
    os.mkfifo(told := str(tmp_path / "told"))
    dying = loader(Rows(dies_at=13, told=told), num_workers=1, multiprocessing_context="fork")
    with prefetch_to_device(dying) as batches:
        assert rows(itertools.islice(batches, 3)) == in_order(4)[:3]
        tell(told)
        with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
            next(batches)
        assert "made batch 3" in caught.value.__notes__[0]
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            next(batches)
    assert not multiprocessing.active_children()


def test_an_error_of_a_worker_arrives_as_what_it_was():
    """An exception in a worker keeps its type and comes after the batches before it."""
    delivered = []
    with (
        prefetch_to_device(loader(Rows(fails_at=13), num_workers=2, multiprocessing_context="fork")) as batches,
        pytest.raises(ValueError, match=r"Caught ValueError in DataLoader worker process 1(?s:.*)row 13 is broken"),
    ):
        for batch in batches:
            delivered += rows([batch])
    assert delivered == in_order(4)[:3]
    assert not multiprocessing.active_children()


def test_leaving_early_ends_the_workers():
    """Closing in the middle of a pass ends the loader's workers."""
    with prefetch_to_device(loader(num_workers=2, multiprocessing_context="fork")) as batches:
        next(batches)
    assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # here there is no accelerator
@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"pin_memory": True, "batch_size": None}])
def test_what_a_loader_pins_is_sent_from_where_it_lies(options, monkeypatch):
    """Its tensors are new for each batch, so that nothing is copied; those that a data set yields itself may not be."""
    import torch

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    copied = []
    monkeypatch.setattr(Copier, "copy", lambda self, pairs: copied.extend(pairs))
    for _ in prefetch_to_device(loader(**options), fresh_buffers=None):
        pass
    assert bool(copied) == (options != {"pin_memory": True})


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # here there is no accelerator
@pytest.mark.parametrize("workers", [0, 1])
def test_pin_memory(workers):
    """A loader that pins its batches delivers the same, and its pinning thread ends with the pass."""
    made = loader(num_workers=workers, pin_memory=True, multiprocessing_context="fork" if workers else None)
    with prefetch_to_device(made) as batches:
        assert [rows(batches) for _ in range(2)] == [in_order(4)] * 2
