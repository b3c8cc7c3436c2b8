"""The house rules: imports that point one way, and files and functions that are short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import jaxprefetch

HOUSE = Path(jaxprefetch.__file__).parent
LONGEST_FILE, LONGEST_FUNCTION = 300, 40


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
        "transfer.py": ("jax._src.lib", "jaxlib"),
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


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How long a function is, its docstring apart; of a public one the signature, its options, does not count."""
    docstring = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    above = 0 if docstring is None else docstring.end_lineno - docstring.lineno + 1
    if function.name in jaxprefetch.__all__:
        above = (docstring.end_lineno if docstring else function.body[0].lineno - 1) - function.lineno + 1
    return function.end_lineno - function.lineno + 1 - above


def test_files_are_short() -> None:
    """No file of the library has more than 300 lines."""
    lengths = {str(path.relative_to(HOUSE)): len(path.read_text().splitlines()) for path in HOUSE.rglob("*.py")}
    assert not {name: n for name, n in lengths.items() if n > LONGEST_FILE}


def test_functions_are_short() -> None:
    """No function has more than 40 lines, docstring apart, and the signature of a public one."""
    for path in HOUSE.rglob("*.py"):
        functions = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert not {f.name: lines(f) for f in functions if lines(f) > LONGEST_FUNCTION}, path.name


def test_a_length_is_that_of_the_code() -> None:
    """What is counted: signature and body; of a public function the body."""
    text = 'def {}(\n    a,\n):\n    """Two\n    lines."""\n    b = a\n\n    return b\n'
    own, public = (ast.parse(text.format(name)).body[0] for name in ("own", "evaluate"))
    assert isinstance(own, ast.FunctionDef)
    assert isinstance(public, ast.FunctionDef)
    assert (lines(own), lines(public)) == (6, 3)
