"""Which sample goes to which worker, and the proof that each went exactly once.

An epoch is one order of sample indices, cut into global batches. The cut does not depend on the number of
workers, so one, two or four of them walk through the same global batches; only the share of each differs.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.protocol import Comm
from paceline.core.parts import Balance, Speed
from paceline.data.micro_batches import MicroBatch, MicroBatchSize, parts
from paceline.data.random_streams import SideStreams
from paceline.data.schedule import Schedule
from paceline.errors import DataError, UsageError

_63_BITS = 2**63 - 1
_FOLD = 64  # batches hashed together: a call costs much more than the few indices of one batch
_WHOLE = 10  # an epoch that gives each sample this often is drawn as a whole
_STRETCH = 1 << 18  # indices drawn at once of an epoch that is not drawn as a whole
SAVED = 2**53  # whole numbers below it are what they are for every reader of JSON
READ_AHEAD = 256  # batches that are drawn at least, beyond the one handed out


# ------------------------------------------------------------------------------------------------ the epoch


@dataclass(frozen=True)
class Epoch:
    """One epoch's sample indices in their order, and where each global batch starts."""

    indices: Tensor  # int64, without the samples that drop_last drops
    starts: Sequence[int]

    @classmethod
    def even(cls, indices: Tensor, size: int, drop_last: bool) -> Epoch:
        used = len(indices) - len(indices) % size if drop_last else len(indices)
        return cls(indices[:used], range(0, used, size))

    @classmethod
    def ragged(cls, indices: Tensor, sizes: Tensor, together: int = 1) -> Epoch:
        """An epoch of batches of the sizes given; `together` consecutive ones make one global batch."""
        return cls(indices, (sizes.cumsum(0) - sizes)[::together].tolist())

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def drawn(self) -> int:
        """How many batches are known: all of them."""
        return len(self)

    @property
    def total(self) -> int | None:
        """How many batches there are."""
        return len(self)

    def reach(self, k: int) -> bool:
        """Whether there is a batch k."""
        return k < len(self)

    def batch(self, k: int) -> Tensor:
        return self.indices[self.starts[k] : self.starts[k + 1] if k + 1 < len(self) else None]

    def sizes(self) -> Tensor:
        return torch.tensor([*self.starts, len(self.indices)]).diff()

    def before(self, k: int) -> Tensor:
        """The digest of the batches before k."""
        return digest(self.indices[: self.starts[k] if k < len(self) else len(self.indices)])


class LongEpoch:
    """An epoch that is drawn while it goes on, because it is very long or has no end.

    It holds the stretch that is being handed out, the next one, and the one before, which may be dealt again. Every
    worker asks for the same batches in the same order, so all draw at the same moments.
    """

    def __init__(self, first: Epoch, more: Callable[[], Epoch | None]) -> None:
        """The function `more` draws the next stretch, or gives None at the end."""
        self._held = [(0, first)]  # stretches, each with the number of its first batch
        self._more = more
        self._past = torch.zeros(2, dtype=torch.int64)  # the digest of the stretches that are gone
        self.drawn = len(first)
        self.total: int | None = None

    def reach(self, k: int) -> bool:
        """Whether there is a batch k. What lies before its stretch is forgotten, and the one after it is drawn."""
        while self.total is None and k >= self._held[-1][0]:
            stretch = self._more()
            if stretch is None:
                self.total = self.drawn
                break
            self._held.append((self.drawn, stretch))
            self.drawn += len(stretch)
            while len(self._held) > 3 and k >= self._held[2][0]:
                self._past = folded(self._past + digest(self._held.pop(0)[1].indices))
        return k < self.drawn

    def batch(self, k: int) -> Tensor:
        first, stretch = next(held for held in reversed(self._held) if held[0] <= k)
        return stretch.batch(k - first)

    def before(self, k: int) -> Tensor:
        """The digest of the batches before k, which must not be before what is held."""
        return folded(self._past + sum(stretch.before(k - first) for first, stretch in self._held if first < k))


def mixed(*numbers: int) -> int:
    """One seed made of several numbers (a seed, an epoch, a rank), so that neighbours draw different numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**63
    return seed


def length(sized: Any) -> int | None:
    """The object's len(), or None: a sampler may have the method and still raise."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


class Drawn(NamedTuple):
    """What a user's sampler gave."""

    indices: Tensor
    sizes: Tensor | None  # of the batches, if the sampler makes them itself
    ended: bool  # it has no more to give


