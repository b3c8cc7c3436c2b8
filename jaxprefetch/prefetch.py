"""`prefetch_to_device`: any iterator becomes batches that are already on their devices.

Synopsis:

    with prefetch_to_device(loader, size=2, sharding=sharding, max_bytes="2GiB") as batches:
        for batch in batches:
            state, metrics = train_step(state, batch)
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from typing import Any, Literal, TypeVar

from jaxprefetch.arguments import check_function, check_keep_on_host, check_key, check_switch, integer, parse_bytes
from jaxprefetch.device.handout import OnDevice
from jaxprefetch.device.placement import Placement
from jaxprefetch.device.window import Window
from jaxprefetch.host.batching import MODES, Mode
from jaxprefetch.host.loaders import pins_batches
from jaxprefetch.host.memory import default_host_bytes
from jaxprefetch.host.resume import ResumableSource
from jaxprefetch.host.source import MakesReaders, WritesBatches
from jaxprefetch.layout import KeepOnHost, StagingOptions
from jaxprefetch.prefetcher import DevicePrefetcher
from jaxprefetch.processes.group import Group
from jaxprefetch.processes.verdict import UNEVEN, Uneven
from jaxprefetch.reading import Reading
from jaxprefetch.staging import stager

T = TypeVar("T")


def prefetch_to_device(
    source: Iterable[T] | WritesBatches | MakesReaders,
    size: int = 2,
    *,
    sharding: Any = None,
    max_bytes: int | str | None = None,
    host_size: int = 4,
    max_host_bytes: int | str | None = None,
    keep_on_host: KeepOnHost = None,
    last_batch: Mode = "error",
    mask_key: Hashable = "mask",
    batch_axis: int = 0,
    delete_used: bool = False,
    fresh_buffers: bool | None = None,
    on_device: OnDevice | None = None,
    resume: Literal["replay"] | None = None,
    uneven: Uneven = "error",
) -> DevicePrefetcher[T]:
    """Batches of `source`, already on their devices, with the copy hidden behind the step before.

    A thread pulls batches and copies them to host memory of our own (several threads do, where a batch is large and the
    machine has cores to spare), so nothing delivered changes later. `next()` puts the batch after the one it returns,
    before it returns it: a device does not start a copy into new memory before the steps that are queued have ended, so
    a copy that is put after the step is dispatched would not overlap with it.

    Args:
        source: any iterable of batches (pytrees). Each pass yields what a `for` loop over it yields. The thread alone
            touches it from the first `next()` on, and closes its iterator. An iterator, or a source that cannot be
            iterated, may have `read_into(out)` instead of yielding batches: it writes each into the memory that it is
            sent from, and only what lies in another form there is copied (64-bit types without x64, leaves split along
            inner axes, small ones on several devices); see `WritesBatches`. It serves one pass, as iterators do; an
            object whose `__iter__` makes a new one serves any number. `batched` makes such a source of samples.
        size: batches ahead of the loop, counting the one that is returned. 2 hides the copy; 3 helps when sizes or
            step times vary and the copy takes more than 0.7 of a step; with 1 the host still works ahead, but on a GPU
            the copy cannot overlap with a step.
        sharding: `None` (the default device in force now; arrays stay uncommitted, as `jax.device_put(x)` leaves them),
            a `jax.Device`, any `jax.sharding.Sharding`, a `PartitionSpec` under the mesh in force now, or a pytree
            prefix of these. For leaves of lower rank, axes that they do not have are left out of the spec. In a
            multi-process run each process yields its own rows, `(local_batch, ...)`, of a global array.
        max_bytes: the most bytes of batches on any one device (`2 << 30` or `"2GiB"`). Counted from the put until
            released. At least two batches must fit, one with `delete_used`.
        host_size: batches pulled and not yet put. 0 pulls on the calling thread, without a thread: the first `next()`
            pulls `size` batches, each later one pulls one, and blocks as long as that takes. Where batches are taken
            within a millisecond, a thread that has pulled them all sleeps until half of them are gone.
        max_host_bytes: the most bytes of host memory for batches that have not landed; one always gets through. None:
            a quarter of what is free now, at least 256 MiB. On a GPU it is pinned memory, reused from batch to batch.
            What `read_into` has copied, of one batch, comes on top.
        keep_on_host: leaves that are delivered as they are: paths (`"meta/name"`, also of whole subtrees) or a function
            `(path, leaf) -> bool`. Strings and other objects need it. Arrays of any library and writable buffers among
            them are copied, as the same type where that can be; other objects are handed on themselves.
        last_batch: `"error"` refuses a batch whose rows do not divide over the devices and delivers all others.
            `"drop"` leaves out a last batch with fewer rows than batch 0. `"pad"` gives every batch the rows of batch
            0, rounded up to the devices and filled with zeros, and a boolean mask of the real ones: at `mask_key` of a
            dict, OrderedDict or defaultdict, else the batch becomes `(batch, mask)`. A loss has to go by it:
            `jnp.mean(losses, where=batch["mask"])`. The rows are those of the first leaf whose sharding splits
            `batch_axis`; where none does, of all leaves that have this axis, and to drop or pad these must then agree.
            Leaves that are not as long in batch 0, or stay on the host, are never padded.
        mask_key: where `"pad"` puts the mask in dict batches; sorts among their keys.
        batch_axis: the axis of rows.
        delete_used: batch k is deleted when batch k+1 is asked for: one batch of device memory less. Loops that look
            back must not use it. Arrays that the source made itself are never deleted.
        fresh_buffers: True promises that the source never writes to a leaf again, nor yields its memory twice: kept
            leaves are then handed on without a copy, and others sent so where that is no slower (on a GPU: from pinned
            memory). Leaves of one batch that share memory are still copied. None promises nothing, but for the tensors
            of a PyTorch loader with `pin_memory=True`, which makes them anew for each batch.
        on_device: a function from batch to batch that JAX can trace (cast, normalise, augment): it runs on the devices
            as part of `next()`, behind the step before, so that uint8 crosses the link and bfloat16 feeds the step.
            It is compiled for each structure of batches, with `default_device` and x64 as they are now and no other
            context of JAX's, so what it draws by NumPy is a constant: yield a number with each batch, and draw by
            `jax.random.key(batch["seed"])`. Leaves that stay on the host pass by it: it may move them or leave them
            out. Its outputs count towards `max_bytes` from the hand-out on, beside what it was made from.
        resume: `"replay"` is for `set_state` with sources that keep no state of their own. It promises that a newly
            made source yields the same batches again, in the same order, pass by pass; it is then gone through once
            more up to the place. Grain's iterators and torchdata's loaders need no promise.
        uneven: what becomes of sources of different length, where `sharding` has devices of several processes. A batch
            is handed out once all of them have it, and all find out in the same place. `"error"`: all raise an error
            that says who has ended after how many batches. `"drop"`: all stop where the first ends. `"pad"`, which
            needs `last_batch="pad"`: those that have ended go on with batches whose rows are all padding (other leaves
            keep their last values), until all have. No collective is used and no step waits: each process announces its
            batches to the coordination service of `jax.distributed`, ahead of the loop; where `len(source)` tells the
            lengths, for the first batch and the last only. (With a JAX that has no such client `next()` makes a small
            collective for each batch instead.) Every process makes its prefetchers over the same devices, and begins
            their passes, in the same order. With `host_size=0` close the prefetcher, for no thread tells the others.

    Returns:
        An iterator and context manager. Leaves are `jax.Array`; 64-bit types follow JAX's x64 setting as it is now;
        64-bit floats beyond the range of 32 bits become infinite. Python numbers stay weakly typed; arrays that the
        source made itself are passed, or moved where they must be. Iterating again after the end begins a new pass,
        if the source is no iterator; after a `break` it goes on where the loop stopped.

    Raises:
        TypeError, ValueError: an argument is not what it should be. Errors of the source, and of a batch that cannot be
            placed (OverflowError: integers beyond the range of 32 bits, without x64), come from `next()` in the place
            of that batch. With several processes: ValueError in all of them when batch 0 is not the same in structure,
            dtypes and global shapes, or later changes in some only, or by `uneven`; RuntimeError in the others when one
            has failed or left the loop, within seconds. One that is killed JAX notices by its heartbeat
            (`heartbeat_timeout_seconds` of `jax.distributed.initialize`, 100 by default) and ends the other processes.

    Blocking: not for the source, of which no batch is pulled before the first `next()`, `start_prefetch()` or
        `element_spec`.

    Thread safety: one thread at a time may call `next()`; `close()` and `statistics()` are for any thread.

    References: `kComputeSynchronized` in XLA's `pjrt/se/local_device_state.h`.
    """
    size, host_size = integer("size", size, 1), integer("host_size", host_size, 0)
    batch_axis = integer("batch_axis", batch_axis, 0)
    if last_batch not in MODES:
        raise ValueError(f"last_batch: expected one of {', '.join(map(repr, MODES))}, got {last_batch!r}.")
    if on_device is not None:
        check_function("on_device", on_device, "a function from batch to batch")
    check_keep_on_host(keep_on_host)
    check_key("mask_key", mask_key)
    check_switch("delete_used", delete_used)
    check_switch("fresh_buffers", fresh_buffers, or_none=True)
    if uneven not in UNEVEN:
        raise ValueError(f"uneven: expected one of {', '.join(map(repr, UNEVEN))}, got {uneven!r}.")
    if uneven == "pad" and last_batch != "pad":
        raise ValueError("uneven='pad' needs the mask that last_batch='pad' makes: pass that, too.")
    fresh_tensors = fresh_buffers is None and pins_batches(source)
    placement = Placement(sharding)
    max_host_bytes = parse_bytes("max_host_bytes", max_host_bytes) or default_host_bytes()
    group = Group.of(placement.all_devices, uneven)
    pads_past_end = group is not None and uneven == "pad"
    options = StagingOptions(
        keep_on_host, last_batch, mask_key, batch_axis, fresh_buffers, fresh_tensors, pads_past_end
    )
    return DevicePrefetcher(
        ResumableSource(source, resume),
        stager(placement, options, max_host_bytes),
        functools.partial(Window, size, delete_used=bool(delete_used), max_bytes=parse_bytes("max_bytes", max_bytes)),
        placement,
        Reading(host_size=host_size, max_host_bytes=max_host_bytes, group=group, whole=last_batch != "drop"),
        on_device=on_device,
    )
