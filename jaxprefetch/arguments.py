"""Arguments that several public names share: byte sizes and counts."""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """Bytes from a positive integer or text such as `"2GiB"`, `"500 MB"`; None stays None.

    Raises:
        ValueError: anything else.
    """
    if value is None:
        return None
    if isinstance(value, str) and (
        match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", value, re.IGNORECASE)
    ):
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'{name}: expected bytes as a positive integer or text such as "2GiB", got {value!r}.')
    return value


def integer(name: str, value: Any, least: int) -> int:
    """An argument as an integer of at least `least`; NumPy's integers are taken too.

    Raises:
        ValueError: it is none.
    """
    number = operator.index(value) if hasattr(value, "__index__") and not isinstance(value, (bool, np.bool_)) else None
    if number is None or number < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}.")
    return number
