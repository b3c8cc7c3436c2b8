"""Arguments that several public names share: byte sizes, counts, switches and names of leaves.

Synopsis:

    parse_bytes("max_bytes", "2GiB")     # 2147483648
    integer("size", 2, least=1)          # 2; else an error that names the argument
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from jaxprefetch.errors import shown, typed

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """Bytes from a positive integer (NumPy's too) or text such as `"2GiB"`, `"500 MB"`; None stays None.

    Raises:
        ValueError: anything else.
    """
    if value is None:
        return None
    if isinstance(value, str) and (
        match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", value, re.IGNORECASE)
    ):
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    number = _index(value)
    if number is None or number < 1:
        raise ValueError(f'{name}: expected bytes as a positive integer or text such as "2GiB", got {shown(value)}.')
    return number


def integer(name: str, value: Any, least: int) -> int:
    """An argument as an integer of at least `least`; NumPy's integers are taken too.

    Raises:
        ValueError: it is none.
    """
    number = _index(value)
    if number is None or number < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {shown(value)}.")
    return number


def check_keep_on_host(value: Any) -> None:
    """`keep_on_host` is a path, several of them, a function or None.

    Raises:
        TypeError: it is none of these.
    """
    if value is None or isinstance(value, str) or callable(value):
        return
    if not isinstance(value, (Sequence, Set)) or not all(isinstance(path, str) for path in value):
        raise TypeError(
            "keep_on_host: expected None, a path (str), a sequence of paths or a function (path, leaf) -> bool, got "
            f"{typed(value)}."
        )


def check_switch(name: str, value: Any, *, or_none: bool = False) -> None:
    """The argument is True or False, or None where that may be.

    Raises:
        TypeError: it is none of these.
    """
    if not (isinstance(value, (bool, np.bool_)) or (or_none and value is None)):
        expected = "True, False or None" if or_none else "True or False"
        raise TypeError(f"{name}: expected {expected}, got {typed(value)}.")


def check_function(name: str, value: Any, what: str) -> None:
    """The argument can be called.

    Raises:
        TypeError: it cannot; `what` it should be is told.
    """
    if not callable(value):
        raise TypeError(f"{name}: expected {what}, got {typed(value)}.")


def check_takes(name: str, function: Any, what: str, arguments: int) -> None:
    """The function can be called with so many arguments; where nothing tells, as for some builtins, it passes.

    Raises:
        TypeError: it cannot; `what` it should be is told, and what it takes.
    """
    check_function(name, function, what)
    try:  # of the function itself: what a decorator took it from may take something else
        signature = inspect.signature(function, follow_wrapped=False)
    except Exception:  # TypeError, ValueError; from Python 3.14 on, what evaluating annotations raises
        return
    if not _fits(signature, arguments):
        got = f"{getattr(function, '__qualname__', type(function).__name__)}{signature}"
        raise TypeError(f"{name}: expected {what}, got {got}, which cannot be called with {arguments} arguments.")


def check_key(name: str, value: Any) -> None:
    """The argument can be a key of a dict.

    Raises:
        TypeError: it cannot.
    """
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name}: expected a key of a dict, such as 'mask', got {typed(value)}.") from None


def seconds(name: str, value: Any, *, least: float = 0.0) -> float:
    """An argument as seconds of at least `least`; infinite is allowed.

    Raises:
        TypeError: it is no number.
        ValueError: it is less, or not a number.
    """
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}: expected seconds, got {typed(value)}.")
    if not float(value) >= least:
        raise ValueError(f"{name}: expected at least {least:g} seconds, got {shown(value)}.")
    return float(value)


def refuse_options(**options: Any) -> None:
    """Options that a prefetcher already has cannot be given for it again.

    Raises:
        TypeError: one is not None.
    """
    if given := [name for name, value in options.items() if value is not None]:
        raise TypeError(
            f"{', '.join(given)}: the source is a DevicePrefetcher, which has been made with its own. Leave "
            "them out here, or pass the bare source."
        )


def _fits(signature: inspect.Signature, arguments: int) -> bool:
    """Whether so many arguments by place, and none by name, are what it takes."""
    parameters = signature.parameters.values()
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in by_place)
    most = math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(by_place)
    named = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    return needed <= arguments <= most and not named


def _index(value: Any) -> int | None:
    """The value as an integer; None where it is none, or a bool."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
