"""Turns the JSON files of the benchmark into Markdown tables.

    python examples/benchmarks/report.py results/1gpu results/2gpu                      # prints them
    python examples/benchmarks/report.py results/1gpu results/2gpu --into README.md     # between their markers

In the README the table NAME stands between `<!-- results:NAME -->` and `<!-- /results -->`; the parts are the names.
With `results:NAME:brief` some of our own variants are left out.
Several directories stand side by side, for example one GPU and two.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

Record = dict
PARTS = (
    *("link", "alexnet", "tokens", "rl", "samples", "steps", "fetch", "cache"),
    *("check", "memory", "inflight", "short", "sync", "loop", "training", "host"),
)
HOST = {
    "next_us": "us in next()",
    "loop_us": "us of CPU a step, of its thread",
    "process_us": "us of CPU a step, of the process",
    "batches_per_s": "batches a second with nothing else",
}
PACKAGES = ("jaxprefetch", "jax", "jaxlib", "flax", "grain", "torch", "numpy", "llvmlite")
UNITS = {
    "link": "GiB/s, all devices",
    "rl": "ms added to the best possible step",
    "samples": "GiB/s",
    "fetch": "GiB/s, or share of the step alone",
    "inflight": "most batches on a device",
    "host": "processes, source",
}
MARKED = re.compile(r"(<!-- results:([\w-]+)(:brief)? -->\n).*?(<!-- /results -->)", re.DOTALL)
NOT_BRIEF = re.compile(r"size [134]|1000 steps|delete_used|datarax|flax .*, pinned")


def main() -> int:
    """Prints the tables, or puts them into a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="the Markdown file with the markers")
    options = parser.parse_args()
    if options.into:
        text = options.into.read_text()
        options.into.write_text(filled(text, options.directories))
    else:
        print(tables(options.directories, PARTS))
    return 0


def tables(directories: list[Path], parts: Iterable[str]) -> str:
    """Returns the tables of `parts`, each under its name."""
    return "\n".join(f"\n### {part}\n\n{table(part, directories)}" for part in parts)


def filled(text: str, directories: list[Path]) -> str:
    """Returns `text` with the tables between their markers; markers of unknown parts stay as they are."""

    def replace(match: re.Match) -> str:
        if match[2] not in PARTS:
            return match[0]
        return f"{match[1]}{table(match[2], directories, brief=bool(match[3]))}\n{match[4]}"

    return MARKED.sub(replace, text)


def table(part: str, directories: list[Path], *, brief: bool = False) -> str:
    """Returns the table of one part with what it was measured on."""
    paths = [directory / f"{part}.json" for directory in directories]
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    if not records:
        return "not measured"
    columns = [column for record in records for column in _columns(part, record)]
    lines = [_measured_on(record) for record in records]
    lines += [f"{_gpus(r)}: **{r['status']}**: {str(r['error'])[:300]}" for r in records if r["status"] != "ok"]
    if any(case.get("pinned") is False for r in records for case in r["results"].values() if isinstance(case, dict)):
        lines.append('Host memory could not be registered with the driver: what is called "pinned" is ordinary memory.')
    return "\n".join([_grid(part, columns, brief), "", *dict.fromkeys(lines)])


def _columns(part: str, record: Record) -> list[tuple[str, dict[str, str]]]:
    """Returns heading and cells by row name of each column."""
    results, gpus = record["results"], _gpus(record)
    if part == "check":
        right = sum(value == "OK" for value in results.values())
        return [(gpus, {"consumers with right values": f"{right} of {len(results)}"})]
    if part == "host":
        cases = {name: case for name, case in results.items() if isinstance(case, dict)}
        return [
            (heading, {name: f"{case[key]['median']:,.0f}" for name, case in cases.items()})
            for key, heading in HOST.items()
        ]
    cells = {"link": _rate, "samples": _rate, "rl": _added, "inflight": _inflight, "memory": _peak, "fetch": _fetched}
    cell = cells.get(part, _share)
    cases = {name: case for name, case in results.items() if isinstance(case, dict)}
    if part not in ("inflight", "memory"):
        cases = {name: case["methods"] for name, case in cases.items() if "methods" in case}
    return [(f"{gpus}, {name}", _cells(case, cell)) for name, case in cases.items()]


def _share(record: dict) -> str:
    return f"{_number(record.get('share'))} ({record['ms']['median']:.2f} ms)"


def _added(record: dict) -> str:
    return f"{_number(record['added_ms'])}, share {record['share']['median']:.2f}" if record["share"] else "?"


def _rate(record: dict) -> str:
    return _number(record["gib_s"], digits=1)


def _fetched(record: dict) -> str:
    return (
        f"{_rate(record)}, {record['share_of_limit']:.2f} of the limit"
        if "share_of_limit" in record
        else _share(record)
    )


def _number(spread: dict | None, digits: int = 3) -> str:
    if not spread:
        return "?"
    return f"{spread['median']:.{digits}f} [{spread['min']:.{digits}f}, {spread['max']:.{digits}f}]"


def _inflight(record: dict) -> str:
    bound = "" if record["bound"] is None else f" of {record['bound']:g}"
    return f"{record['batches_max']:.2f}{bound}"


def _peak(record: dict) -> str:
    above = record.get("batches_above_resident")
    return f"{record['peak_bytes'] / (1 << 30):.2f} GiB" + (f", {above:+.2f} batches" if above is not None else "")


def _cells(case: dict[str, dict], cell: Callable[[dict], str]) -> dict[str, str]:
    return {name: _failure(record) or cell(record) for name, record in case.items()}


def _failure(record: dict) -> str | None:
    if "unavailable" in record:
        return record["unavailable"].split(":")[0]
    error = record.get("error") or record.get("failed")
    return f"error: {error.splitlines()[0][:60]}" if error else None


def _grid(part: str, columns: list[tuple[str, dict[str, str]]], brief: bool) -> str:
    rows = dict.fromkeys(name for _, cells in columns for name in cells if not (brief and NOT_BRIEF.search(name)))
    lines = ["| " + " | ".join([UNITS.get(part, part), *(heading for heading, _ in columns)]) + " |"]
    lines.append("|" + "---|" * (len(columns) + 1))
    for name in rows:
        lines.append("| " + " | ".join([name, *(cells.get(name, "–") for _, cells in columns)]) + " |")
    return "\n".join(lines)


def _gpus(record: Record) -> str:
    count = record.get("gpus", "?")
    machine = "GPU" if record["environment"]["gpus"] else "CPU device"
    return f"{count} {machine}" + ("s" if count != 1 else "")


def _measured_on(record: Record) -> str:
    about = record["environment"]
    packages = ", ".join(f"{name} {about['versions'][name]}" for name in PACKAGES if name in about["versions"])
    machine = about["gpus"][0] if about["gpus"] else about["platform"]
    return f"{machine}; {packages}, Python {about['versions']['python']}; {about['date'][:10]}."


if __name__ == "__main__":
    sys.exit(main())
