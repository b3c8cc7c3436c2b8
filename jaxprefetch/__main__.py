"""The commands: `python -m jaxprefetch COMMAND`.

python -m jaxprefetch demo
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

DEMO_NEEDS = {"flax", "optax", "scipy", "sklearn", "tqdm"}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command; `argv` is what stands after the program's name."""
    parser = argparse.ArgumentParser(prog="python -m jaxprefetch", description="Batches already on their devices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a small model without and with prefetching, and compare")
    demo.set_defaults(run=run_demo)

    arguments = parser.parse_args(argv)
    arguments.run(arguments)


def run_demo(arguments: argparse.Namespace) -> None:
    """Runs `jaxprefetch.demo`, or says what is missing for it."""
    try:
        from jaxprefetch import demo
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in DEMO_NEEDS:
            raise
        sys.exit(
            f'The demo needs {missing}, which is not installed: pip install "jaxprefetch[demo]" '
            '(in a clone: pip install ".[demo]")'
        )
    demo.main()


if __name__ == "__main__":
    main()
