"""Which sample goes to which worker, and the proof that each went exactly once.

An epoch is one order of sample indices, cut into global batches. The cut does not depend on the number of
workers, so one, two or four of them walk through the same global batches; only the share of each differs.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.parts import Balance, Comm

_63_BITS = 2**63 - 1
_FOLD = 64  # batches hashed together: a call costs much more than the few indices of one batch
_ENDLESS = 10  # a sampler that gives more than its length, and each sample this often, does not mean to stop


# ------------------------------------------------------------------------------------------------ the epoch


@dataclass(frozen=True)
class Epoch:
    """One epoch's sample indices in their order, and where each global batch starts."""

    indices: Tensor  # int64; what drop_last drops is already gone
    starts: Sequence[int]

    @classmethod
    def even(cls, indices: Tensor, size: int, drop_last: bool) -> Epoch:
        used = len(indices) - len(indices) % size if drop_last else len(indices)
        return cls(indices[:used], range(0, used, size))

    @classmethod
    def ragged(cls, indices: Tensor, sizes: Tensor, together: int = 1) -> Epoch:
        """Batches of the sizes given, `together` neighbours making one global batch."""
        return cls(indices, (sizes.cumsum(0) - sizes)[::together].tolist())

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, k: int) -> Tensor:
        return self.indices[self.starts[k] : self.starts[k + 1] if k + 1 < len(self) else None]

    def sizes(self) -> Tensor:
        return torch.tensor([*self.starts, len(self.indices)]).diff()

    def split(self, k: int) -> tuple[Tensor, Tensor]:
        """What belongs to the batches before k, and what to k and those after it."""
        at = self.starts[k] if k < len(self) else len(self.indices)
        return self.indices[:at], self.indices[at:]


def mixed(*numbers: int) -> int:
    """A seed made of a seed, an epoch, a rank: neighbours must not share random numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**63
    return seed


def length(sized: Any) -> int | None:
    """len() where there is one: a sampler may have the method and still not know."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


class Drawn(NamedTuple):
    """What a user's sampler gave for one epoch; sizes where it cuts the batches itself."""

    indices: Tensor
    sizes: Tensor | None


def draw(sampler: Iterable[Any], *, ragged: bool, samples: int, comm: Comm) -> Drawn:
    """Worker 0 draws and tells the others: each worker's own sampler may well draw differently."""
    drawn, error = None, None
    if comm.rank == 0:
        try:
            drawn = _draw(sampler, ragged, samples)
        except Exception as e:  # kept until the others, who wait for the order, know that none will come
            error = e
    if comm.world > 1:
        lengths = [0 if x is None else len(x) for x in drawn] if drawn else [-1, -1]
        n, batches = comm.broadcast(torch.tensor(lengths)).wait().tolist()
        if n >= 0:
            parts = drawn or [torch.empty(n + batches, dtype=torch.int64)]
            content = comm.broadcast(torch.cat([x for x in parts if x is not None])).wait()
            drawn = Drawn(content[:n], content[n:] if ragged else None)
    if error is not None:
        raise error
    if drawn is None:
        raise DataError(
            f"worker 0 could not draw this epoch's order from {type(sampler).__name__}",
            why="its own error is in the output of worker 0",
        )
    return drawn


def _draw(sampler: Iterable[Any], ragged: bool, samples: int) -> Drawn:
    name, kind = type(sampler).__name__, "a list of whole numbers" if ragged else "a whole number"
    indices, ends = array("q"), array("q", [0])
    most, entries = max(_ENDLESS * samples, 1_000_000), length(sampler) or 0
    for entry in sampler:
        try:
            indices.extend(map(operator.index, entry) if ragged else (operator.index(entry),))
        except (TypeError, OverflowError):
            raise DataError(
                f"{name} gave {entry!r}, which is not {kind}",
                why="worker 0 sends what it draws to the other workers as 64-bit integers",
                do="let the sampler give indices, and look other keys up in the data set's __getitem__",
            ) from None
        ends.append(len(indices))
        if ends[-1] == ends[-2]:
            raise DataError(f"{name} gave an empty batch", do="leave empty batches out")
        if len(indices) > most and len(ends) > entries + 1:
            raise DataError(
                f"{name} does not end: {len(indices)} indices drawn from {samples} samples",
                why="an epoch's order is drawn as a whole, so that all workers agree on it",
                do="give it an end (itertools.islice), or a __len__ if its epochs really are that long",
            )
    if not indices:
        raise DataError(f"{name} drew no samples", why="an epoch without samples trains nothing")
    sizes = torch.frombuffer(ends, dtype=torch.int64).diff() if ragged else None
    return Drawn(torch.frombuffer(indices, dtype=torch.int64), sizes)


