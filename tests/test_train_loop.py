"""`train_loop`: the steps, the metrics, the ends, and what raises."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from gated import Counted, InThread, Loader, batch, reader_threads

from jaxprefetch import prefetch_to_device
from jaxprefetch.late import AHEAD, LateMetrics
from jaxprefetch.loop import train_loop
from jaxprefetch.metrics import MetricsDelivery


def step(state, batch):
    """Adds the batch's number to the state; the loss is that number."""
    return _add(state, batch["x"])


@jax.jit
def _add(state, x):
    return state + x.sum(), {"loss": x.max()}


def run(source=None, step=step, **options):
    """The state, the summary, and what the hook was called with."""
    seen = []
    options.setdefault("num_steps", 5)
    state, summary = train_loop(
        step,
        jnp.float32(0),
        Loader(100) if source is None else source,
        hooks=lambda number, metrics: seen.append((number, dict(metrics))),
        progress=False,
        **options,
    )
    return state, summary, seen


# ---- steps and metrics


def test_batches_on_one_device_of_the_states_are_said(caplog):
    """A forgotten sharding is warned of at the first step; arrays of the source's own place are not."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    split, replicated = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (["data"], []))
    state, rows = jax.device_put(np.float32(0), replicated), [batch(n, 8) for n in range(5)]
    placed = [jax.device_put(each, split) for each in rows]
    for source, options, times in ((rows, {}, 1), (rows, {"sharding": split}, 0), (placed, {}, 0)):
        caplog.clear()
        assert float(train_loop(step, state, source, num_steps=5, progress=False, **options)[0]) == 8 * 10
        assert caplog.text.count("the state is on 8 devices and the batches are on one") == times


def test_every_step_is_run_and_logged_with_its_own_metrics():
    """Hooks get each step's metrics as floats, in order, with the step's number."""
    state, summary, seen = run(num_steps=20)
    assert seen == [(k + 1, {"loss": float(k)}) for k in range(20)]
    assert float(state) == 4 * sum(range(20))
    assert (summary.steps, summary.resumed_from, summary.stopped_by) == (20, 0, "num_steps")
    assert summary.metrics == {"loss": 19.0}
    assert summary.statistics.taken == 20
    assert "20 steps in" in str(summary)
    assert summary.statistics.verdict in str(summary)


def test_metrics_of_a_step_are_not_waited_for():
    """No step's metrics are read before the next step is dispatched, unless they are there; at most 8 steps later."""
    dispatched = []
    late = []

    def counting(state, batch):
        dispatched.append(None)
        return step(state, batch)

    train_loop(
        counting,
        jnp.float32(0),
        Loader(50),
        num_steps=50,
        hooks=lambda number, metrics: late.append(len(dispatched) - number),
        progress=False,
    )
    assert min(late) >= 0
    assert max(late) <= AHEAD


def test_log_every_steps_picks_steps():
    """Hooks get the metrics of each n-th step only; the summary has those of the last all the same."""
    _, summary, seen = run(num_steps=10, log_every_steps=4)
    assert [number for number, _ in seen] == [4, 8]
    assert summary.metrics == {"loss": 9.0}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (lambda x: x.max(), {"loss": 3.0}),
        (lambda x: {"a": {"b": x.max()}, "c": 7}, {"a/b": 3.0, "c": 7}),
        (lambda x: {"half": x.max().astype(jnp.bfloat16), "ok": x.max() > 1}, {"half": 3.0, "ok": True}),
        (lambda x: None, {}),
    ],
    ids=["bare", "nested", "dtypes", "none"],
)
def test_metrics_may_be_any_pytree(metrics, expected):
    """Names are the paths of the leaves, values are Python numbers; one bare value is the loss."""
    _, summary, seen = run(step=lambda state, batch: (state, metrics(batch["x"])), num_steps=4)
    assert seen[-1] == (4, expected)
    assert summary.metrics == expected


