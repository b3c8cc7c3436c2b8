"""Shows on GPUs what the core promises: right values, device memory, short steps, a loop that waits for its loss.

    python examples/benchmarks/core.py --gpus 1 --out results/1gpu
    python examples/benchmarks/core.py --gpus 2 --out results/2gpu --parts check,inflight
    python examples/benchmarks/core.py --tiny --out /tmp/tiny          # a CPU, in less than a minute

How `runner.py` runs it: each part in a process of its own, one JSON file for each. `report.py` turns the files into
tables. Throughput beside that of the peers is what `compare.py` measures.
"""

from __future__ import annotations

import sys

import runner

PARTS = {
    "check": "check:check_part",
    "memory": "memory:memory_part",
    "inflight": "inflight:inflight_part",
    "short": "workloads:short_part",
    "sync": "throughput:sync_part",
}

if __name__ == "__main__":
    sys.exit(runner.main(__doc__, __file__, PARTS))
