"""Checkpoints: the state comes back as a step saw it, with the place in the input; the loop goes on from the latest."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from gated import Counted, Loader, batch, number
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxprefetch import prefetch_to_device
from jaxprefetch.checkpoints import Checkpoints
from jaxprefetch.loop import train_loop


@jax.jit
def step(state, batch):
    return state + batch["x"].sum(), {"loss": batch["x"].max()}


def run(folder, *, num_steps, source=None, **options):
    """The state, the summary and the numbers of the batches of this run."""
    seen = []
    options = {"resume": "replay", "save_every_steps": 4, "progress": False} | options
    state, summary = train_loop(
        options.pop("step", step),
        options.pop("state", jnp.float32(0)),
        Loader(7) if source is None else source,
        num_steps=num_steps,
        hooks=lambda _, metrics: seen.append(metrics["loss"]) if "loss" in metrics else None,
        checkpoints=folder,
        **options,
    )
    return state, summary, seen


# ---- what is in a checkpoint


def saved_and_restored(tmp_path, state, new):
    """`state` saved by one object and restored into `new` by another."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
    with Checkpoints(tmp_path) as checkpoints:
        restored, at = checkpoints.restore(new)
    assert at == 3
    return restored


def test_any_pytree_comes_back_as_a_step_saw_it(tmp_path):
    """Values, dtypes, weak types, shardings, commitment, keys, Python numbers and NumPy arrays are those of before."""
    split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

    def state(value):
        return {
            "split": jax.device_put(np.full(16, value, np.float32), split),
            "there": jax.device_put(jnp.full(2, value, jnp.bfloat16), jax.devices()[3]),
            "default": jnp.full((2, 3), value, jnp.int8),
            "weak": jnp.asarray(value),
            "key": jax.random.key(value),
            "old_key": jax.random.PRNGKey(value),
            "numpy": np.arange(value),
            "numbers": (value, value / 2, value > 1, None),
            "empty": {},
        }

    given, restored = state(7), saved_and_restored(tmp_path, state(7), state(0) | {"numpy": np.zeros(7, int)})
    assert jax.tree.structure(given) == jax.tree.structure(restored)
    for path, leaf in jax.tree_util.tree_flatten_with_path(given)[0]:
        back = restored
        for key in path:
            back = back[getattr(key, "key", getattr(key, "idx", None))]
        assert type(back) is type(leaf), path
        if isinstance(leaf, jax.Array):
            for name in ("dtype", "sharding", "committed", "weak_type"):
                assert getattr(back, name, None) == getattr(leaf, name, None), (path, name)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf, back = jax.random.key_data(leaf), jax.random.key_data(back)
        np.testing.assert_array_equal(np.asarray(back), np.asarray(leaf))


def linen_state(seed):
    model = nn.Dense(1)
    params = model.init(jax.random.key(seed), jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.05))


def test_linen_train_state(tmp_path):
    """A `TrainState` comes back with its functions, and the same compiled step takes it."""
    saved, new = linen_state(0), linen_state(1)
    restored = saved_and_restored(tmp_path, saved, new)
    assert (restored.tx, restored.apply_fn) == (new.tx, new.apply_fn)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(saved))
    count = jax.jit(lambda state: state.step + 1)
    count(new), count(restored)
    assert count._cache_size() == 1


def nnx_state(seed):
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(seed)), nnx.Dropout(0.5, rngs=nnx.Rngs(seed)))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param), "n": jnp.zeros(2)}


def test_nnx_objects_are_updated_themselves(tmp_path):
    """NNX's model, optimizer and random streams are the same objects with the saved values; other leaves are new."""
    saved, new = nnx_state(0) | {"n": jnp.ones(2)}, nnx_state(1)
    saved["model"](jnp.ones((1, 4)))  # a dropout's stream moves on
    restored = saved_and_restored(tmp_path, saved, new)
    assert restored["model"] is new["model"]
    assert restored["optimizer"] is new["optimizer"]

    def leaves(state):
        nodes = jax.tree.leaves(nnx.state((state["model"], state["optimizer"])))
        return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in nodes]

    jax.tree.map(np.testing.assert_array_equal, leaves(restored), leaves(saved))
    np.testing.assert_array_equal(restored["n"], [1, 1])