def test_metrics_that_are_arrays_stay_arrays():
    """A metric with a shape arrives as a NumPy array."""
    _, _, seen = run(step=lambda state, batch: (state, {"x": batch["x"]}), num_steps=1)
    assert isinstance(seen[0][1]["x"], np.ndarray)


def test_metric_that_was_donated_is_an_error_that_says_so():
    """A metric that is an array of the state, donated to a later step, cannot be read late."""

    late = LateMetrics()
    state = {"lr": jnp.float32(0)}
    late.add(1, state, fetch=True)
    state["lr"].delete()
    with pytest.raises(ValueError, match=r"Step 1, metric lr: the array was deleted before it was read.*jnp\.copy"):
        list(late.due())


def test_no_implicit_transfer():
    """The loop runs under `transfer_guard("disallow")`."""
    start = jax.device_put(np.float32(0))
    with jax.transfer_guard("disallow"):
        _, summary = train_loop(step, start, Loader(4), num_steps=4, progress=False)
    assert summary.metrics == {"loss": 3.0}


# ---- states of Flax


def features(rows=8):
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(rows, 4)).astype(np.float32), "y": rng.normal(size=rows).astype(np.float32)}
        for _ in range(3)
    ]


def test_linen_train_state():
    """A donated `TrainState` goes through the loop; the loss falls."""
    model = nn.Dense(1)

    @jax.jit
    def init(key):
        return model.init(key, jnp.ones((1, 4)))["params"]

    def train(state, batch):
        def loss_of(params):
            return ((state.apply_fn({"params": params}, batch["x"])[:, 0] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    with jax.numpy_dtype_promotion("standard"):
        state = TrainState.create(apply_fn=model.apply, params=init(jax.random.key(0)), tx=optax.adam(0.05))
        state, summary, seen = run_state(jax.jit(train, donate_argnums=0), state, features(), num_steps=60)
    assert int(state.step) == 60
    assert seen[-1][1]["loss"] < seen[0][1]["loss"]
    assert summary.stopped_by == "num_steps"


def test_nnx_model_and_optimizer():
    """NNX objects are updated themselves by a step that returns them."""
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: ((m(batch["x"])[:, 0] - batch["y"]) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    before = np.asarray(model.kernel[...])
    with jax.numpy_dtype_promotion("standard"):
        (trained, _), _, seen = run_state(
            lambda state, batch: (state, update(*state, batch)), (model, optimizer), features(), num_steps=60
        )
    assert trained is model
    assert not np.array_equal(before, np.asarray(model.kernel[...]))
    assert seen[-1][1]["loss"] < seen[0][1]["loss"]


def run_state(step, state, source, seen=None, **options):
    seen = [] if seen is None else seen
    state, summary = train_loop(step, state, source, hooks=[lambda *call: seen.append(call)], progress=False, **options)
    return state, summary, seen


# ---- the source


def test_epochs_begin_anew_until_the_steps_are_done():
    """A source that can be iterated again is gone through as often as it takes."""
    loader = Loader(4)
    _, summary, seen = run(loader, num_steps=10)
    assert [metrics["loss"] for _, metrics in seen] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert summary.stopped_by == "num_steps"
    assert loader.passes == 3


@pytest.mark.parametrize("source", [lambda: Counted(3), lambda: iter([batch(i) for i in range(3)])])
def test_source_that_ends_early_ends_the_run_with_a_warning(source, caplog):
    """A one-shot source with fewer batches than steps: all of them are used, and it is said."""
    _, summary, seen = run(source(), num_steps=10)
    assert len(seen) == 3
    assert (summary.steps, summary.stopped_by) == (3, "source ended")
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "jaxprefetch: the source has ended after 3 of 10 steps and cannot be begun anew. Pass an iterable that can "
        "(a list, a loader), or ask for fewer steps."
    ]


@pytest.mark.parametrize("source", [[], iter([])], ids=["list", "one-shot"])
def test_empty_source_ends_the_run(source, caplog):
    """A source without batches is not begun anew for ever, and it is said."""
    _, summary, seen = run(source, num_steps=10)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "jaxprefetch: the source is empty: no step was done. Pass an iterable that has batches."
    ]
    assert (summary.steps, summary.stopped_by, summary.metrics, seen) == (0, "source ended", {}, [])


def test_no_steps_touch_nothing():
    """`num_steps=0` returns the state as it was and pulls no batch."""
    source = Counted()
    state, summary, seen = run(source, num_steps=0)
    assert (float(state), summary.steps, summary.stopped_by, seen, source.pulled) == (0, 0, "num_steps", [], 0)
    assert summary.metrics == {}


def test_own_prefetcher_stays_open():
    """A `DevicePrefetcher` is used as it is and goes on afterwards; its options cannot be given again."""
    with prefetch_to_device(Loader(6), size=3) as batches:
        _, _, seen = run(batches, num_steps=2)
        assert [metrics["loss"] for _, metrics in seen] == [0, 1]
        _, _, seen = run(batches, num_steps=2)
        assert [metrics["loss"] for _, metrics in seen] == [2, 3]
        with pytest.raises(TypeError, match="size, max_bytes: the source is a DevicePrefetcher"):
            run(batches, size=2, max_bytes=100)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"num_steps": -1}, ValueError, "num_steps: expected an integer of at least 0, got -1"),
        ({"log_every_steps": 0}, ValueError, "log_every_steps: expected an integer of at least 1, got 0"),
        ({"eval_every_steps": 5}, TypeError, "eval_every_steps: expected eval_fn beside it"),
        ({"save_every_steps": 5}, TypeError, "save_every_steps: expected checkpoints beside it"),
        ({"save_every_seconds": 5}, TypeError, "save_every_seconds: expected checkpoints beside it"),
        (
            {"save_every_seconds": 0, "checkpoints": "x"},
            ValueError,
            "save_every_seconds: expected at least 1e-09",
        ),
    ],
)
def test_wrong_arguments(options, kind, match):
    """Arguments that make no sense are refused before anything begins."""
    source = Counted()
    with pytest.raises(kind, match=match):
        run(source, **options)
    assert source.pulled == 0


