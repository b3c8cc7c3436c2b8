"""Compares `jaxprefetch` with its peers and with the limit of the link, every method in interleaved rounds of one run.

    python examples/benchmarks/compare.py --gpus 1 --out results/1gpu
    python examples/benchmarks/compare.py --gpus 2 --out results/2gpu --parts link,alexnet
    python examples/benchmarks/compare.py --tiny --out /tmp/tiny       # a CPU, in less than a minute
    python examples/benchmarks/plot.py results/1gpu --into examples/benchmarks/results/compare.png

How `runner.py` runs it: each part in a process of its own, one JSON file for each. `report.py` turns the files into
tables. A peer that is not installed, or fails, is written down and stops nothing; a failure of ours fails its part.
"""

from __future__ import annotations

import sys

import runner

PARTS = {
    "link": "link:link_part",
    "alexnet": "throughput:alexnet_part",
    "tokens": "workloads:tokens_part",
    "rl": "workloads:rl_part",
    "samples": "samples:samples_part",
    "steps": "workloads:steps_part",
    "fetch": "fetch:fetch_part",
    "cache": "cache:cache_part",
}

if __name__ == "__main__":
    sys.exit(runner.main(__doc__, __file__, PARTS))
