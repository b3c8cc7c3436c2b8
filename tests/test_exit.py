"""Interpreters that end while a prefetcher is at work: their own exit code, no abort, no hang."""

from __future__ import annotations

import signal
import textwrap

import pytest
from gated import LIMIT_S, run_python, start_python

HEAD = """
import signal, sys, threading
import numpy as np
import jax
from jaxprefetch import prefetch_to_device

signal.signal(signal.SIGINT, signal.default_int_handler)
blocked = threading.Event()

def source(block_at=None):
    i = 0
    while True:
        if i == block_at:
            blocked.set()
            threading.Event().wait()
        yield {"x": np.full(100_000, i, np.float32)}
        i += 1

def train(batches, steps=20):
    step = jax.jit(lambda x: (x @ x).sum())
    for k, batch in enumerate(batches):
        result = step(batch["x"])
        if k == steps:
            return result
"""


def script(text):
    return HEAD + textwrap.dedent(text)


def assert_clean(errors):
    for word in ("FATAL", "Fatal", "terminate called", "abort", "Segmentation", "Exception ignored"):
        assert word not in errors, errors


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("batches = prefetch_to_device(source()); train(batches)", 0),
        ("batches = prefetch_to_device(source(), host_size=0); train(batches)", 0),
        ("batches = prefetch_to_device(source()); train(batches); raise KeyError('mine')", 1),
        ("batches = prefetch_to_device(source()); train(batches); sys.exit(3)", 3),
        ("batches = prefetch_to_device(source(4)); next(batches); blocked.wait(); sys.exit(5)", 5),
        (
            """
            many = [prefetch_to_device(source(4)) for _ in range(4)]
            for batches in many:
                train(batches, steps=2)
            """,
            0,
        ),
        (
            """
            def run():
                batches = prefetch_to_device(source())
                next(batches)
                started.set()  # from Python 3.12 on no thread starts once the main one has ended
                threading.main_thread().join()
                train(batches)
                sys.stderr.write("trained")
            started = threading.Event()
            threading.Thread(target=run).start()
            started.wait()
            """,
            0,
        ),
        (
            """
            def jitted():
                make = jax.jit(lambda i: jax.numpy.full(100_000, i))
                for i in range(10**9):
                    yield {"x": make(np.float32(i))}
            batches = prefetch_to_device(jitted()); train(batches)
            """,
            0,
        ),
    ],
    ids=["end", "inline", "error", "sys.exit", "blocked", "several", "other thread", "source uses JAX"],
)
def test_interpreter_ends_without_close(text, code):
    """An interpreter ends with its own exit code and no abort, whatever the reader is doing."""
    returned, _, errors = run_python(script(text))
    assert returned == code, errors
    assert_clean(errors)
    assert ("KeyError: 'mine'" in errors) == (code == 1)
    assert ("trained" in errors) == ("trained" in text)


def threads_start_at_exit() -> bool:
    """Some Pythons (3.12.1) start no thread any more in an exit handler; `close()` needs one, for it may block."""
    text = """
    import atexit, threading
    def start():
        thread = threading.Thread(target=print, args=["started"])
        thread.start()
        thread.join()
    atexit.register(start)
    """
    return "started" in run_python(textwrap.dedent(text))[1]


def test_exit_closes_a_source_that_blocks():
    """At exit the `close()` of an iterator that is no generator is called when the reader is stuck in it."""
    text = """
    class Socket:
        woken = threading.Event()
        def __iter__(self):
            return self
        def __next__(self):
            blocked.set()
            self.woken.wait()
            raise StopIteration
        def close(self):
            if not self.woken.is_set():
                print("closed", flush=True)
            self.woken.set()
    batches = prefetch_to_device(Socket())
    batches.start_prefetch()
    blocked.wait()
    """
    returned, output, errors = run_python(script(text))
    assert returned == 0, errors
    assert_clean(errors)
    assert output == ("closed\n" if threads_start_at_exit() else "")


def test_next_in_a_later_exit_handler_has_an_end():
    """After our exit handler `next()` may still give what was staged, and then it ends instead of waiting for ever."""
    text = """
    import atexit
    atexit.register(lambda: print("ended", len(list(batches)) < 100))
    from jaxprefetch import prefetch_to_device
    import numpy as np
    batches = prefetch_to_device({"x": np.zeros(4, np.float32)} for _ in range(100))
    next(batches)
    """
    returned, output, errors = run_python(textwrap.dedent(text))
    assert returned == 0, errors
    assert_clean(errors)
    assert output == "ended True\n"


@pytest.mark.parametrize("good", [0, 3])
def test_ctrl_c_ends_a_wait(good):
    """SIGINT while `next()` waits for the source ends the program with `KeyboardInterrupt`, at the first time."""
    text = f"""
    def stops():
        yield from (batch for _, batch in zip(range({good}), source()))
        waiting.wait()
        print("blocked", flush=True)
        threading.Event().wait()
    waiting = threading.Event()
    batches = prefetch_to_device(stops())
    for _ in range({good}):
        next(batches)
    waiting.set()
    next(batches)
    """
    with start_python(script(text)) as process:
        assert process.stdout.readline() == "blocked\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert_clean(errors)
