"""Runs the parts of a benchmark, each in a process of its own, and writes one JSON file for each.

    PARTS = {"link": "link:link_part", "alexnet": "throughput:alexnet_part"}     # module:function
    sys.exit(runner.main(__doc__, __file__, PARTS))

A part is a function `(settings, results, log)` that fills the dict `results` as it goes. The file holds that with the
versions, the machine, and how it ended. A part that fails is written down, the others run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import environment
import jax
import report
from environment import Settings

PART_TIMEOUT_S = 300
SOURCES = ("pageable", "pinned", "read_into")
Parts = Mapping[str, str]


def main(description: str, script: str, parts: Parts) -> int:
    """Runs the parts that the command line names; returns the exit status.

    Args:
        description: the docstring of the script; its first line is shown by `--help`.
        script: the script's file, which is run again for each part.
        parts: all parts in their order, as `"module:function"` by name.
    """
    options = _options(description.splitlines()[0], parts)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        return _run_part(options.worker, parts[options.worker], _settings(options))
    start, failed = time.monotonic(), []
    with _compilation_cache():
        for part in options.parts:
            left = options.limit - (time.monotonic() - start)
            if not _run(part, parts[part], script, options, left):
                failed.append(part)
            print(f"== {part}: {time.monotonic() - start:.0f} s so far", flush=True)
    print(report.tables([options.out], options.parts), flush=True)
    if failed:
        print(f"FAILED: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _options(description: str, parts: Parts) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gpus", type=int, default=1, help="number of devices (1)")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(parts), help=",".join(parts))
    parser.add_argument("--out", type=Path, default=Path("benchmark_results"), help="directory for the JSON files")
    parser.add_argument("--tiny", action="store_true", help="small sizes and three steps, for a CPU")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (3)")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one AlexNet measurement (0.6)")
    parser.add_argument(
        "--sources",
        type=lambda text: text.split(","),
        default=["pageable", "pinned"],
        help=f"what `training` is fed from, of {','.join(SOURCES)} (pageable,pinned)",
    )
    parser.add_argument("--limit", type=float, default=440.0, help="seconds after which no part is started (440)")
    parser.add_argument("--worker", choices=parts, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for what, got, known in (("parts", options.parts, parts), ("sources", options.sources, SOURCES)):
        if unknown := set(got) - set(known):
            parser.error(f"unknown {what} {sorted(unknown)}; there are {', '.join(known)}")
    return options


def _settings(options: argparse.Namespace) -> Settings:
    rounds = 1 if options.tiny else options.rounds
    return Settings(options.gpus, options.tiny, rounds, options.seconds, options.out, tuple(options.sources))


@contextlib.contextmanager
def _compilation_cache():
    """Lets the parts share what they compile, so that AlexNet is compiled once."""
    with tempfile.TemporaryDirectory(prefix="jax_cache_") as directory:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = directory
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        yield


def _run(part: str, function: str, script: str, options: argparse.Namespace, seconds_left: float) -> bool:
    """Runs one part, in a process of its own unless tiny; returns whether it is all right."""
    print(f"== {part}", flush=True)
    if seconds_left <= 0:
        return _give_up(part, options, "not started: the time was used up")
    if options.tiny:
        return _run_part(part, function, _settings(options)) == 0
    (options.out / f"{part}.json").unlink(missing_ok=True)
    worker = subprocess.Popen([sys.executable, script, *sys.argv[1:], "--worker", part], start_new_session=True)
    try:
        status = worker.wait(min(PART_TIMEOUT_S, seconds_left + 30))
    except subprocess.TimeoutExpired:
        worker.terminate()  # it still writes what it has
        try:
            status = worker.wait(15)
        except subprocess.TimeoutExpired:
            worker.kill()
            status = worker.wait()
    with contextlib.suppress(ProcessLookupError):  # what it has started and left would slow down the parts that follow
        os.killpg(worker.pid, signal.SIGKILL)
    if not (options.out / f"{part}.json").exists():
        return _give_up(part, options, f"the process ended with status {status}")
    return status == 0


def _give_up(part: str, options: argparse.Namespace, error: str) -> bool:
    print(f"{part}: {error}", flush=True)
    _write(options.out / f"{part}.json", _empty_record(part, _settings(options)) | {"error": error})
    return False


def _empty_record(part: str, settings: Settings) -> dict:
    about = {"part": part, "gpus": settings.gpus, "tiny": settings.tiny, "environment": environment.describe()}
    return about | {"status": "failed", "error": None, "seconds": None, "results": {}}


def _run_part(part: str, function: str, settings: Settings) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("out of time"))
    record = _empty_record(part, settings)
    start = time.monotonic()
    try:
        module, _, name = function.partition(":")  # imported only now: one that cannot be imported fails alone
        part_function = getattr(importlib.import_module(module), name)
        part_function(settings, record["results"], lambda line: print(f"{part}: {line}", flush=True))
        record["status"] = "ok"
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        record["error"] = "".join(traceback.format_exception_only(error)).strip()
    record["seconds"] = time.monotonic() - start
    _write(settings.out / f"{part}.json", record)
    return 0 if record["status"] == "ok" else 1


def _write(path: Path, record: dict) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")