# ---- what raises


def test_step_that_raises():
    """The step's error passes through with its number, after the metrics before it were delivered."""
    seen = []

    def failing(state, batch):
        if batch["x"][0] == 3:
            raise ZeroDivisionError("in the step")
        return step(state, batch)

    with pytest.raises(ZeroDivisionError, match="in the step") as caught:
        train_loop(
            failing, jnp.float32(0), Loader(9), num_steps=9, hooks=lambda *call: seen.append(call), progress=False
        )
    assert caught.value.__notes__ == ["jaxprefetch: raised by step 4"]
    assert [number for number, _ in seen] == [1, 2, 3]
    assert not reader_threads()


def test_step_that_does_not_return_a_pair():
    """A step that returns the state alone is an error at the first step."""
    with pytest.raises(TypeError, match=r"Step 1 returned ArrayImpl; expected the pair \(state, metrics\)"):
        run(step=lambda state, batch: state)


def one(metrics):
    """No hook: the step's number has no place."""


def decorated(hook):
    @functools.wraps(hook)
    def call(step, metrics):
        hook(metrics)

    return call


class Hook:
    def __call__(self, step, metrics):
        """Nothing to do."""

    def one(self, metrics):
        """As above."""

    def more(self, step, metrics, *, name="train", **rest):
        """As above."""

    def keyword(self, step, metrics, *, name):
        """As above."""


