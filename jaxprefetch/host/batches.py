"""Batches of single samples: stacked into fresh arrays, or into memory that is given.

Synopsis:

    batches = Batches(iter(samples), batch_size=32, drop_last=False)
    next(batches)                                   # a batch of its own
    batches.element_spec; batches.read_into(out)    # the next one, written into `out`
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxprefetch.errors import WithoutOptions
from jaxprefetch.host.copying import Copier
from jaxprefetch.host.source import close_iterator
from jaxprefetch.host.stacking import are_one, sample_spec, stack

logger = logging.getLogger("jaxprefetch")


class Batches:
    """An iterator of batches that can write them where they are to be.

    Attributes:
        pulls_from: the iterator that does the work in the end: a generator has to be treated as one.
    """

    def __init__(self, samples: Iterator[Any], batch_size: int, drop_last: bool):
        self._source = samples
        self.pulls_from = getattr(samples, "pulls_from", samples)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._copier = Copier()
        self._samples: list[Any] = []  # of batch `_number`, as far as they are pulled
        self._number = 0
        self._ended = False

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        """The next batch, in arrays of its own. Blocking: in `samples`.

        Raises:
            ValueError, TypeError: samples that cannot be stacked.
        """
        self._pull(self._batch_size)
        if not self._rows():
            raise StopIteration
        out = jax.tree_util.tree_map(lambda spec: np.empty(spec.shape, spec.dtype), self._spec(self._rows()))
        self.read_into(out)
        return out

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of the next batch if it is a whole one, by its first sample. Blocking: in `samples`.

        Raises:
            StopIteration: there is none.
            TypeError: a leaf of the sample has no place in an array.
            ValueError: the sample has no leaf.
        """
        self._pull(1)
        if not self._samples:
            raise StopIteration
        return self._spec(self._batch_size)

    def read_into(self, out: Any) -> int:
        """Writes the next batch into these arrays and returns its rows, 0 at the end. Blocking: in `samples`.

        Raises:
            ValueError, TypeError: samples that cannot be stacked.
        """
        self._pull(self._batch_size)
        rows = self._rows()
        if rows:
            if not self._number and are_one(self._samples):
                logger.warning(
                    "jaxprefetch: all %d samples of batch 0 are the same arrays, so its rows are equal. A source that "
                    "fills one buffer again and again has to yield copies.",
                    len(self._samples),
                )
            with WithoutOptions():
                stack(self._samples, out, where=f"Batch {self._number}", copier=self._copier)
        number = self._number + 1
        self._samples, self._number = [], number  # and return: no interrupt comes between these in CPython
        return rows

    def close(self) -> None:
        """Closes the iterator of samples."""
        close_iterator(self._source)

    def _rows(self) -> int:
        n = len(self._samples)
        return 0 if self._drop_last and n < self._batch_size else n

    @WithoutOptions()
    def _spec(self, rows: int) -> Any:
        where = f"Batch {self._number}"
        spec = sample_spec(self._samples[0], where=where)
        if not jax.tree_util.tree_leaves(spec):
            raise ValueError(
                f"{where}, sample 0: it has no leaf (None counts as none). Yield samples of arrays or numbers."
            )
        return jax.tree_util.tree_map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype), spec)

    def _pull(self, n: int) -> None:
        """Goes on until there are so many samples, or no more: what an interrupt leaves here is not lost."""
        if not self._ended and (missing := n - len(self._samples)) > 0:
            self._samples.extend(itertools.islice(self._source, missing))
            self._ended = len(self._samples) < n
