"""From what was put to the batch that the loop gets: packed leaves taken apart, `on_device` applied, in one call.

Synopsis:

    handout = HandOut(on_device=None, context=Context.current())
    delivery = handout.delivery(plan, staged.leaves)     # made once a plan
    outs = delivery.dispatch(parcels)                    # once the batch is due; nothing is waited for
    batch = jax.tree_util.tree_unflatten(delivery.treedef, delivery.leaves(parcels, outs))

The call is dispatched at the hand-out, behind the step before: earlier it would hold up that step.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxprefetch.device.context import Context, compiled_as_ever, in_clean_thread
from jaxprefetch.device.cost import Cost, on_fullest, together
from jaxprefetch.device.packing import Packing, buffer_struct, compiled_unpack
from jaxprefetch.device.plan import LeafPlan, Plan, leaf_cost

OnDevice = Callable[[Any], Any]


@dataclass(frozen=True)
class Delivery:
    """How batches of one plan become what the loop gets."""

    treedef: Any
    specs: tuple[Any, ...] | None  # shapes, dtypes and shardings of its leaves; None: as the plan has them
    order: tuple[int, ...]  # its leaves among the parcels and, after these, what the call makes
    largest: int | None  # of the leaves that were made here
    out: Cost  # bytes that the call adds on each device
    most: int  # bytes of a batch on its fullest device, with these
    inputs: tuple[int, ...] = ()  # parcels that the call takes
    call: Callable[..., list[jax.Array]] | None = None

    @property
    def spec(self) -> Any:
        """The tree of these, as `jax.eval_shape` would give it; made when asked for, for a node may refuse it."""
        return None if self.specs is None else jax.tree_util.tree_unflatten(self.treedef, self.specs)

    def dispatch(self, parcels: Sequence[Any]) -> list[jax.Array]:
        """What its call makes on the devices, without waiting for it."""
        assert self.call is not None
        with compiled_as_ever():
            return self.call(*[parcels[i] for i in self.inputs])

    def leaves(self, parcels: list[Any], outs: Sequence[jax.Array]) -> list[Any]:
        """The leaves of a batch, once its call was dispatched; without a call they are the parcels."""
        both = [*parcels, *outs]
        return [both[i] for i in self.order]


class HandOut:
    """Knows how to hand out batches of any plan. Used by one thread at a time.

    Args:
        on_device: from batch to batch, compiled once for each structure; None delivers what was put.
        context: in force while it is traced, and nothing else of what is in force around the loop.
    """

    def __init__(self, on_device: OnDevice | None, context: Context):
        self.on_device = on_device
        self._context = context
        self._deliveries: weakref.WeakKeyDictionary[Plan, Delivery] = weakref.WeakKeyDictionary()
        self._last: tuple[Plan | None, Delivery | None] = None, None

    def delivery(self, plan: Plan, leaves: Sequence[Any]) -> Delivery:
        """For batches of this plan, of which `leaves` is one as staged. Blocking: while it is compiled, once a plan.

        Raises:
            TypeError: `on_device` returns None.
            Exception: what it raises, or JAX when it is traced.
        """
        last, delivery = self._last
        if delivery is None or last is not plan:
            delivery = self._deliveries.get(plan)
            if delivery is None:
                delivery = self._deliveries[plan] = self._make(plan, leaves)
            self._last = plan, delivery
        return delivery

    def _make(self, plan: Plan, leaves: Sequence[Any]) -> Delivery:
        if self.on_device is not None:
            return _transformed(plan, leaves, self.on_device, self._context)
        if plan.packing is not None:
            return _unpacked(plan, plan.packing, self._context)
        sizes = {i: sum(leaf.cost.values()) for i, leaf in enumerate(plan.leaves) if leaf.made}
        return Delivery(plan.treedef, None, tuple(range(len(plan.leaves))), _argmax(sizes), {}, plan.most)


def _unpacked(plan: Plan, packing: Packing, context: Context) -> Delivery:
    n = len(plan.leaves)
    places = {part.leaf: n + 1 + position for position, part in enumerate(packing.parts)}
    sizes = {i: sum(leaf.cost.values()) for i, leaf in enumerate(plan.leaves) if leaf.made}
    out = together(plan.leaves[i].cost for i in places)
    return Delivery(
        treedef=plan.treedef,
        specs=None,
        order=tuple(places.get(i, i) for i in range(n)),
        largest=_argmax(sizes),
        out=out,
        most=on_fullest([plan.cost, out]),
        inputs=(n,),
        call=compiled_unpack(packing, context),
    )


@jax.tree_util.register_static
@dataclass(frozen=True)
class OnHost:
    """Stands in a traced batch for a leaf that stays on the host: `on_device` may move it or leave it out."""

    leaf: int


def _transformed(plan: Plan, leaves: Sequence[Any], on_device: OnDevice, context: Context) -> Delivery:
    n, packing = len(plan.leaves), plan.packing
    packed = [part.leaf for part in packing.parts] if packing else []
    inputs = [i for i, leaf in enumerate(plan.leaves) if leaf.target is not None and i not in packed]
    structs = [_struct(plan.leaves[i], leaves[i]) for i in inputs]
    if packing:
        inputs.append(n)
        structs.append(buffer_struct(packing))
    first = n + (packing is not None)  # what the call makes comes after the parcels
    traces: list[Any] = []  # which leaf goes where in what `on_device` returned, and the tree of that

    def jaxprefetch_on_device(*parcels: Any) -> list[Any]:
        batch: list[Any] = [OnHost(i) for i in range(n)]
        for i, parcel in zip(inputs, parcels, strict=True):
            if i < n:
                batch[i] = parcel
        if packing:
            for i, leaf in zip(packed, packing.unpack(parcels[-1]), strict=True):
                batch[i] = leaf
        out = on_device(jax.tree_util.tree_unflatten(plan.treedef, batch))
        outs, *trace = _apart(out, first)
        traces.append(trace)
        return outs

    infos, call = in_clean_thread(lambda: _compiled(jaxprefetch_on_device, structs, context))
    specs = [_spec(*pair) for pair in zip(infos, call.output_shardings, strict=True)]
    costs = [leaf_cost(spec.shape, spec.dtype.itemsize, spec.sharding) for spec in specs]
    out, (order, treedef) = together(costs), traces[-1]
    return Delivery(
        treedef=treedef,
        specs=tuple(plan.leaves[i].spec if i < n else specs[i - first] for i in order),
        order=order,
        largest=_argmax({place: sum(costs[i - first].values()) for place, i in enumerate(order) if i >= first}),
        out=out,
        most=on_fullest([plan.cost, out]),
        inputs=tuple(inputs),
        call=call,
    )


def _compiled(function: Callable[..., Any], structs: Sequence[Any], context: Context) -> tuple[Any, Any]:
    """What the function returns for such arguments, and the call that does."""
    with context.entered():
        traced = jax.jit(function).trace(*structs)
        return traced.out_info, traced.lower().compile()


def _apart(out: Any, first: int) -> tuple[list[Any], tuple[int, ...], Any]:
    """What was made, which leaf goes where (made ones from `first` on), and the tree, in which host leaves count."""
    if out is None:
        raise TypeError(
            "on_device: returned None, expected the batch that the loop gets. Let it return that; its `return` is "
            "missing, or has nothing behind it."
        )
    leaves, treedef = jax.tree_util.tree_flatten(out, is_leaf=lambda x: isinstance(x, OnHost))
    numbers = itertools.count(first)
    order = tuple(leaf.leaf if isinstance(leaf, OnHost) else next(numbers) for leaf in leaves)
    return [leaf for leaf in leaves if not isinstance(leaf, OnHost)], order, treedef


def _struct(plan: LeafPlan, leaf: Any) -> jax.ShapeDtypeStruct:
    """A parcel, as a compiler has to know it: with a sharding if it is committed to it."""
    spec = plan.spec
    committed = plan.target is not None and plan.target.committed
    if plan.foreign and not committed:
        committed = leaf.committed
    return jax.ShapeDtypeStruct(
        spec.shape, spec.dtype, sharding=spec.sharding if committed else None, weak_type=spec.weak_type
    )


def _spec(info: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding, weak_type=info.weak_type)


def _argmax(sizes: dict[int, int]) -> int | None:
    return max(sizes, key=sizes.__getitem__, default=None)
