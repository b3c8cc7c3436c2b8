"""`fetch_to_host`: what steps leave on the devices becomes NumPy arrays, while later steps run.

Synopsis:

    predictions = np.lib.format.open_memmap("predictions.npy", "w+", np.float32, (rows, classes))
    start = 0
    for logits in fetch_to_host(predict(params, batch) for batch in batches):
        predictions[start : start + len(logits)] = logits
        start += len(logits)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

import jax
import numpy as np

from jaxprefetch.arguments import integer, parse_bytes
from jaxprefetch.device.fetch import LocalPart, local_part, start, to_host
from jaxprefetch.errors import add_note, typed
from jaxprefetch.host.copying import Copier
from jaxprefetch.host.leaves import is_key, leaf_paths
from jaxprefetch.host.source import close_iterator

T = TypeVar("T")


def fetch_to_host(outputs: Iterable[T], size: int = 4, *, max_bytes: int | str | None = None) -> HostFetcher[T]:
    """The outputs as NumPy arrays, in order, copied while later steps run.

    Before a result is waited for, the next outputs are taken from the iterator, which dispatches their steps, and their
    copies are queued behind these. So nothing stalls as long as the link keeps up. There is no thread.

    Args:
        outputs: an iterable of pytrees, such as a generator that runs a step for each batch. Leaves that are no
            `jax.Array` are handed on as they are. An array may be deleted or donated as soon as the iterator is asked
            for the next.
        size: outputs on their way at most; 1 waits for each before the next step is asked for. For a moment there
            may be one more on the devices, whose memory JAX gives back just after its copy is done.
        max_bytes: the most bytes of outputs on their way, in host memory and so on the devices together (`2 << 30` or
            `"2GiB"`); one always gets through. One more output may wait on the devices for its turn.

    Returns:
        An iterator and context manager. Arrays are read-only, like those of `jax.device_get`. One that lies on one
        device, or is the same on all, is handed out where it landed, without another copy: in pinned memory, which it
        keeps as long as it lives, so copy what is to be kept for long. Shards are put together in memory of their own.
        Of a global array that is spread over several processes each gets its own rows, `(local_batch, ...)`.

    Raises:
        ValueError: `size` or `max_bytes` is not what it should be.
        TypeError: `outputs` cannot be iterated, or is one output (a dict, an array), which goes into a list.

    Blocking: never; `outputs` is asked for nothing before the first `next()`.
    """
    size, most = integer("size", size, 1), parse_bytes("max_bytes", max_bytes)
    kind = type(outputs).__name__
    if isinstance(outputs, (Mapping, np.ndarray, jax.Array)):
        raise TypeError(
            f"outputs: expected an iterable of pytrees, got {kind}, which is one of them. Pass an iterator of pytrees; "
            "a single one goes into a list, [outputs]."
        )
    if isinstance(outputs, (str, bytes)) or not any(hasattr(outputs, name) for name in ("__iter__", "__getitem__")):
        raise TypeError(f"outputs: expected an iterable of pytrees, got {typed(outputs)}.")
    return HostFetcher(iter(outputs), size, most)


@dataclass(frozen=True, slots=True)
class _Output:
    """What one step has left, taken apart."""

    number: int
    treedef: Any
    leaves: list[Any]
    arrays: tuple[int, ...]
    parts: tuple[LocalPart, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """An output, and the copies of its arrays in the place of these."""

    output: _Output  # without its arrays, whose memory is free when the copies are done
    copies: list[list[jax.Array]]


class HostFetcher(Generic[T]):
    """What `fetch_to_host` returns: an iterator of results in host memory, and a context manager.

    Thread safety: one thread at a time.
    """

    def __init__(self, outputs: Iterator[T], size: int, max_bytes: int | None):
        self._outputs = outputs
        self._size = size
        self._max_bytes = max_bytes
        self._copier = Copier()
        # An output goes from one of these to the next by one assignment, which nothing is called in: a Ctrl-C strikes
        # before it or after it, and what came before is done again.
        self._pulled: list[Any] = []  # at most one: what has been taken from the iterator
        self._next: _Output | None = None  # the same, once it is taken apart
        self._on_their_way: tuple[_OnItsWay, ...] = ()
        self._count = 0  # outputs whose copies have been started
        self._ended = False
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next result.

        Blocking: for the iterator, and until the copy is done. A Ctrl-C in these waits loses nothing.

        Raises:
            StopIteration: the outputs have ended, or `close()` was called.
            TypeError, ValueError: an output cannot go to the host; after the results before it, as the iterator's own.
            Exception: what the iterator raised, or a step whose failure shows only now; the same again at every later
                call.
        """
        self._fill()
        if not self._on_their_way:
            self._raise_end()
        try:
            result = self._put_together(self._on_their_way[0])
        except Exception as error:
            number = self._on_their_way[0].output.number
            add_note(error, f"jaxprefetch: raised while result {number} was on its way to the host")
            self._fail(error)
            self._on_their_way = ()
            raise
        self._on_their_way = self._on_their_way[1:]
        return result

    def __enter__(self) -> HostFetcher[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Drops what was not handed out and closes the outputs' iterator. Results keep their memory.

        Raises:
            Exception: what closing the iterator raises.

        Blocking: in the iterator's `close()`, as long as that takes.
        """
        self._ended, self._error, self._traceback = True, None, None
        self._pulled, self._next, self._on_their_way = [], None, ()
        outputs, self._outputs = self._outputs, iter(())
        close_iterator(outputs)

    def _fill(self) -> None:
        """Takes outputs and starts their copies, as many as may be on their way."""
        while not self._ended and len(self._on_their_way) < self._size:
            try:
                output = self._next or self._pull()
                if output is None or (self._on_their_way and not self._has_room(output)):
                    return
                self._start(output)
            except Exception as error:
                self._fail(error)

    def _pull(self) -> _Output | None:
        """Takes the next output and takes it apart; None at the end."""
        if not self._pulled:
            try:
                self._pulled.extend(itertools.islice(self._outputs, 1))  # in one call of C's: no Ctrl-C between
            except Exception as error:
                add_note(error, f"jaxprefetch: raised by the outputs' iterator while it made result {self._count}")
                raise
        if not self._pulled:
            self._ended = True
            return None
        output = _apart(self._pulled[0], self._count)
        self._next, self._pulled = output, []
        return output

    def _has_room(self, output: _Output) -> bool:
        if self._max_bytes is None:
            return True
        return sum(item.output.nbytes for item in self._on_their_way) + output.nbytes <= self._max_bytes

    def _start(self, output: _Output) -> None:
        copies = start([output.leaves[i] for i in output.arrays], output.parts)
        leaves = list(output.leaves)
        for i in output.arrays:
            leaves[i] = None
        item = _OnItsWay(dataclasses.replace(output, leaves=leaves), copies)
        self._count = output.number + 1
        self._on_their_way, self._next = (*self._on_their_way, item), None

    def _put_together(self, item: _OnItsWay) -> T:
        output, leaves = item.output, list(item.output.leaves)
        for i, part, copies in zip(output.arrays, output.parts, item.copies, strict=True):
            pieces = [to_host(copy) for copy in copies]
            leaves[i] = pieces[0] if len(pieces) == 1 else self._joined(part, pieces)
        return jax.tree_util.tree_unflatten(output.treedef, leaves)

    def _joined(self, part: LocalPart, pieces: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.empty(part.shape, pieces[0].dtype)
        self._copier.copy([(whole[place], piece) for place, piece in zip(part.places, pieces, strict=True)])
        whole.flags.writeable = False  # as all the others
        return whole

    def _fail(self, error: BaseException) -> None:
        self._ended, self._error, self._traceback = True, error, error.__traceback__
        self._pulled, self._next = [], None

    def _raise_end(self) -> NoReturn:
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # it does not grow each time
        raise StopIteration


def _apart(output: Any, number: int) -> _Output:
    """The output's leaves, and what this process has of its arrays.

    Raises:
        TypeError, ValueError: an array cannot go to the host; names the result and the leaf.
    """
    leaves, treedef = jax.tree_util.tree_flatten(output)
    arrays = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array))
    parts, nbytes = [], 0
    for i in arrays:
        leaf = leaves[i]
        if is_key(leaf) or leaf.is_deleted():
            raise _unfetchable(leaf, f"Result {number}, leaf {leaf_paths(output)[i]}")
        try:
            part = local_part(leaf.sharding, leaf.shape)
        except ValueError as error:
            raise ValueError(
                f"Result {number}, leaf {leaf_paths(output)[i]}: {error}. Let jit's out_shardings give each process a "
                "block of it."
            ) from None
        parts.append(part)
        nbytes += part.nbytes(leaf.dtype.itemsize)
    return _Output(number, treedef, leaves, arrays, tuple(parts), nbytes)


def _unfetchable(leaf: jax.Array, where: str) -> Exception:
    if is_key(leaf):
        return TypeError(
            f"{where}: a typed PRNG key has no host form. Yield jax.random.key_data(key), and wrap it again with "
            "jax.random.wrap_key_data."
        )
    return ValueError(
        f"{where}: this array has been deleted or donated. Yield outputs before a step that donates them is called."
    )