@pytest.mark.parametrize(
    ("hook", "match"),
    [
        (one, r"got one\(metrics\), which cannot be called with 2 arguments\."),
        (lambda: None, r"got .*<lambda>\(\), which cannot be called with 2 arguments"),
        (Hook().one, r"got Hook.one\(metrics\), which cannot"),
        (Hook().keyword, r"got Hook.keyword\(step, metrics, \*, name\), which cannot"),
        (lambda step, metrics, epoch: None, r"got .*<lambda>\(step, metrics, epoch\), which cannot"),
        ([print, one], r"got one\(metrics\)"),
        ([].append, r"got list.append\(object, /\)"),
    ],
)
def test_a_hook_that_cannot_be_called_is_an_error_at_once(hook, match):
    """What takes other arguments than a step's number and metrics is refused before the first step."""
    with pytest.raises(TypeError, match=r"^hooks: expected functions \(step, metrics\), .*" + match):
        train_loop(lambda s, b: pytest.fail("a step"), 0, Loader(2), num_steps=2, hooks=hook, progress=False)


@pytest.mark.parametrize(
    "hook",
    [print, Hook(), Hook().more, functools.partial(print, end=""), decorated(one), {}.setdefault, dict, [], ()],
    ids=["print", "object", "method", "partial", "decorated", "builtin", "no signature", "list", "tuple"],
)
def test_what_can_be_called_is_a_hook(hook):
    """Functions, methods and objects with defaults; those that a decorator has changed; and where nothing tells."""
    assert MetricsDelivery(hook, every_steps=1, finite=None).non_finite_step is None


def test_hook_that_raises():
    """A hook's error passes through with hook and step; nothing stays open."""

    def hook(number, metrics):
        if number == 2:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as caught:
        train_loop(step, jnp.float32(0), Loader(50), num_steps=50, hooks=hook, progress=False)
    (note,) = caught.value.__notes__
    assert note.startswith("jaxprefetch: raised by the hook test_hook_that_raises")
    assert note.endswith("for step 2")
    assert not reader_threads()


def test_source_that_raises():
    """The source's error arrives after the steps before it, whose metrics were delivered."""

    def source():
        yield batch(0)
        yield batch(1)
        raise LookupError("no more files")

    seen = []
    with pytest.raises(LookupError, match="no more files"):
        run_state(step, jnp.float32(0), source(), num_steps=9, seen=seen)
    assert [number for number, _ in seen] == [1, 2]


# ---- numbers that are not finite


def nan_at(number):
    def diverging(state, batch):
        return step(state, {"x": jnp.where(batch["x"] == number, jnp.nan, batch["x"])})

    return diverging


def test_non_finite_loss_stops_when_asked(caplog):
    """The run ends at most 8 steps after the loss was no number; hooks have seen it."""
    _, summary, seen = run(step=nan_at(5), num_steps=80, stop_on_non_finite=True)
    assert summary.stopped_by == "non-finite loss"
    assert 6 <= summary.steps <= 6 + AHEAD
    assert np.isnan(seen[5][1]["loss"])
    assert "step 6: loss is nan. The run ends." in caplog.text


def test_non_finite_loss_is_trained_through_otherwise():
    """Without being asked the loop goes on, as a loop by hand would."""
    _, summary, _ = run(step=nan_at(1), num_steps=9)
    assert (summary.steps, summary.stopped_by) == (9, "num_steps")


def test_non_finite_names_a_metric_that_there_is():
    """A name that no metric has is an error with those that there are."""
    with pytest.raises(ValueError, match=r"step 1 has no metric 'nll' but \['loss'\]"):
        run(stop_on_non_finite="nll")


# ---- evaluation


def test_eval_fn_is_called_at_its_cadence_and_at_the_end():
    """Evaluations come with the step's number, after all metrics up to it."""
    states = []

    def evaluate(state):
        states.append(float(state))
        return {"accuracy": state / 100}

    _, summary, seen = run(num_steps=5, eval_fn=evaluate, eval_every_steps=2)
    numbers = [(number, next(iter(metrics))) for number, metrics in seen]
    assert numbers == [
        (1, "loss"),
        (2, "loss"),
        (2, "eval/accuracy"),
        (3, "loss"),
        (4, "loss"),
        (4, "eval/accuracy"),
        (5, "loss"),
        (5, "eval/accuracy"),
    ]
    assert states == [4, 24, 40]
    assert summary.eval_metrics == {"eval/accuracy": pytest.approx(0.4)}


