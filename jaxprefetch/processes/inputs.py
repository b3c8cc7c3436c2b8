"""The input's state of each process, as they are saved together and given back.

Synopsis:

    saved = {"processes": of_all_processes(state)}      # in every process the same
    of_this_process(saved, step=100)                    # the state, in each its own
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def of_all_processes(state: Any) -> list[Any]:
    """The JSON values of all processes, in order, in each of them."""
    if jax.process_count() == 1:
        return [state]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(row[:n].tobytes()) for row, n in zip(texts, lengths, strict=True)]


def of_this_process(saved: Mapping[str, Any] | None, step: int) -> Any:
    """This process's own of those saved with checkpoint `step`.

    Raises:
        ValueError: it is damaged, or of another number of processes, and the source is not Grain's `ElasticIterator`.
    """
    states = saved.get("processes") if isinstance(saved, Mapping) else []
    if not isinstance(states, list):
        raise ValueError(
            f"Checkpoint {step}: expected a list of the input's states at input/processes, got {states!r:.200}. It is "
            "damaged: restore another step, or without batches, and set the source up yourself."
        )
    if len(states) == jax.process_count():
        return states[jax.process_index()]
    if states and all(_is_of_all(state) and state["source"] == states[0]["source"] for state in states):
        return {**states[0], "rows": None}  # of a batch of this process, which are as many as they are now
    raise ValueError(
        f"Checkpoint {step} has the input's state of {len(states)} processes, and there are {jax.process_count()}. "
        "Grain's grain.experimental.ElasticIterator goes on with any number; with other sources restore without "
        "batches, and set the source up yourself."
    )


def _is_of_all(state: Any) -> bool:
    """Whether it is a state of Grain's `ElasticIterator`, which counts the examples of all processes together."""
    own = state.get("source") if isinstance(state, Mapping) else None
    return isinstance(own, Mapping) and set(own) == {"global_next_index"}
