"""States of sources as JSON: what Grain, torchdata and others give, with nothing lost and nothing executed on reading.

Synopsis:

    text = json.dumps(to_json(loader.state_dict()))
    loader.load_state_dict(from_json(json.loads(text)))
"""

from __future__ import annotations

import base64
import importlib
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxprefetch.errors import typed

TAG = "__jaxprefetch__"
MOST = (1 << 63) - 1
"""A count that is larger is none."""


def to_json(state: Any, where: str = "state") -> Any:
    """Dicts, lists, tuples, strings, bytes, numbers, NumPy arrays and CPU tensors, as values that JSON has.

    Raises:
        TypeError: there is something else in it; says where.
    """
    if state is None or isinstance(state, (bool, str)):
        return state
    if type(state) is int or (type(state) is float and math.isfinite(state)):
        return state
    if type(state) is float:
        return {TAG: "float", "value": repr(state)}
    if isinstance(state, Mapping):
        if all(type(key) is str for key in state) and TAG not in state:
            return {key: to_json(value, f"{where}/{key}") for key, value in state.items()}
        pairs = [[to_json(key, where), to_json(value, f"{where}/{key}")] for key, value in state.items()]
        return {TAG: "dict", "value": pairs}
    if type(state) is list:
        return [to_json(value, f"{where}/{i}") for i, value in enumerate(state)]
    if type(state) is tuple:
        return {TAG: "tuple", "value": to_json(list(state), where)}
    if isinstance(state, (bytes, bytearray)):
        return {TAG: "bytes", "value": _text(state)}
    if _is_tensor(state):
        return {TAG: "tensor", "value": to_json(np.asarray(state), where)}
    if isinstance(state, (np.ndarray, np.generic)) and not state.dtype.hasobject:
        shape, dtype = list(state.shape), state.dtype.str
        kind = "array" if isinstance(state, np.ndarray) else "number"
        return {TAG: kind, "dtype": dtype, "shape": shape, "value": _text(state.tobytes())}
    raise TypeError(
        f"The source's state has a {type(state).__name__} at {where}, which JSON cannot hold without loss. "
        "Give the source a get_state() of plain values."
    )


def from_json(value: Any, where: str = "state") -> Any:
    """What `to_json` was given.

    Raises:
        ValueError: `to_json` gives nothing like it; says where.
    """
    if isinstance(value, list):
        return [from_json(item, f"{where}/{i}") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if TAG not in value:
        return {key: from_json(item, f"{where}/{key}") for key, item in value.items()}
    try:
        return _READ[value[TAG]](value, where)
    except _Damaged:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise _Damaged(
            f"The source's state is damaged at {where}: expected what was saved there, got {value!r:.200}. "
            "Take an earlier one, or begin anew without it."
        ) from error


class _Damaged(ValueError):
    """Says already where."""


def _float(value: Mapping[str, Any], where: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["value"]]


def _dict(value: Mapping[str, Any], where: str) -> dict[Any, Any]:
    return {from_json(key, where): from_json(item, f"{where}/{key}") for key, item in value["value"]}


def _tuple(value: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    if not isinstance(value["value"], list):
        raise TypeError("no list")
    return tuple(from_json(value["value"], where))


def _bytes(value: Mapping[str, Any], where: str) -> bytes:
    return base64.b64decode(value["value"], validate=True)


def _array(value: Mapping[str, Any], where: str) -> np.ndarray:
    dtype, shape = value["dtype"], tuple(map(operator.index, value["shape"]))
    if not isinstance(dtype, str) or any(n < 0 for n in shape):
        raise TypeError("no dtype and shape")
    return np.frombuffer(_bytes(value, where), dtype).reshape(shape).copy()


def _number(value: Mapping[str, Any], where: str) -> Any:
    return _array(value, where)[()]


def _tensor(value: Mapping[str, Any], where: str) -> Any:
    return importlib.import_module("torch").from_numpy(from_json(value["value"], where))


_READ = {
    "float": _float,
    "dict": _dict,
    "tuple": _tuple,
    "bytes": _bytes,
    "array": _array,
    "number": _number,
    "tensor": _tensor,
}


def check_state(state: Any, what: str, counts: Sequence[str], others: Sequence[str] = ()) -> list[int]:
    """The counts of a state that may come from a disk; it has these names and no more.

    Raises:
        ValueError: it is no such state; `what` is who says so.
    """
    names = (*counts, *others)
    if not isinstance(state, Mapping) or set(state) != set(names):
        raise ValueError(
            f"{what}: expected what get_state() gave, a dict of {', '.join(names)}; got {state!r:.200}. Take another "
            "state, or begin anew without it."
        )
    return [_count(state[name], f"{what}: {name}") for name in counts]


def _count(value: Any, what: str) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= MOST:
        raise ValueError(
            f"{what}: expected an integer from 0 to {MOST}, got {typed(value)}. The state is "
            "damaged: take an earlier one, or begin anew without it."
        )
    return number


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