# ------------------------------------------------------------------------------------------------ the shares


class Shares:
    """This worker's share of a global batch."""

    def __init__(self, comm: Comm, balance: Balance) -> None:
        self.rank, self.world, self.balance = comm.rank, comm.world, balance
        self._known: dict[int, slice] = {}  # nearly all batches have the same size

    def all(self, size: int) -> list[int]:
        return self.balance.shares([1.0] * self.world, size)

    def take(self, batch: Any) -> tuple[Any, int]:
        """What this worker reads of a batch, and how many samples of it count.

        A worker whose share is empty borrows the first sample, and none counts: it must run the step like all
        others, or they would wait for it.
        """
        if len(batch) not in self._known:
            shares = self.all(len(batch))
            before = sum(shares[: self.rank])
            self._known[len(batch)] = slice(before, before + shares[self.rank])
        mine = batch[self._known[len(batch)]]
        return (mine, len(mine)) if len(mine) else (batch[:1], 0)

    def check(self, size: int) -> None:
        if size < self.world:
            raise DataError(
                f"a global batch of {size} for {self.world} workers",
                why="batch_size is the global batch, and every worker needs a sample of it",
                do=f"raise batch_size to {self.world} or more, or say batch='per_worker' to give each",
            )

    def describe(self, size: int) -> str:
        """`global batch 256 = 128 + 128 samples`; equal neighbours counted together where there are many."""
        each = self.all(size)
        runs = [(share, len(list(run))) for share, run in groupby(each)]
        if self.world == 1:
            return f"global batch {size} samples"
        if self.world <= 3:
            parts = " + ".join(map(str, each))
        elif len(runs) <= 6:
            parts = " + ".join(f"{n} x {share}" if n > 1 else str(share) for share, n in runs)
        else:
            parts = f"{self.world} workers x {min(each)} to {max(each)}"
        return f"global batch {size} = {parts} samples"


class Assignment:
    """What a DataLoader takes as its batch sampler: this worker's indices of each batch of an epoch."""

    def __init__(self, shares: Shares) -> None:
        self.shares, self.start = shares, 0
        self.epoch = Epoch(torch.empty(0, dtype=torch.int64), ())

    def take(self, k: int) -> tuple[Tensor, int]:
        indices, own = self.shares.take(self.epoch.batch(k))
        return indices, own

    def __iter__(self) -> Iterator[list[int]]:
        for k in range(self.start, len(self.epoch)):
            yield self.take(k)[0].tolist()

    def __len__(self) -> int:
        return len(self.epoch) - self.start


class ShareOfStream:
    """A collate function that keeps this worker's share of a global batch read from a stream.

    Here and not around the data set: it runs in the loader's own processes too, samples that are dropped are
    never collated, and `get_worker_info().dataset` stays the user's.
    """

    def __init__(self, shares: Shares, collate: Callable[[Any], Any]) -> None:
        self.shares, self.collate = shares, collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        mine, own = self.shares.take(samples)
        return own, self.collate(mine)


# ------------------------------------------------------------------------------------------------ the ledger


def digest(indices: Tensor) -> Tensor:
    """[how many, the sum of their hashes modulo 2^63]: the same for the same samples in any order."""
    total = torch.zeros(2, dtype=torch.int64)
    for at in range(0, len(indices), 1 << 20):  # bounds the memory
        # splitmix64. int64 wraps around in torch, and its >> drags the sign along, hence the masks.
        x = indices[at : at + (1 << 20)] - 0x61C8864680B583EB
        x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
        x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
        x = x ^ ((x >> 31) & ((1 << 33) - 1))
        total += torch.stack([torch.tensor(len(x)), x.sum()])
    return folded(total)


def folded(total: Tensor) -> Tensor:
    """A sum of digests as a digest."""
    return total & _63_BITS


class Ledger:
    """The digest of the samples this worker has been handed in an epoch."""

    def __init__(self) -> None:
        self._past = torch.zeros(2, dtype=torch.int64)
        self._open: list[Tensor] = []

    def add(self, indices: Tensor) -> None:
        self._open.append(indices)
        if len(self._open) == _FOLD:
            self.digest()

    def digest(self) -> Tensor:
        if self._open:
            self._past = folded(self._past + digest(torch.cat(self._open)))
            self._open.clear()
        return self._past.clone()