def test_a_state_may_be_donated_right_after_it_was_saved(tmp_path):
    """`save` returns when the state is on the host."""
    consume = jax.jit(lambda state: state + 1, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        state = jnp.zeros(1000)
        checkpoints.save(1, state)
        state = consume(state)
        checkpoints.wait()
        np.testing.assert_array_equal(checkpoints.restore(jnp.ones(1000))[0], np.zeros(1000))


def test_no_checkpoint_gives_the_state_back(tmp_path):
    """Restoring from an empty directory changes nothing."""
    with Checkpoints(tmp_path) as checkpoints, prefetch_to_device(Loader(3), resume="replay") as batches:
        state = jnp.ones(2)
        assert checkpoints.latest_step is None
        assert checkpoints.restore(state, batches) == (state, 0)
        assert number(next(batches)) == 0


def test_input_of_a_checkpoint_without_one(tmp_path):
    """A checkpoint that was saved without the input cannot restore it."""
    with Checkpoints(tmp_path) as checkpoints, prefetch_to_device(Loader(3), resume="replay") as batches:
        checkpoints.save(1, jnp.ones(2))
        checkpoints.wait()
        with pytest.raises((KeyError, ValueError), match="input"):
            checkpoints.restore(jnp.ones(2), batches)


def test_grains_own_iterators_can_be_saved(tmp_path):
    """Whatever has `get_state` and `set_state` can take the place of the prefetcher."""

    def source():
        return iter(grain.MapDataset.range(20).seed(3).shuffle().to_iter_dataset())

    iterator = source()
    for _ in range(5):
        next(iterator)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, jnp.ones(1), iterator)
        checkpoints.wait()
        again = source()
        checkpoints.restore(jnp.ones(1), again)
    assert list(again) == list(iterator)


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_the_best_is_kept_beside_the_latest(tmp_path, mode, best):
    """The best by a metric outlives newer ones; numbers that are not finite, or missing, are never best."""
    scores = {1: 0.5, 2: 0.9, 3: 0.1, 4: float("nan"), 5: None, 6: 0.3, 7: 0.4}
    options = {"max_to_keep": 2, "best_metric": "eval/score", "best_mode": mode}
    with Checkpoints(tmp_path, **options) as checkpoints:
        assert checkpoints.best_step is None
        for at, score in scores.items():
            checkpoints.save(at, jnp.float32(at), metrics=None if score is None else {"eval/score": score})
    with Checkpoints(tmp_path, **options) as checkpoints:
        assert (checkpoints.best_step, checkpoints.latest_step) == (best, 7)
        assert checkpoints.restore(jnp.float32(0), step=best) == (best, best)
        checkpoints.save(8, jnp.float32(8), metrics={"eval/score": 0.35})
        checkpoints.wait()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [best, 7, 8]


def test_best_metric_that_there_is_not_is_an_error(tmp_path):
    """A save without metrics passes; the first with others lists them, after the state was saved."""
    with Checkpoints(tmp_path, max_to_keep=1, best_metric="eval/acc") as checkpoints:
        checkpoints.save(1, jnp.float32(1))
        with pytest.raises(ValueError, match=r"best_metric: step 2 has no number 'eval/acc' but \['eval/accuracy'\]"):
            checkpoints.save(2, jnp.float32(2), metrics={"eval/accuracy": 0.5, "eval/confusion": np.zeros(2)})
        with pytest.raises(ValueError, match=r"step 3 has no number 'eval/acc' but \[\]"):
            checkpoints.save(3, jnp.float32(3), metrics={"eval/acc": np.zeros(2)})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(jnp.float32(0)) == (3, 3)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_no_directory(tmp_path, kind):
    """The error comes before Orbax's threads, and before the loop's first batch; the file stays as it is."""
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(
        NotADirectoryError, match=r"directory: expected a directory, or none yet, got the file '.*file'"
    ):
        Checkpoints(kind(path))
    source = Counted()
    with pytest.raises(NotADirectoryError, match="got the file"):
        run(kind(path), num_steps=1, source=source)
    assert (source.pulled, path.read_text()) == (0, "mine")


def test_missing_orbax_names_the_extra(monkeypatch, tmp_path):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ModuleNotFoundError, match=r'Checkpoints needs orbax-checkpoint.*"jaxprefetch\[train\]"'):
        Checkpoints(tmp_path)


# ---- the loop


@pytest.mark.parametrize("state", [jnp.zeros(3), {"x": jnp.zeros(())}], ids=["shape", "structure"])
def test_a_state_that_does_not_fit_the_checkpoint_says_what_to_pass(tmp_path, state):
    """The note on Orbax's error speaks of what the loop takes, and of another step where one was named."""
    run(tmp_path, num_steps=2)
    with pytest.raises(ValueError, match=r"stored shape|do not match") as caught:
        run(tmp_path, num_steps=4, state=state)
    cure = "a state of the saved structure and shapes, or a new directory"
    assert caught.value.__notes__ == [f"jaxprefetch: raised while checkpoint 2 was read; pass {cure}"]
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"stored shape|do not match") as caught:
        checkpoints.restore(state, step=2)
    assert caught.value.__notes__ == [f"jaxprefetch: raised while checkpoint 2 was read; pass another step, {cure}"]


def test_a_run_goes_on_from_the_latest_checkpoint(tmp_path):
    """Steps and batches go on where the last run ended; one that has ended does nothing."""
    whole, _, everything = run(tmp_path / "whole", num_steps=20)
    _, first, seen = run(tmp_path / "parts", num_steps=9)
    assert (first.steps, first.resumed_from) == (9, 0)
    state, second, more = run(tmp_path / "parts", num_steps=20)
    assert (second.steps, second.resumed_from, second.stopped_by) == (20, 9, "num_steps")
    assert seen + more == everything
    assert state == whole
    state, third, none = run(tmp_path / "parts", num_steps=20)
    assert (third.steps, third.resumed_from, none, third.metrics) == (20, 20, [], {})
    assert state == whole


