"""States of sources as JSON: what Grain, torchdata and others give, with nothing lost and nothing executed on reading.

Synopsis:

    text = json.dumps(to_json(loader.state_dict()))
    loader.load_state_dict(from_json(json.loads(text)))
"""

from __future__ import annotations

import base64
import importlib
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

TAG = "__jaxprefetch__"


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


def from_json(value: Any) -> Any:
    """What `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if TAG not in value:
        return {key: from_json(item) for key, item in value.items()}
    kind, content = value[TAG], value["value"]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {from_json(key): from_json(item) for key, item in content}
    if kind == "tuple":
        return tuple(from_json(content))
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tensor":
        return importlib.import_module("torch").from_numpy(from_json(content))
    array = np.frombuffer(base64.b64decode(content), value["dtype"]).reshape(value["shape"]).copy()
    return array if kind == "array" else array[()]


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
