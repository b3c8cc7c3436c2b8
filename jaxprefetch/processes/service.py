"""The key-value store of `jax.distributed`, which the coordination service keeps in process 0.

Synopsis:

    service = Service.find()                 # None: this JAX does not offer it
    service.set_once("run/verdict", "go")    # True for the first that does so
    service.wait("run/verdict", seconds=1)   # "go"; None when nobody has set it within that time

Its client is private API of JAX (seen in 0.9.0 to 0.12.0) and stands in this file only; what to do without it is in
`gathered.py`. Each call is one request to the service, during which the interpreter's lock is free.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

NEEDED = (
    "key_value_set",
    "key_value_try_get",
    "blocking_key_value_get",
    "key_value_increment",
    "key_value_dir_get",
    "key_value_delete",
)


class Service:
    """Keys and values as text. Thread safety: any thread.

    Raises:
        RuntimeError: from every method, when the service cannot be reached.
    """

    def __init__(self, client: Any):
        self._client = client

    @staticmethod
    def find() -> Service | None:
        """The service of this program; None where there is none or its client lacks something."""
        try:
            from jax._src.distributed import global_state

            client = global_state.client
        except (ImportError, AttributeError):
            return None
        return Service(client) if all(callable(getattr(client, name, None)) for name in NEEDED) else None

    def set(self, key: str, value: str) -> None:
        """Writes, over what was there."""
        self._client.key_value_set(key, value, allow_overwrite=True)

    def set_once(self, key: str, value: str) -> bool:
        """Writes unless something is there; whether it did."""
        try:
            self._client.key_value_set(key, value)
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    def get(self, key: str) -> str | None:
        """What is there now."""
        try:
            return self._client.key_value_try_get(key)
        except RuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None

    def wait(self, key: str, seconds: float) -> str | None:
        """What is there, as soon as something is. Blocking: so many seconds at most."""
        try:
            return self._client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def add(self, key: str, amount: int, into: MutableMapping[str, int]) -> int:
        """Adds to a number of 32 bits that begins at 0 and returns it, which is noted in `into`.

        Once: in one call of C's, so that no Ctrl-C comes between the adding and the note; not again if it is noted.
        """
        if key not in into:
            into.update(zip([key], map(self._client.key_value_increment, [key], [amount]), strict=True))
        return into[key]

    def under(self, folder: str) -> dict[str, str]:
        """What is in a folder of keys, by the last part of the key."""
        return {os.path.basename(key): value for key, value in self._client.key_value_dir_get(folder + "/")}

    def delete(self, folder: str) -> None:
        """Deletes a key and all that is in the folder of that name."""
        self._client.key_value_delete(folder)
