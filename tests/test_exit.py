"""Interpreters that end while a prefetcher is at work: their own exit code, no abort, no hang."""

from __future__ import annotations

import signal
import textwrap

import pytest
from exits import complaint, run_all, some
from gated import LIMIT_S, run_python, start_python

HEAD = """
import signal, sys, threading
import numpy as np
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
"""


def script(text):
    return HEAD + textwrap.dedent(text)


def assert_clean(errors):
    for word in ("FATAL", "Fatal", "terminate called", "abort", "Segmentation", "Exception ignored"):
        assert word not in errors, errors


@pytest.mark.parametrize("third", range(3))
def test_processes_end_with_their_own_exit_code_and_in_silence(third):
    """Whatever the library is doing, whoever takes batches and makes them: the exit is that of a script without it."""
    wrong = {str(case): complaint(case, ended) for case, ended in run_all(some()[third::3]).items()}
    assert not {case: what for case, what in wrong.items() if what}


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
