"""What was made lately and may be needed again, and no more of it than that.

Synopsis:

    layouts = Recent()
    layout = layouts.get(key, make=lambda: Layout(...))   # made once, as long as the key is in use
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

KEPT = 64
"""More kinds of batches than a loop takes turns with: each means a compiled step."""


class Recent(Generic[K, V]):
    """Values by key; the one whose use is longest ago makes room for a new one. Used by one thread at a time.

    Keys are compared, the one used last first, and never hashed: in a steady loop one comparison settles it, and the
    hash of a JAX treedef leaves out static fields, so that those of all batches can be the same (seen in jax 0.12).
    """

    def __init__(self) -> None:
        self._entries: list[tuple[K, V]] = []  # the one used last comes first

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of this key, made if it is not at hand; where `make` raises, nothing has changed."""
        for i, (known, value) in enumerate(self._entries):
            if known == key:
                if i:
                    self._entries.insert(0, self._entries.pop(i))
                return value
        value = make()
        self._entries.insert(0, (key, value))
        del self._entries[KEPT:]
        return value
