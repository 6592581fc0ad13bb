"""The micro-batches of one step, and how much each counts.

[Note: weights] The mean is over samples, not over workers. With w_r of the T samples of a batch, worker r's
gradient (of its own mean loss) enters as g_r * w_r * W / T, so the mean over W workers is sum(w_r g_r) / T. In a
window of micro-batches with totals T_1, T_2, ... everything is weighed against T_1, and the sum is brought to scale
once, by T_1 / (T_1 + T_2 + ...). Every worker knows all totals, so all multiply by the same number.

The gradient of a loss that is a sum over samples is a sum already. It enters as g_r * W, so the mean over W workers is
sum(g_r), and micro-batches add up; only a batch of which no sample counts enters as zero.

[Note: batches in hand] A loop may read several loaders side by side (zip) and have one backward for all. Their batches
are in hand until a backward has begun and the next batch is handed out, and one weight must be right for all of them:
it is where this worker's share w_r / T is the same in each, and stays in proportion over a window. Otherwise the
backward is refused. A batch handed out where no gradients are computed, or by a loop that has ended since while others
went on, was for an evaluation and does not count. Batches that were collected (`list(loader)`, one backward for the
losses of a whole loop) are weighed by the last of them, so they must all be shared alike too.

A loop may fetch the next batch before the backward of this one. Where that happens between forward and backward, the
new batch comes to hand when the backward is over. Where it happens before the forward, nothing tells which batch the
forward is of: then each batch must be shared as the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from paceline.comm.group import Group
from paceline.errors import UsageError


class BatchInHand(Protocol):
    """What the loader says of the batch in hand."""

    @property
    def weight(self) -> float: ...
    @property
    def total(self) -> float: ...
    @property
    def last(self) -> bool: ...
    @property
    def left(self) -> int:
        """Micro-batches still to come of the same batch."""

    @property
    def number(self) -> int: ...


class Window:
    """The micro-batches from one step to the next. Without accumulation it is one batch long and all this is 1.

    summed: the loss is a sum over samples, not their mean. multiple: how many times `accumulate` batches make a step,
    which may change between two steps: [Note: batches to a step], step_size.py.
    """

    def __init__(
        self, group: Group, accumulate: int, *, summed: bool = False, multiple: Callable[[], int] = lambda: 1
    ) -> None:
        self.group, self.summed = group, summed
        self._accumulate, self._multiple = accumulate, multiple
        self.no_sync = False  # the user holds communication back
        self.batch: BatchInHand | None = None  # the newest; None: there is no loader, every worker counts the same
        self.number = 0  # of that batch, as its loader counts
        self.scale = self.usual  # what an arriving gradient is multiplied by
        self.micro = 0  # calls of step() since the last real one
        self._batches = 0  # ... that ended a batch
        self._totals: list[float] = []
        self._counted: BatchInHand | None = None
        self._at_scale = False
        self._just_counted = False  # the backward under way brought a batch that had not counted before
        # [Note: batches in hand], by the number of their loader, the newest last
        self._hand: dict[int, BatchInHand] = {}
        self._training: set[int] = set()  # those handed out where gradients are computed
        self._ended: set[int] = set()  # loaders whose loop has ended since
        self._unlike: set[int] = set()  # those that have handed out several since, shared differently
        self._used = False  # a backward has begun since they were handed out
        self._first: dict[int, float] = {}  # the first totals in this window
        self._handed: dict[int, int] = {}  # batches handed out by now
        self._computed = False  # a forward has begun since the batches in hand were handed out
        self._fetched: list[tuple[BatchInHand, int, bool]] = []  # after that forward and before its backward
        self._newest: dict[int, BatchInHand] = {}  # those handed out last where gradients are computed
        self._ahead: set[int] = set()  # loaders that have handed out one batch after the other, with nothing between

    @property
    def usual(self) -> float:
        """The scale of a batch that is shared equally, and of all where there is no loader."""
        return float(self.group.world_size) if self.summed else 1.0

    @property
    def accumulate(self) -> int:
        """How many batches make the step under way."""
        return self._accumulate * self._multiple()

    @property
    def totals(self) -> list[float]:
        """The samples of all workers in each micro-batch of the step so far. Without a loader each worker counts 1."""
        return self._totals or [self.batch.total if self.batch else float(self.group.world_size)]

    @property
    def closing(self) -> bool:
        """Is the batch in hand the last of its window?"""
        full = self._batches + 1 >= self.accumulate or any(batch.last for batch in self._counting().values())
        return full and not self.no_sync and not self.in_batch

    @property
    def in_batch(self) -> bool:
        """Has the batch in hand micro-batches that are still to come?"""
        return self.left > 0

    @property
    def left(self) -> int:
        """How many micro-batches of the batch in hand are still to come."""
        return max((batch.left for batch in self._counting().values()), default=0)

    @property
    def fresh(self) -> bool:
        """Has nothing of the step to come been computed yet?"""
        return not (self.micro or self._totals)

    def hold(self) -> None:
        """The user has called step() in the middle of the window."""
        self.micro += 1
        self._batches += not self.in_batch

    @property
    def several(self) -> bool:
        """Has the window more than one micro-batch, so that its sum must be brought to scale?"""
        return bool(self._totals)

    def take(self, batch: BatchInHand, loader: int = 0, *, trains: bool = True) -> None:
        """A loader hands out a batch. trains: gradients are computed at the moment."""
        if self._computed and not self._used:
            self._fetched.append((batch, loader, trains))
        else:
            self._take(batch, loader, trains=trains)

    def forward(self) -> None:
        """A forward in training begins."""
        self._take_fetched()
        self._computed = True

    def _take_fetched(self) -> None:
        self._computed = False
        for batch, loader, trains in self._fetched:
            self._take(batch, loader, trains=trains)
        self._fetched.clear()

    def _take(self, batch: BatchInHand, loader: int, *, trains: bool) -> None:
        self._handed[loader] = self.number = self._handed.get(loader, 0) + 1
        if self._used and loader in self._ended:  # another epoch
            self._newest.pop(loader, None)
            self._ahead.discard(loader)
        elif trains and not self._used and not self._computed and loader in self._newest:
            self._ahead.add(loader)
        self._ended.discard(loader)
        if self._used:
            self._hand.clear()
            self._unlike.clear()
            self._used = False
        for gone in self._ended:
            self._hand.pop(gone, None)
        before = self._hand.pop(loader, None)
        if before is None and loader in self._ahead:
            before = self._newest[loader]
        if before is not None and not _alike(self._shares(loader, before), self._shares(loader, batch)):
            self._unlike.add(loader)
        self._hand[loader] = batch
        self._training.discard(loader)
        if trains:
            self._training.add(loader)
            self._newest[loader] = batch
        self._weigh()

    def renumber(self) -> None:
        """The group has changed: joiners have seen no batch, so all count anew."""
        self._handed.clear()
        self.number = 0

    def ended(self, loader: int) -> None:
        """The loop over a loader has come to its end."""
        self._ended.add(loader)
        if loader in self._hand and (loader not in self._training or self._hand.keys() - self._ended):
            del self._hand[loader]
            self._weigh()

    def use(self) -> None:
        """A backward has ended: the next batch handed out is for another one."""
        self._used = True
        self._take_fetched()

    def count(self) -> None:
        """A backward begins. A batch counts once, however many backwards it takes."""
        self._just_counted = False
        self._used = True
        self._refuse_unequal()
        if not (self.accumulate > 1 or self.no_sync or self._totals or self.in_batch):
            return
        if self.batch is None or self.batch is not self._counted:
            self._counted = self.batch
            total = self.batch.total if self.batch else float(self.group.world_size)
            if total:  # no sample counted on any worker: there is nothing to weigh against
                self._totals.append(total)
                self._just_counted = True
                for loader, batch in self._counting().items():
                    self._first.setdefault(loader, batch.total)

    def refuse_several(self, why: str) -> None:
        """Raise if the backward may be of the batches of several loaders."""
        if len(self._counting()) > 1:
            numbers = " and ".join(str(loader + 1) for loader in self._counting())
            raise UsageError(
                f"batches of the loaders {numbers} are in hand in one backward",
                why=why,
                do="read one loader in the training loop; read what is only evaluated under torch.no_grad()",
            )

    def uncount(self) -> None:
        """The backward that began has raised: what it added is dropped."""
        if self._just_counted:
            self._totals.pop()
            self._counted, self._just_counted = None, False

    def factor(self) -> float:
        """What brings the sum to scale: 1 where it is already."""
        if self._at_scale or not self._totals or self.summed:
            return 1.0
        return self._totals[0] / sum(self._totals)

    def close(self) -> None:
        """The sum has been brought to scale: what a further backward of this batch adds must be at scale too."""
        self.scale *= self.factor()
        self._at_scale = True

    def over(self) -> None:
        """The step was made, or given up."""
        if self._at_scale:
            self.scale = self.usual  # until the next batch says otherwise
        self._totals.clear()
        self._first.clear()
        self._counted, self._at_scale, self.micro, self._batches = None, False, 0, 0

    def _counting(self) -> dict[int, BatchInHand]:
        """The batches in hand that the next backward may be of."""
        training = {loader: batch for loader, batch in self._hand.items() if loader in self._training}
        return training or self._hand

    def _weigh(self) -> None:
        self.batch = next(reversed(self._counting().values()), None)
        if self.batch is None:
            self.scale = self.usual
            return
        reference = self._totals[0] if self._totals else self.batch.total
        if self.summed:
            self.scale = self.usual if self.batch.weight else 0.0
        else:
            self.scale = self.batch.weight * self.group.world_size / reference if reference else 0.0

    def _refuse_unequal(self) -> None:
        """Raise if one weight would not be right for all batches in hand."""
        batches = [*self._counting().items()]
        for loader, batch in batches:
            if loader in self._unlike and (loader in self._ended or loader in self._ahead):
                raise UsageError(
                    f"loader {loader + 1} has handed out several batches before this backward, shared differently: "
                    f"worker {self.group.rank} has {batch.weight:g} of {batch.total:g} of the last one",
                    why="a backward is weighed by the batch that was handed out last, and this one may be of others",
                    do="fetch a batch when the backward of the one before it is over, or give the loader a batch size "
                    "that all workers share equally, and drop_last=True; read what is only evaluated under "
                    "torch.no_grad()",
                )
        for other, batch in batches[1:]:
            one, first = batches[0]
            if batch.left != first.left:
                raise UsageError(
                    f"two batches are in hand that are cut differently: of loader {one + 1}'s {first.left} "
                    f"micro-batches are still to come, and {batch.left} of loader {other + 1}'s",
                    why="one backward is of both, so both must begin and end together",
                    do="give both loaders the same batch size, or leave micro_batch= out",
                )
            if not _alike(self._shares(one, first), self._shares(other, batch)):
                raise UsageError(
                    f"two batches are in hand that count differently: worker {self.group.rank} has {first.weight:g} of "
                    f"{first.total:g} of loader {one + 1}'s, and {batch.weight:g} of {batch.total:g} of loader "
                    f"{other + 1}'s",
                    why="one backward is weighed once, by this worker's share of the samples",
                    do="give both loaders batch sizes that all workers share equally, and drop_last=True; "
                    "read a loader that is only evaluated under torch.no_grad()",
                )

    def _shares(self, loader: int, batch: BatchInHand) -> tuple[float, float]:
        """This worker's share of a batch, and the batch's size in proportion to the window's first of its loader."""
        if self.summed:
            return float(bool(batch.weight)), 1.0
        first = self._first.get(loader, batch.total)
        return batch.weight / batch.total if batch.total else 0.0, batch.total / first if first else 0.0


def _alike(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return all(math.isclose(x, y, rel_tol=1e-9) for x, y in zip(a, b, strict=True))