def test_eval_fn_that_returns_nothing_is_an_error():
    """An evaluation without its `return` is told; one without metrics returns an empty dict."""
    with pytest.raises(TypeError, match=r"eval_fn returned None after step 2, expected metrics\. .* or {} if it"):
        run(eval_fn=lambda state: None, eval_every_steps=2)
    _, summary, seen = run(eval_fn=lambda state: {}, num_steps=1)
    assert (summary.eval_metrics, seen) == ({}, [(1, {"loss": 0.0}), (1, {})])


# ---- SIGTERM


def test_sigterm_ends_after_the_step():
    """The step that is running is finished, the handler that was there is back."""
    before = signal.getsignal(signal.SIGTERM)

    def interrupted(state, batch):
        if batch["x"][0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(state, batch)

    _, summary, seen = run(step=interrupted, num_steps=50)
    assert (summary.steps, summary.stopped_by, len(seen)) == (3, "signal", 3)
    assert signal.getsignal(signal.SIGTERM) is before


def test_second_sigterm_is_as_without_the_loop():
    """The first signal puts the former handler back, so that the second one meets that."""
    second = []

    def interrupted(state, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return step(state, batch)

    former = signal.signal(signal.SIGTERM, lambda *_: second.append(True))
    try:
        _, summary, _ = run(step=interrupted, num_steps=50)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert (summary.steps, second) == (1, [True])


@pytest.mark.parametrize("host_size", [0, 4])
def test_sigterm_ends_a_wait_for_the_source(host_size):
    """A signal that comes while the loop waits for the source does not wait for it."""

    def source():
        yield batch(0)
        os.kill(os.getpid(), signal.SIGTERM)  # from the reader's thread or from this one: Python handles it in this one
        yield batch(1)

    with prefetch_to_device(source(), host_size=host_size, size=1) as batches:
        _, summary, _ = run(batches, num_steps=50)
    assert summary.stopped_by == "signal"
    assert summary.steps <= 2


def test_loop_in_another_thread_leaves_signals_alone():
    """Only the main thread can listen to signals."""
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def noting(state, batch):
        handlers.append(signal.getsignal(signal.SIGTERM))
        return step(state, batch)

    InThread(lambda: run(step=noting, num_steps=2)).result()
    assert handlers == [before] * 2


# ---- the progress bar


def test_bar_shows_steps_loss_and_waiting(capsys):
    """The bar counts steps and shows the newest loss and the share of the time waiting for input."""
    train_loop(step, jnp.float32(0), Loader(30), num_steps=30, progress=True)
    shown = capsys.readouterr().err
    assert "30/30" in shown
    assert "loss=29" in shown
    assert "waiting=" in shown


def test_interrupted_bar_is_closed(capsys):
    """A Ctrl-C passes through; the bar is left where it was and nothing stays open."""

    def interrupted(state, batch):
        if batch["x"][0] == 3:
            raise KeyboardInterrupt
        return step(state, batch)

    with pytest.raises(KeyboardInterrupt) as caught:
        train_loop(interrupted, jnp.float32(0), Loader(30), num_steps=30, progress=True)
    assert caught.value.__notes__ == ["jaxprefetch: raised by step 4"]
    assert "3/30" in capsys.readouterr().err
    assert not reader_threads()


def test_missing_tqdm_is_said_only_when_it_is_asked_for(monkeypatch):
    """Without tqdm the loop runs without a bar; asked for one, it names the extra."""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    train_loop(step, jnp.float32(0), Loader(2), num_steps=2)
    with pytest.raises(ModuleNotFoundError, match=r'progress=True needs tqdm.*pip install "jaxprefetch\[train\]"'):
        train_loop(step, jnp.float32(0), Loader(2), num_steps=2, progress=True)
