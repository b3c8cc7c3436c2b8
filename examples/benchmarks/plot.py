"""Draws what `compare.py` measured: AlexNet's throughput under each method, and copies against their size.

    python examples/benchmarks/plot.py results/1gpu --into examples/benchmarks/results/compare.png

Both panels show methods that start from ordinary NumPy arrays, and ours also from its slots. A method that was not
measured, or failed, is left out. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

OURS, INK = "#1459b3", "#24292f"
SHADES = {
    (True, "float32"): (OURS, "white"),
    (True, "uint8"): ("#9cc0ee", INK),
    (False, "float32"): ("#737b86", "white"),
    (False, "uint8"): ("#cdd2d9", INK),
}
"""Colours of bar and text by whether it is ours, and the type of the images."""

LABELS = {
    "jaxprefetch, read_into, size 2": "jaxprefetch, read_into",
    "jaxprefetch, batched, size 2": "jaxprefetch, batched samples",
    "jaxprefetch, pageable, size 2": "jaxprefetch, NumPy arrays",
    "grain device_put, pageable": "Grain device_put",
    "datarax DevicePrefetcher, pageable": "datarax DevicePrefetcher",
    "double buffer, pageable": "double buffer (Haiku's example)",
    "device_put in the loop, pageable": "jax.device_put in the loop",
    "flax prefetch_to_device(2), pageable": "Flax prefetch_to_device",
    "torch DataLoader(pin_memory), 0 workers": "PyTorch DataLoader, pin_memory",
    "torch DataLoader(pin_memory), 4 workers": "PyTorch DataLoader, pin_memory, 4 workers",
}
LINES = {
    "jaxprefetch, read_into, size 2": (OURS, "-", "jaxprefetch, read_into"),
    "jaxprefetch, pageable, size 2": (OURS, (0, (4, 1.5)), "jaxprefetch, NumPy arrays"),
    "grain device_put, pageable": ("#b5651d", "-", "Grain device_put"),
    "device_put in the loop, pageable": ("#4d8f4d", "-", "jax.device_put in the loop"),
    "flax prefetch_to_device(2), pageable": ("#9a6fb0", "-", "Flax prefetch_to_device"),
}
LIMITS = ("torch pinned copy", "device_put, pinned")


def main() -> int:
    """Reads one directory of results and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--into", type=Path, required=True, help="the PNG file")
    options = parser.parse_args()
    alexnet, link = (json.loads((options.directory / f"{part}.json").read_text()) for part in ("alexnet", "link"))
    plt.rcParams.update({"font.size": 11, "text.color": INK, "axes.labelcolor": INK, "font.family": "DejaVu Sans"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), width_ratios=[1, 0.95], layout="constrained")
    draw_shares(left, alexnet)
    draw_rates(right, link)
    figure.savefig(options.into, dpi=160)
    return 0


def draw_shares(axes: Axes, record: dict) -> None:
    """Horizontal bars, ours on top: the share of the throughput with batches that lie on the device already."""
    cases = {dtype: record["results"][dtype] for dtype in ("float32", "uint8") if dtype in record["results"]}
    first = next(iter(cases.values()))["methods"]
    shares = {name: first[name]["share"]["median"] for name in LABELS if first.get(name, {}).get("share")}
    names = sorted(shares, key=lambda name: (_is_ours(name), shares[name]))
    height = 0.84 / len(cases)
    for number, (dtype, case) in enumerate(cases.items()):
        for row, name in enumerate(names):
            share = (case["methods"].get(name, {}).get("share") or {}).get("median")
            if share is not None:
                where = row + 0.42 - height * (number + 0.5)
                about = f"{dtype}, {case['batch_bytes'] / 1e9:.2g} GB a batch" if row == len(names) - 1 else ""
                _bar(axes, where, share, height * 0.94, (_is_ours(name), dtype), about)
    axes.set_yticks(range(len(names)), [LABELS[name] for name in names])
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set(fontweight="bold" if _is_ours(name) else "normal", color=INK)
    axes.axvline(1, color=INK, linewidth=1, linestyle=":")
    axes.set(xlim=(0, 1.02), xlabel="share of the throughput with data already on the GPU")
    axes.set_title(f"Training AlexNet, {_machine(record)}", loc="left", fontweight="bold")
    _bare(axes)


def _bar(axes: Axes, where: float, share: float, height: float, kind: tuple[bool, str], about: str) -> None:
    color, ink = SHADES[kind]
    axes.barh(where, share, height, color=color)
    inside = {"ha": "right", "color": ink} if share > 0.15 else {"ha": "left", "color": INK}
    edge = share - 0.01 if share > 0.15 else share + 0.01
    axes.text(edge, where, f"{share:.3f}", va="center", fontsize=9.5, clip_on=True, **inside)
    axes.text(0.012, where, about, va="center", fontsize=9.5, color=ink, clip_on=True)


MOST_OF_LIMIT = 1.1
"""What is more is of copies that were made before the timing began."""


def draw_rates(axes: Axes, record: dict) -> None:
    """Sustained copies against the size of a batch, below the limit of the link."""
    cases = [case for case in record["results"].values() if isinstance(case, dict)]
    limit = next(name for name in LIMITS if any("gib_s" in case["methods"].get(name, {}) for case in cases))
    most, ends = MOST_OF_LIMIT * record["results"]["limit_gib_s"], []
    for name, (color, style, label) in {limit: (INK, ":", "limit: pinned copy"), **LINES}.items():
        points = [
            (case["batch_bytes"] / 1e6, case["methods"][name]["gib_s"]["median"])
            for case in cases
            if "gib_s" in case["methods"].get(name, {}) and case["methods"][name]["gib_s"]["median"] <= most
        ]
        if points:
            width = 2.8 if _is_ours(name) else 1.6
            axes.plot(*zip(*points, strict=True), color=color, linestyle=style, linewidth=width, marker=".")
            ends.append((points[-1][1], label, color, "bold" if _is_ours(name) else "normal"))
    _label_ends(axes, ends)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([case["batch_bytes"] / 1e6 for case in cases]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:.0f}" if size >= 1 else f"{size:.2f}"))
    axes.set(xlabel="MB in a batch", ylabel="GiB/s to the GPU, sustained", ylim=(0, None))
    axes.set_title(f"Host to device, {_machine(record)}", loc="left", fontweight="bold")
    _bare(axes)


def _label_ends(axes: Axes, ends: list[tuple[float, str, str, str]]) -> None:
    """Writes each line's name to the right of its end, moved apart where they would overlap."""
    gap, free = max(rate for rate, *_ in ends) / 18, float("inf")
    for rate, label, color, weight in sorted(ends, reverse=True):
        free = min(rate, free - gap)
        style = {"color": color, "fontweight": weight, "fontsize": 10, "va": "center"}
        axes.annotate(label, (1.01, free), xycoords=("axes fraction", "data"), annotation_clip=False, **style)


def _is_ours(name: str) -> bool:
    return name.startswith("jaxprefetch")


def _machine(record: dict) -> str:
    gpus, count = record["environment"]["gpus"], record["gpus"]
    name = gpus[0].split(",")[0] if gpus else "CPU"
    return f"{count} × {name}" if count > 1 else name


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)


if __name__ == "__main__":
    sys.exit(main())
