"""How a share of a batch is cut into micro-batches, and how the size that fits is found.

The size found is a number that all workers have in common where they step together: what changes it, that somebody's
memory did not suffice and that a batch has gone well, all of them hear of at the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Size = int | Literal["auto"] | None  # as `prepare` is given it: the most samples, or they are found, or no cuts

_PATIENCE = 100  # steps without trouble, after which a larger size is tried
_EXCEPTIONS = 3  # batches in this time that may need a smaller size than the others before it is all batches'


class MicroBatch(NamedTuple):
    """One worker's samples that are computed at once."""

    samples: Any
    own: int  # how many of them count: none of a borrowed one
    total: int  # those of all workers
    left: int  # micro-batches of the same batch still to come
    largest: int  # samples of the largest micro-batch of the batch, of any worker


def parts(shares: Sequence[int], most: int | None, *, first: int = 0) -> list[list[int]]:
    """Cut every worker's share into as many parts as the largest needs: by part, the samples of each worker.

    first: so many samples of each are a part before the others; 0: there is no such part.
    """
    if first and max(shares) > first:
        few = [min(share, first) for share in shares]
        return [few, *parts([share - n for share, n in zip(shares, few, strict=True)], most)]
    count = 1 if most is None else -(-max(shares) // most)
    return [[share // count + (j < share % count) for share in shares] for j in range(count)]


class MicroBatchSize:
    """The most samples of a micro-batch. None: a share is computed as a whole.

    With "auto" it begins with whole shares. What does not fit is halved. A size that has fitted before stays, and
    only the batch that did not fit (a longer sequence) is cut finer, up to three of them; then all are. After a
    hundred steps without trouble twice as much is tried, because what took the memory (another program, those
    sequences) may be gone; each attempt waits twice as long as the one before.
    """

    def __init__(self, given: Size = None, *, first: int = 0) -> None:
        """first: samples of the first micro-batch of all, from which a layout learns the way through the model."""
        self._first, self._first_at = first, -1
        self.cuts, self.adapts = given is not None, given == "auto"
        self.most = given if isinstance(given, int) else None
        self._begun = False  # the first loop has
        self._fits = False  # a batch has gone well with it
        self._exception: int | None = None  # the size for batches ...
        self._until = -1  # ... up to this one
        self._exceptions = self._calm = 0
        self._patience = _PATIENCE

    def of(self, k: int) -> int | None:
        """The size for batch k of the epoch in progress."""
        return self._exception if k <= self._until else self.most

    def first(self, k: int) -> int:
        """The samples of a micro-batch with which batch k begins, before the others; mostly there is none."""
        return self._first if k == self._first_at else 0

    def begin(self, k: int) -> None:
        """A loop begins at batch k of an epoch: batches are counted anew."""
        self._until = -1
        self._first_at = -1 if self._begun else k
        self._begun = True

    def too_large(self, first: int, last: int, largest: int) -> int:
        """Batches `first` to `last`, in micro-batches of up to `largest` samples, did not fit. Gives a smaller size."""
        smaller = -(-largest // 2)
        self._calm = 0
        if first > self._until:
            self._exceptions += self._fits
        if self._fits and self._exceptions <= _EXCEPTIONS:
            self._exception, self._until = smaller, last
        else:
            self.most, self._until, self._fits, self._exceptions = smaller, -1, False, 0
        return smaller

    def fitted(self, *, whole: bool) -> bool:
        """A step has gone well. whole: in one part. Gives: is another size tried now?"""
        self._fits = True
        self._calm += 1
        if not self.adapts or self._calm < self._patience:
            return False
        self._calm = self._exceptions = 0
        if self.most is None or whole:
            return False
        self.most, self._fits = self.most * 2, False
        self._patience *= 2
        return True
