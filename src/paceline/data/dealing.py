"""Micro-batches for workers that take as many as they can: each sample once an epoch, which all end together.

[Note: dealing] An epoch's order is cut into micro-batches. Each worker has a list of them, at first every W-th, and
takes from its front. When a round ends all workers hear how many each has taken (open_window.py), and so all know the
rest of every list. They even it out alike: from the tails of those who would need longer, micro-batches move to the
others, in proportion to how many each takes in a round. Nothing more is asked of anyone for that. It depends on what
was taken and not on when, and the position in an epoch is the same on every worker, so that it can be saved. What a
loader's processes may be reading already does not move.

A worker whose list has come to its end before the others' goes on with them without weight, with its last batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.core.parts import Balance
from paceline.data.micro_batches import MicroBatchSize
from paceline.data.sampling import Drawn, Epoch, Ledger, digest, folded, mark, mixed
from paceline.data.sources import DealtBatch, DealtBatches, Habit, Indexed, chosen, rebuilt, whole_numbers
from paceline.errors import DataError, UsageError

MicroBatchRule = Callable[[int, int], int]  # the samples of a micro-batch, from those of a batch and the world size


class Deal:
    """Who takes which micro-batches of an epoch, equal on all workers: [Note: dealing]."""

    def __init__(self, numbers: Sequence[int], world_size: int, ahead: int) -> None:
        """ahead: so many that a worker has not taken yet may be on their way to it, and stay with it."""
        self.lists = [list(numbers[rank::world_size]) for rank in range(world_size)]
        self.taken = [0] * world_size
        self._pace = [0.0] * world_size  # micro-batches that each takes in a round
        self._ahead = ahead

    def rest(self, rank: int) -> int:
        """How many this worker has not taken yet."""
        return len(self.lists[rank]) - self.taken[rank]

    def left(self) -> list[int]:
        """The numbers that no worker has taken yet."""
        return sorted(k for mine, taken in zip(self.lists, self.taken, strict=True) for k in mine[taken:])

    def advance(self, taken: Sequence[int]) -> None:
        """So many has each worker taken by now."""
        if list(taken) == self.taken:
            return
        for rank, (now, before) in enumerate(zip(taken, self.taken, strict=True)):
            self._pace[rank] = (self._pace[rank] + now - before) / 2 if before else float(now - before)
        self.taken = list(taken)
        self._even_out()

    def _even_out(self) -> None:
        going = [rank for rank in range(len(self.lists)) if self.rest(rank)]  # who has come to the end stays there
        pace = sum(self._pace[rank] for rank in going)
        if not pace:
            return
        rest = sum(self.rest(rank) for rank in going)
        due = {rank: rest * self._pace[rank] / pace for rank in going}
        spare: list[int] = []
        for rank in going:
            stays = max(math.ceil(due[rank]), self._ahead, 1)
            spare += (self.lists[rank].pop() for _ in range(self.rest(rank) - stays))
        for number in sorted(spare):
            self.lists[max(going, key=lambda rank: due[rank] - self.rest(rank))].append(number)


class DealtOut(Indexed):
    """A map-style data set in micro-batches, of which every worker takes what it has time for."""

    def __init__(self, whole: Indexed, rule: MicroBatchRule) -> None:
        assert whole.size is not None
        self.asked_for = whole.size  # samples that a step should have
        self.micro = rule(whole.size, whole.group.world_size)
        super().__init__(whole.source, whole.group, whole.shares.balance, whole.batch, whole.seed, MicroBatchSize())
        self.ahead = self.source.num_workers * (self.source.prefetch_factor or 0)
        self.deal: Deal | None = None
        self.given = 0  # micro-batches handed out since the loop over this epoch began
        self.inner = rebuilt(self.source, self.generator, batch_sampler=_Reader(self))

    @property
    def size(self) -> int:
        return self.micro

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "micro": self.micro}

    def _check_size(self) -> None:
        world_size = self.group.world_size
        if world_size > 1:
            self.comm.agree("micro-batches read ahead", f"num_workers times prefetch_factor is {self.ahead}")
        if self.micro * world_size > self.asked_for:
            raise DataError(
                f"micro={self.micro} for {world_size} workers, in a batch of {self.asked_for}",
                why="every worker takes at least one micro-batch in a step",
                do=f"choose micro <= {self.asked_for // world_size}, or a larger batch_size"
                if self.asked_for >= world_size
                else f"raise batch_size to {world_size} or more",
            )

    def _check_enough(self, samples: int) -> None:
        super()._check_enough(samples)
        batches = samples // self.micro if self.source.drop_last else -(-samples // self.micro)
        if batches < self.group.world_size:
            raise DataError(
                f"{samples} samples are {batches} micro-batches of {self.micro}, for {self.group.world_size} workers",
                why="every worker needs at least one an epoch",
                do="choose a smaller micro, or more data",
            )

    def count(self) -> int | None:
        whole = super().count()
        return None if whole is None else -(-whole // self.group.world_size)

    def begin(self, epoch: int, start: int) -> tuple[DealtBatches, int | None]:
        resumed = bool(start and self.order is not None and self.deal is not None)
        order = self.order if resumed else self._ordered(epoch)
        if not isinstance(order, Epoch):
            raise UsageError(
                f"{type(self.drawer).__name__} has no end, or a very distant one",
                why="its order is drawn in stretches, and workers would come to the end of one at different times",
                do="give the sampler an end, or use a method in which all workers take a share of every batch",
            )
        self.order = order
        left = self.deal.left() if resumed and self.deal else range(len(order))
        self.deal = Deal(left, self.group.world_size, self.ahead)
        self.given, self.ledger = 0, Ledger()
        self.handed_before = folded(order.before(len(order)) - digest(_samples(order, left)))
        self.generator.manual_seed(mixed(self.seed, epoch, start, self.comm.rank))
        return self._dealt_out(order, self.deal), None

    def _dealt_out(self, order: Epoch, deal: Deal) -> DealtBatches:
        batches, mine = iter(self.inner), deal.lists[self.group.rank]
        dealt = DealtBatch(None, 0, self.asked_for, last=True)
        while True:
            if self.given < len(mine):
                dealt = self._read(batches, order.batch(mine[self.given]), last=self.given + 1 == len(mine))
                yield dealt
                continue
            if self.in_step:  # no round has ended since the last one: this loop is an evaluation
                taken = self.comm.all_gather(torch.tensor([self.given])).wait()
                deal.advance(taken.flatten().tolist())
            if not any(map(deal.rest, range(self.group.world_size))):
                break
            if self.given == len(mine):
                dealt = dealt._replace(samples=0, last=True)
                yield dealt
        yield DealtBatch(None, 0, out=True)

    def _read(self, batches: Iterator[Any], indices: Tensor, *, last: bool) -> DealtBatch:
        try:
            data = next(batches)
        except StopIteration:
            raise DataError(
                f"the data set ended after {self.given} micro-batches",
                why="its __getitem__ raised StopIteration, which the other workers cannot see",
                do="raise IndexError for an index that does not exist, and let __len__ tell the truth",
            ) from None
        self.given += 1
        self.ledger.add(indices)
        return DealtBatch(data, len(indices), self.asked_for, last, indices=indices.tolist(), number=self.given)

    @property
    def in_step(self) -> bool:
        return self.deal is not None and self.given > self.deal.taken[self.group.rank]

    def advance(self, taken: Sequence[int]) -> None:
        if self.deal is not None:
            self.deal.advance(taken)

    def save(self, handed: int) -> dict[str, Any]:
        if not handed or self.deal is None or not isinstance(self.order, Epoch):
            return {}
        left = self.deal.left()
        # The same on every worker: all micro-batches that were taken, whoever took them.
        state = {"batches": len(self.order) - len(left), "left": _runs(left)}
        state["seen"] = mark(self.order.before(len(self.order)))
        return state | ({"order": self.order.indices} if self.drawer is not None else {})

    def load(self, state: Mapping[str, Any], epoch: int, handed: int) -> None:
        self.order, self.deal = None, None
        if not handed:
            return
        drawn = None if self.drawer is None else Drawn(whole_numbers(state, "order"), None, ended=True)
        order = self._ordered(epoch) if drawn is None else self._cut(drawn)
        assert isinstance(order, Epoch)
        if state.get("seen") != mark(order.before(len(order))):
            raise DataError(
                f"the loader's state has seen={state.get('seen')!r}, and this run's epoch {epoch} has another order",
                why="its epoch was begun in another order: samples would repeat or be left out",
                do="resume with the version of torch that began it, or begin the epoch anew",
            )
        left = _unrolled(state.get("left"), len(order))
        if left is None or len(order) - len(left) != handed:
            raise DataError(
                f"the loader's state has left={state.get('left')!r} and batches={handed}, of {len(order)}",
                why="these are the micro-batches not taken yet, as beginnings and ends; here they are damaged",
            )
        self.order, self.deal = order, Deal(left, self.group.world_size, self.ahead)

    def describe(self) -> str:
        n = self.count()
        batches = "" if n is None else f", about {n} an epoch"
        return (
            f"micro-batches of {self.micro} samples, as many as each of {self.group.world_size} workers has time for"
            f"{batches}, {self.sampling}"
        )


class _Reader:
    """A DataLoader's batch sampler: the indices of this worker's micro-batches, each when it is about to be read."""

    def __init__(self, source: DealtOut) -> None:
        self.source = source
        self._given = 0

    def __iter__(self) -> Iterator[list[int]]:
        self._given = 0
        return self

    def __next__(self) -> list[int]:
        """The list may have grown since it came to its end."""
        deal, order = self.source.deal, self.source.order
        assert deal is not None
        assert order is not None
        mine = deal.lists[self.source.group.rank]
        if self._given == len(mine):
            raise StopIteration
        self._given += 1
        indices: list[int] = order.batch(mine[self._given - 1]).tolist()
        return indices


def dealt_out(source: Any, group: Group, balance: Balance, batch: Habit, seed: int, rule: MicroBatchRule) -> DealtOut:
    """The user's loader in micro-batches; a UsageError if it cannot be dealt out."""
    whole = chosen(source, group, balance, batch, seed, MicroBatchSize())
    if isinstance(whole, Indexed) and whole.size is not None:
        return DealtOut(whole, rule)
    what, why = "is a stream", "every worker reads all of it, and would have to know who takes what beforehand"
    if isinstance(whole, Indexed):
        what, why = "has a batch sampler of its own", "what it gives are whole batches, and micro-batches are dealt out"
    elif not isinstance(source, torch.utils.data.DataLoader):
        what, why = (
            "gives batches that you have split",
            "it is not known how many each worker has, and of which samples",
        )
    raise UsageError(
        f"this loader {what}, and with this method workers take different numbers of micro-batches",
        why=why,
        do="give a DataLoader with batch_size= over a dataset with a length, or a method whose workers take a share of "
        "every batch",
    )


def _samples(order: Epoch, numbers: Sequence[int]) -> Tensor:
    if isinstance(numbers, range):
        return order.indices
    return torch.cat([order.batch(k) for k in numbers]) if numbers else order.indices[:0]


def _runs(numbers: Sequence[int]) -> list[int]:
    """Ascending numbers as beginnings and ends of runs: [0, 1, 2, 7] are [0, 3, 7, 8]."""
    runs: list[int] = []
    for k in numbers:
        if runs and runs[-1] == k:
            runs[-1] = k + 1
        else:
            runs += (k, k + 1)
    return runs


def _unrolled(runs: Any, most: int) -> list[int] | None:
    """The numbers again; None if that are not numbers below `most`, ascending."""
    ascending = isinstance(runs, list) and len(runs) % 2 == 0 and all(type(k) is int for k in runs)
    if not ascending or runs != sorted(set(runs)) or (runs and not 0 <= runs[0] < runs[-1] <= most):
        return None
    return [k for start, stop in zip(runs[::2], runs[1::2], strict=True) for k in range(start, stop)]