class Drawer:
    """A user's sampler. Worker 0 draws it for all, because each worker's own might draw another order.

    ragged: it gives batches, lists of indices. together: how many of its batches make one global batch.
    """

    def __init__(self, sampler: Iterable[Any], comm: Comm, *, size: int | None, together: int, samples: int) -> None:
        """Begin an epoch. size: of a global batch; None where the sampler gives batches itself."""
        self.sampler, self.comm, self.ragged = sampler, comm, size is None
        self.unit = size or together  # entries to a global batch
        self._entries: Iterator[Any] | None = None
        self._any = False
        known = length(sampler)
        whole = known is not None and known <= max(_WHOLE * samples, 4 * _STRETCH)
        self._next = -(-(known + 1) // self.unit) * self.unit if known is not None and whole else self._stretch()

    def _stretch(self) -> int:
        each = 1 if self.ragged else self.unit
        return self.unit * max(READ_AHEAD, _STRETCH // each // (256 if self.ragged else 1))

    def draw(self) -> Drawn:
        """Draw an epoch of ordinary length as a whole, or else the next stretch of it. Every worker calls it."""
        most, self._next = self._next, self._stretch()
        drawn, error = None, None
        if self.comm.rank == 0:
            try:
                drawn = self._draw(most)
            except Exception as e:  # raised below, after the workers that wait for the order were told
                error = e
        if self.comm.world_size > 1:
            head = [-1, -1, 1]
            if drawn is not None:
                head = [len(drawn.indices), 0 if drawn.sizes is None else len(drawn.sizes), int(drawn.ended)]
            n, batches, ended = self.comm.broadcast(torch.tensor(head)).wait().tolist()
            if n > 0:
                parts = [x for x in drawn[:2] if x is not None] if drawn else []
                content = torch.cat(parts) if parts else torch.empty(n + batches, dtype=torch.int64)
                content = self.comm.broadcast(content).wait()
                drawn = Drawn(content[:n], content[n:] if self.ragged else None, bool(ended))
            elif n == 0:
                drawn = Drawn(torch.empty(0, dtype=torch.int64), None, True)
        if error is not None:
            raise error
        if drawn is None:
            raise DataError(
                f"worker 0 could not draw this epoch's order from {type(self.sampler).__name__}",
                why="its own error is in the output of worker 0",
            )
        return drawn

    def _draw(self, most: int) -> Drawn:
        name = type(self.sampler).__name__
        kind = "a list of whole numbers" if self.ragged else "a whole number"
        if self._entries is None:
            self._entries = iter(self.sampler)
        indices, ends = array("q"), array("q", [0])
        for entry in itertools.islice(self._entries, most):
            try:
                indices.extend(map(operator.index, entry) if self.ragged else (operator.index(entry),))
            except (TypeError, OverflowError):
                raise DataError(
                    f"{name} gave {entry!r}, which is not {kind}",
                    why="worker 0 sends what it draws to the other workers as 64-bit integers",
                    do="let the sampler give indices, and look other keys up in the data set's __getitem__",
                ) from None
            ends.append(len(indices))
            if ends[-1] == ends[-2]:
                raise DataError(f"{name} gave an empty batch", do="leave empty batches out")
        if not indices and not self._any:
            raise DataError(f"{name} drew no samples", why="an epoch without samples trains nothing")
        self._any = True
        if not indices:
            return Drawn(torch.empty(0, dtype=torch.int64), None, ended=True)
        sizes = torch.frombuffer(ends, dtype=torch.int64).diff() if self.ragged else None
        return Drawn(torch.frombuffer(indices, dtype=torch.int64), sizes, len(ends) - 1 < most)


# ------------------------------------------------------------------------------------------------ the shares


class Shares:
    """This worker's share of a global batch."""

    def __init__(self, group: Group, balance: Balance) -> None:
        self.group, self.balance = group, balance
        self.schedule = Schedule()
        self._known: dict[tuple[int, int], list[int]] = {}  # nearly all batches have the same size

    def __getstate__(self) -> dict[str, Any]:
        """A process of a loader that is not forked gets the place in the group, and none of its connections."""
        return self.__dict__ | {"group": SimpleNamespace(rank=self.group.rank, world_size=self.group.world_size)}

    def all(self, size: int, speeds: Sequence[Speed] = ()) -> list[int]:
        """Every worker's share of a batch. speeds: of these workers; any others are as good as none."""
        world_size = self.group.world_size
        return self.balance.shares(speeds if len(speeds) == world_size else [Speed()] * world_size, size)

    def take(self, batch: Any, k: int) -> tuple[Any, int]:
        """This worker's samples of batch k of the epoch, and how many of them count.

        A worker whose share is empty borrows the first sample of the batch, which does not count: it must run the
        step like the others, or they would wait for it.
        """
        shares = self.of(k, len(batch))
        before = sum(shares[: self.group.rank])
        mine = batch[before : before + shares[self.group.rank]]
        return (mine, len(mine)) if len(mine) else (batch[:1], 0)

    def of(self, k: int, size: int) -> list[int]:
        """All workers' shares of batch k, which has so many samples."""
        version, speeds = self.schedule.of(k)
        if (version, size) not in self._known:
            self._known[version, size] = self.all(size, speeds)
        return self._known[version, size]

    def cut(self, batch: Any, k: int, most: int | None, *, first: int = 0) -> list[MicroBatch]:
        """This worker's samples of batch k, in micro-batches of at most so many; None: all at once.

        Every worker has the same number of them. Where one of them is empty it borrows a sample, which does not count.
        """
        mine, own = self.take(batch, k)
        shares = self.of(k, len(batch))
        if not first and (most is None or max(shares) <= most):
            return [MicroBatch(mine, own, len(batch), 0, max(shares))]
        each = parts(shares, most, first=first)
        found, begin, largest = [], 0, max(max(sizes) for sizes in each)
        for j, sizes in enumerate(each):
            n = sizes[self.group.rank]
            samples = mine[begin : begin + n] if n else batch[:1]
            found.append(MicroBatch(samples, n, sum(sizes), len(each) - 1 - j, largest))
            begin += n
        return found

    def check(self, size: int) -> None:
        if size < self.group.world_size:
            raise DataError(
                f"a global batch of {size} for {self.group.world_size} workers",
                why="batch_size is the global batch, and every worker needs a sample of it",
                do=f"raise batch_size to {self.group.world_size} or more, or say batch='per_worker' to give each",
            )

    def describe(self, size: int, speeds: Sequence[Speed] = ()) -> str:
        """A text such as `global batch 256 = 128 + 128 samples`; many equal shares are counted together."""
        each = self.all(size, speeds)
        runs = [(share, len(list(run))) for share, run in groupby(each)]
        if self.group.world_size == 1:
            return f"global batch {size} samples"
        if self.group.world_size <= 3:
            parts = " + ".join(map(str, each))
        elif len(runs) <= 6:
            parts = " + ".join(f"{n} x {share}" if n > 1 else str(share) for share, n in runs)
        else:
            parts = f"{self.group.world_size} workers x {min(each)} to {max(each)}"
        return f"global batch {size} = {parts} samples"


class Assignment:
    """A DataLoader's batch sampler: this worker's indices of each batch of an epoch, or of its micro-batches."""

    def __init__(self, shares: Shares, size: MicroBatchSize) -> None:
        self.shares, self.size, self.start = shares, size, 0
        self.epoch: Epoch | LongEpoch = Epoch(torch.empty(0, dtype=torch.int64), ())

    def take(self, k: int) -> list[MicroBatch]:
        """This worker's part of batch k."""
        return self.shares.cut(self.epoch.batch(k), k, self.size.of(k), first=self.size.first(k))

    def __iter__(self) -> Iterator[list[int]]:
        k = self.start
        while k < self.epoch.drawn:
            for micro_batch in self.take(k):
                yield micro_batch.samples.tolist()
            k += 1
        if self.epoch.total is None:
            raise UsageError(
                f"the loader's processes read more than {READ_AHEAD} batches ahead",
                why="the order of a very long epoch is drawn in stretches, and only so far ahead",
                do=f"choose num_workers and prefetch_factor so that their product is below {READ_AHEAD}",
            )


class ShareOfStream:
    """A collate function that keeps this worker's share of a global batch read from a stream.

    A collate function rather than a wrapper of the data set: it also runs in the loader's own processes, dropped
    samples are never collated, and `get_worker_info().dataset` stays the user's.
    """

    def __init__(self, shares: Shares, collate: Callable[[Any], Any]) -> None:
        self.shares, self.collate = shares, collate
        self.read = 0  # batches of this epoch, where it is read in the training process
        self._streams: SideStreams | None = None  # of this worker's collate, in the process that calls it

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        mine, own = self.shares.take(samples, self.read)
        self.read += 1
        if self.shares.group.world_size == 1:
            return own, self.collate(mine)
        # Whatever number of samples it draws for, the stream that all workers read alike stays where it is.
        self._streams = self._streams or SideStreams(torch.initial_seed(), self.shares.group.rank)
        with self._streams.entered():
            return own, self.collate(mine)


# ------------------------------------------------------------------------------------------------ the ledger


def digest(indices: Tensor) -> Tensor:
    """The number of samples and the sum of their hashes modulo 2^63, which do not depend on their order."""
    total = torch.zeros(2, dtype=torch.int64)
    for at in range(0, len(indices), 1 << 20):  # a million at a time, to bound the memory
        # splitmix64. int64 wraps around in torch, and its >> copies the sign bit, hence the masks.
        x = indices[at : at + (1 << 20)] - 0x61C8864680B583EB
        x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
        x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
        x = x ^ ((x >> 31) & ((1 << 33) - 1))
        total += torch.stack([torch.tensor(len(x)), x.sum()])
    return folded(total)


def mark(total: Tensor) -> int:
    """The hash of a digest, as a number that a saved state can hold."""
    return int(total[1]) % SAVED


def folded(total: Tensor) -> Tensor:
    """The digest of all samples, from a sum of digests of some of them."""
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

    def remove(self, indices: Tensor) -> None:
        """Forget samples that are going to be handed out again."""
        self._past = folded(self.digest() - digest(indices))
