"""Imports point one way: the host and the devices do not know each other, and nothing below knows what joins them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import jaxprefetch

HOUSE = Path(jaxprefetch.__file__).parent


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("jaxprefetch"):
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names if alias.name.startswith("jaxprefetch"))
    return names


@pytest.mark.parametrize("room", ["host", "device"])
def test_a_room_imports_only_from_itself(room: str) -> None:
    """Files in host/ import from host/ only, files in device/ from device/ only, and all from errors.py."""
    for path in (HOUSE / room).glob("*.py"):
        names = imported(path) - {"jaxprefetch.errors"}
        strangers = {name for name in names if not name.startswith(f"jaxprefetch.{room}")}
        assert not strangers, f"{path.name} imports {sorted(strangers)}"


def test_processes_know_the_host_only() -> None:
    """What processes agree on has nothing to do with devices: files in processes/ import from there and from host/."""
    for path in (HOUSE / "processes").glob("*.py"):
        names = imported(path) - {"jaxprefetch.errors"}
        assert not {n for n in names if not n.startswith(("jaxprefetch.processes", "jaxprefetch.host"))}, path.name


def test_errors_imports_nothing_of_ours() -> None:
    """What every room may import knows none of them."""
    assert not imported(HOUSE / "errors.py")


def test_private_api_of_jax_has_its_places() -> None:
    """What JAX does not promise is looked for in three files, each of which has a tested way without it."""
    places = {
        "transfer.py": ("jax._src.config", "jaxlib"),
        "pinning.py": ("jaxlib.version",),
        "service.py": ("jax._src.distributed",),
    }
    for path in HOUSE.rglob("*.py"):
        tree = list(ast.walk(ast.parse(path.read_text())))
        modules = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
        private = {name for name in modules if name.startswith(("jax._", "jaxlib", "jax.extend", "jax.interpreters"))}
        assert private == set(places.get(path.name, ())), path.name
        attributes = {node.attr for node in tree if isinstance(node, ast.Attribute)}
        assert path.name in ("pinning.py", "service.py") or not attributes & {"dma_map", "dma_unmap"}, path.name


def test_the_window_knows_no_jax_no_thread_and_no_clock() -> None:
    """Decisions are made from facts alone."""
    for name in ("window", "flight", "actions"):
        tree = ast.parse((HOUSE / "device" / f"{name}.py").read_text())
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {"jax", "threading", "time", "queue"} & {module.partition(".")[0] for module in modules}
