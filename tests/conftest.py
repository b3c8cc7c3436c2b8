"""Switches for every test: eight CPU devices, strict dtype promotion, no thread left behind, no test skipped unseen.

    pytest                                       the suite, on the CPU
    pytest -m gpu                                what needs an accelerator, on the platform that JAX picks
    HYPOTHESIS_PROFILE=full pytest               10,000 examples a property instead of 200; 100,000 schedules
    JAXPREFETCH_NO_SKIPS=1 pytest                a skipped or xfailed test makes the run fail

A peer that mixes dtypes (optax's adam does) runs inside `with jax.numpy_dtype_promotion("standard"):`.
"""

import gc
import os
import sys
import threading
import time
import traceback

import hypothesis
import pytest

# Read when the backend starts, so before anything imports JAX. Without effect on other platforms.
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
if _DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT_FLAG}=8".strip()

_NO_SKIPS = os.environ.get("JAXPREFETCH_NO_SKIPS") == "1"
_THREAD_PREFIX = "jaxprefetch"
_JOIN_S = 5.0

hypothesis.settings.register_profile("ci", max_examples=200, derandomize=True, deadline=None)
hypothesis.settings.register_profile("full", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config):
    """Settles the platform, in the environment so that subprocesses of a test inherit it, and JAX's switches."""
    if "not gpu" in config.getoption("markexpr"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import jax
    from absl import flags

    # A pytest plugin may have imported JAX, and read the environment, before us.
    if os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    flags.FLAGS.mark_as_parsed()  # Grain reads absl's flags where it starts worker processes (seen in grain 0.2.18)

    from jaxprefetch.host import native

    native.native()  # made by a thread, which ends before any test looks for threads that are left
    native._making.wait()


def pytest_ignore_collect(collection_path, config):
    """Of the tests that need an accelerator, which are in `test_gpu*.py`, the others' eight devices are no concern."""
    gpu_only = config.getoption("markexpr") == "gpu"
    return True if gpu_only and collection_path.suffix == ".py" and "test_gpu" not in collection_path.name else None


# --- no thread left behind -------------------------------------------------------------------------------------------


def _our_threads():
    # `enumerate` also lists threads that another thread is about to start; those cannot be joined.
    return {thread for thread in threading.enumerate() if thread.name.startswith(_THREAD_PREFIX) and thread.is_alive()}


def _join(threads):
    """Waits at most `_JOIN_S` seconds for all of them together; returns those still alive."""
    deadline = time.monotonic() + _JOIN_S
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    return {thread for thread in threads if thread.is_alive()}


def _where(thread):
    frame = sys._current_frames().get(thread.ident)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (no frame)\n"
    return f"{thread.name} is at\n{stack}"


@pytest.fixture(autouse=True)
def no_thread_left_behind():
    """Fails a test after which a thread of ours still runs that did not run before it."""
    before = _our_threads()
    yield
    left = _our_threads() - before
    if left:
        gc.collect()  # a prefetcher that the test dropped in a reference cycle ends its thread when collected
        left = _join(left)
    if left:
        pytest.fail("Threads left behind: close what started them.\n" + "\n".join(map(_where, left)), pytrace=False)


# --- no test skipped unseen ------------------------------------------------------------------------------------------

_not_run = []


def _note(report, what):
    reason = getattr(report, "wasxfail", None)
    if reason is None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    _not_run.append(f"{report.nodeid}: {what}: {reason}")


def pytest_runtest_logreport(report):
    if hasattr(report, "wasxfail"):
        _note(report, "xfailed")
    elif report.skipped:
        _note(report, "skipped")


def pytest_collectreport(report):
    if report.skipped:
        _note(report, "skipped at import")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if _NO_SKIPS and _not_run and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _NO_SKIPS and _not_run:
        terminalreporter.section("not allowed to be skipped (JAXPREFETCH_NO_SKIPS=1)")
        for line in _not_run:
            terminalreporter.line(line)