@pytest.mark.parametrize("at", [6, 7, 8, 14])
def test_a_run_stopped_at_an_epochs_end_goes_on_in_the_next(tmp_path, at):
    """Around the end of an epoch of 7 batches no batch is lost or repeated."""
    _, _, first = run(tmp_path, num_steps=at)
    _, _, rest = run(tmp_path, num_steps=25)
    assert first + rest == [i % 7 for i in range(25)]


def test_a_source_that_has_ended_is_not_begun_anew(tmp_path):
    """A one-shot source that had ended at the checkpoint has ended after it, too."""

    def source():
        return (batch(i) for i in range(3))

    run(tmp_path, num_steps=3, source=source())
    _, summary, seen = run(tmp_path, num_steps=5, source=source())
    assert (summary.steps, summary.stopped_by, seen) == (3, "source ended", [])


def test_a_step_that_raises_loses_nothing_that_was_saved(tmp_path):
    """After an error the run goes on from the last checkpoint before it."""

    def failing(state, batch):
        if batch["x"][0] == 6:
            raise OSError("out of luck")
        return step(state, batch)

    with pytest.raises(OSError, match="out of luck"):
        run(tmp_path, num_steps=20, step=failing)
    _, summary, seen = run(tmp_path, num_steps=20)
    assert summary.resumed_from == 4
    assert seen == [i % 7 for i in range(4, 20)]


def test_source_that_cannot_be_resumed_is_said_before_the_first_step(tmp_path):
    """With checkpoints wanted, the first run already needs a source that can be resumed."""
    loader = Loader(7)
    with pytest.raises(TypeError, match="source: a Loader cannot be resumed"):
        run(tmp_path, num_steps=5, source=loader, resume=None)


def test_sigterm_saves_and_the_next_run_goes_on(tmp_path):
    """The step that runs when the signal comes is the last one, and the checkpoint is of it."""

    def interrupted(state, batch):
        if batch["x"][0] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(state, batch)

    _, summary, seen = run(tmp_path, num_steps=50, step=interrupted)
    assert (summary.steps, summary.stopped_by, seen) == (6, "signal", list(range(6)))
    _, summary, seen = run(tmp_path, num_steps=9)
    assert (summary.resumed_from, seen) == (6, [6, 0, 1])


def test_sigterm_during_a_wait_saves_what_was_done(tmp_path):
    """A signal that comes while the source is waited for ends the wait; the batch in the source is not lost."""

    def source(kill):
        for i in range(9):
            if kill and i == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch(i)

    options = {"size": 1, "host_size": 0, "resume": "replay"}
    with prefetch_to_device(source(True), **options) as batches:
        _, summary, seen = run(tmp_path, num_steps=9, source=batches, resume=None)
    assert summary.stopped_by == "signal"
    _, _, rest = run(tmp_path, num_steps=9, source=source(False))
    assert seen + rest == list(range(9))


def test_no_state_with_a_non_finite_loss_is_saved(tmp_path):
    """The checkpoint stays that of before, also when the step to save after is the one that failed."""

    def diverging(state, batch):
        return step(state, {"x": jnp.where(batch["x"] == 5, jnp.nan, batch["x"])})

    _, summary, _ = run(tmp_path, num_steps=50, step=diverging, save_every_steps=2, stop_on_non_finite=True)
    assert summary.stopped_by == "non-finite loss"
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 4


def test_saves_by_the_clock(tmp_path, monkeypatch):
    """`save_every_seconds` counts from the last checkpoint."""
    now = [0.0]
    monkeypatch.setattr("jaxprefetch.cadence.time.perf_counter", lambda: now[0])
    saved = []

    def ticking(state, batch):
        now[0] += 1.0
        return step(state, batch)

    with Checkpoints(tmp_path, max_to_keep=99) as checkpoints:
        save = checkpoints.save
        monkeypatch.setattr(checkpoints, "save", lambda at, *args: (saved.append(at), save(at, *args)))
        run(checkpoints, num_steps=10, step=ticking, save_every_steps=None, save_every_seconds=4.0)
    assert saved == [4, 8, 10]


def test_evaluations_choose_the_best_checkpoint(tmp_path):
    """Metrics of an evaluation after the same step are saved with the checkpoint."""
    with Checkpoints(tmp_path, max_to_keep=1, best_metric="eval/score") as checkpoints:
        run(
            checkpoints,
            num_steps=12,
            save_every_steps=3,
            eval_every_steps=3,
            eval_fn=lambda state: {"score": -abs(float(state) - 84)},  # 84 after an epoch, of 7 steps
        )
        assert checkpoints.best_step == 9
        assert checkpoints.latest_step == 12


def test_best_metric_that_no_evaluation_gives_ends_the_run(tmp_path):
    """At the first evaluation that is saved; what was done up to then is kept."""
    with Checkpoints(tmp_path, best_metric="score") as checkpoints:
        with pytest.raises(ValueError, match=r"step 6 has no number 'score' but \['eval/score'\]"):
            run(checkpoints, num_steps=12, save_every_steps=2, eval_every_steps=6, eval_fn=lambda state: {"score": 1.0})
        assert checkpoints.latest_step == 6
