"""Checkpoints of the train state together with the place in the input, saved by Orbax while the loop goes on.

Synopsis:

    with Checkpoints("run/checkpoints") as checkpoints:
        state, step = checkpoints.restore(state, batches)      # as it was given, and 0, if there is none
        for batch in batches:
            state, metrics = train_step(state, batch)
            step += 1
            if step % 1000 == 0:
                checkpoints.save(step, state, batches)
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxprefetch.arguments import integer
from jaxprefetch.errors import Noted
from jaxprefetch.extras import needs_extra
from jaxprefetch.host.states import from_json, to_json
from jaxprefetch.processes.inputs import of_all_processes, of_this_process

S = TypeVar("S")


class Resumable(Protocol):
    """A `DevicePrefetcher`, or anything else with Grain's protocol."""

    def get_state(self) -> Any: ...
    def set_state(self, state: Any, /) -> None: ...


class Checkpoints:
    """Checkpoints by step in one directory, made by `orbax.checkpoint.CheckpointManager`.

    Each has the items `state` (a pytree, as `StandardSave` writes it) and `input` (JSON).

    In a multi-process run all processes make one, for a directory that all of them see, and all of them save and
    restore, in the same order.

    Args:
        directory: where they are; made if it does not exist.
        max_to_keep: the latest so many are kept.
        best_metric: the best by this metric is kept, too; the name is one of `metrics` in `save`, such as
            `"eval/accuracy"`.
        best_mode: whether the largest or the smallest is best.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        NotADirectoryError: `directory` is a file.
        ModuleNotFoundError: Orbax is not installed.

    Blocking: in a multi-process run, for the other processes.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int = 3,
        best_metric: str | None = None,
        best_mode: Literal["max", "min"] = "max",
    ):
        max_to_keep = integer("max_to_keep", max_to_keep, 1)
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"directory: expected a path, got {type(directory).__name__} {directory!r:.100}.")
        if not (best_metric is None or isinstance(best_metric, str)):
            raise TypeError(f"best_metric: expected the name of a metric or None, got {best_metric!r:.100}.")
        if best_mode not in ("max", "min"):
            raise ValueError(f"best_mode: expected 'max' or 'min', got {best_mode!r:.100}.")
        path = os.fspath(directory)
        if os.path.isfile(path):
            raise NotADirectoryError(f"directory: expected a directory, or none yet, got the file {path!r}.")
        self._orbax = orbax = _orbax()
        policies = orbax.checkpoint_managers
        keep: list[Any] = [policies.LatestN(max_to_keep)]
        score = None
        if best_metric is not None:
            score = _Score(best_metric, sign=-1.0 if best_mode == "min" else 1.0)
            keep.append(policies.BestN(get_metric_fn=score, n=1))
        self._score = score
        self._manager = orbax.CheckpointManager(
            path if "://" in path else os.path.abspath(path),
            options=orbax.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(keep),
                best_fn=score,  # has Orbax write the metrics
                cleanup_tmp_directories=True,  # left by a process that was killed while it saved
            ),
        )

    @property
    def latest_step(self) -> int | None:
        """The step of the last one that is complete; None without any."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The step of the best one by `best_metric`; None where none was saved with that."""
        if self._score is None or (step := self._manager.best_step()) is None:
            return None
        return step if math.isfinite(self._score(self._manager.metrics(step))) else None

    def save(
        self, step: int, state: Any, batches: Resumable | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Saves what is after `step` steps: `state`, and which batches were taken up to now.

        In a multi-process run it is a collective: every process calls it, in the same place and for the same step. By
        `batches` each adds its own place in the input, which all of them exchange.

        Args:
            step: steps done; what the checkpoint is called.
            state: a pytree of arrays and numbers; Flax NNX objects may be among them.
            batches: whose place is saved; its `get_state()` may wait for its first batch.
            metrics: numbers by name, of which others than `int` and `float` are left out; saved with `best_metric`.
                None where there was no evaluation.

        Blocking: until `state` is computed and copied to the host, an earlier save is done, and, in a multi-process
            run, all processes have come here. It is then written by Orbax's threads, and the next step may donate it.

        Raises:
            ValueError: the step is no count, or has been saved already; no number in `metrics` is called `best_metric`,
                which is said when the checkpoint is saved: of a run that ends by this, nothing is lost.
            TypeError: `batches` cannot be resumed.
            Exception: what an earlier save raised on its thread.
        """
        step = integer("step", step, 0)
        args = self._orbax.args
        items = {"state": args.StandardSave(_arrays(state))}
        if batches is not None:
            items["input"] = args.JsonSave({"processes": of_all_processes(to_json(batches.get_state()))})
        numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, (int, float))}
        self._manager.save(step, args=args.Composite(**items), metrics=numbers if self._score else None, force=True)
        if self._score is not None and metrics and self._score.name not in numbers:
            raise ValueError(
                f"best_metric: step {step} has no number {self._score.name!r} but {sorted(numbers)}. Name one of them; "
                "the checkpoint is saved all the same."
            )

    def restore(self, state: S, batches: Resumable | None = None, *, step: int | None = None) -> tuple[S, int]:
        """The state of the latest checkpoint and its step, with `batches` set to go on where it was saved.

        Args:
            state: a new state: its structure, shapes, dtypes and shardings are those of the result. Flax NNX modules
                in it are updated themselves.
            batches: a prefetcher that has not begun; its source must be newly made.
            step: which checkpoint; None for the latest. In a multi-process run the same in all processes.

        Returns:
            `state` as it is and 0 if there are no checkpoints, and `step` is None.

        Raises:
            ValueError: the checkpoint has no state of the input, a damaged one, or that of another number of processes,
                and the source is not Grain's `ElasticIterator`.
            TypeError: `batches` cannot be resumed.
            Exception: Orbax's, if the checkpoint does not fit `state` or does not exist; what the source raises when it
                is given its state.

        Blocking: until the checkpoint is read and, in a multi-process run, for the other processes; then while the
            source takes its state. With `resume="replay"` it is gone through later, when its first batch is asked for.
        """
        other = "" if step is None else "another step, "
        if step is None and (step := self.latest_step) is None:
            return state, 0
        args = self._orbax.args
        given = _arrays(state)
        wanted = {"state": args.StandardRestore(jax.tree.map(self._orbax.utils.to_shape_dtype_struct, given))}
        if batches is not None:
            wanted["input"] = args.JsonRestore()
        cure = f"pass {other}a state of the saved structure and shapes, or a new directory"
        with Noted(f"jaxprefetch: raised while checkpoint {step} was read; {cure}"):
            restored = self._manager.restore(step, args=args.Composite(**wanted))
        if batches is not None:
            batches.set_state(from_json(of_this_process(restored["input"], step)))
        return _filled(state, jax.tree.map(_like, given, restored["state"])), step

    def wait(self) -> None:
        """Blocking: until all that was saved is written. Raises what that has raised on Orbax's threads."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """As `wait()`, and ends Orbax's threads."""
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Score:
    """How good a checkpoint is by a metric; those without it, or with one that is no finite number, come last."""

    def __init__(self, name: str, sign: float):
        self.name, self._sign = name, sign

    def __call__(self, metrics: Any) -> float:
        score = self._sign * (metrics or {}).get(self.name, math.nan)
        return score if math.isfinite(score) else -math.inf


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ModuleNotFoundError as error:
        raise needs_extra("Checkpoints", "orbax-checkpoint", "train") from error
    return orbax.checkpoint


# ---- the state, as arrays


def _is_module(node: Any) -> bool:
    """Whether it is an object of Flax NNX, which is updated itself."""
    nnx: ModuleType | None = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Pytree)


def _arrays(state: Any) -> Any:
    """The state as Orbax takes it: NNX's objects replaced by theirs, a bare leaf in a dict."""

    def plain(node: Any) -> Any:
        return sys.modules["flax.nnx"].state(node) if _is_module(node) else node

    arrays = jax.tree.map(plain, state, is_leaf=_is_module)
    return {"state": arrays} if _is_bare(arrays) else arrays


def _filled(state: S, arrays: Any) -> S:
    """The state with other arrays; NNX's objects are updated themselves."""
    nodes, treedef = jax.tree.flatten(state, is_leaf=_is_module)
    parts = [arrays["state"]] if _is_bare(state) else treedef.flatten_up_to(arrays)
    for node, part in zip(nodes, parts, strict=True):
        if _is_module(node):
            sys.modules["flax.nnx"].update(node, part)
    return treedef.unflatten([n if _is_module(n) else p for n, p in zip(nodes, parts, strict=True)])


def _is_bare(state: Any) -> bool:
    return not _is_module(state) and jax.tree_util.treedef_is_leaf(jax.tree.structure(state))


def _like(given: Any, restored: Any) -> Any:
    """The restored leaf as a step sees the given one: a Python number, weakly typed or not, committed or not.

    Orbax commits what it restores, which a step would refuse beside batches on other devices, and compile anew.
    """
    if isinstance(given, (bool, int, float, complex)):
        return type(given)(restored)
    if not isinstance(given, jax.Array):
        return restored
    weak = getattr(given, "weak_type", False)  # keys have none
    if given.committed and not weak:
        return restored
    if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(restored)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(restored))
    values = np.asarray(restored)
    return given.at[...].set(values) if weak else jnp.asarray(values)
