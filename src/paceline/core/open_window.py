"""A step whose micro-batches are not counted beforehand: a sync says when its window ends, on each worker by itself.

[Note: rounds] Where a sync is `open_ended`, each worker goes on with micro-batches until the sync says that its round
is over, and that may be after one on this worker and after nine on another. What a worker counts is known only then. So
gradients are added up as if the round had the T samples that the user asked for, g·w·W / T for a micro-batch of w, and
nothing is sent during backward. At the end of the last backward every worker tells the others what it has `Finished`,
one small message, which is also where the fast wait for the slow. Then all bring their sums to scale by the same
number, T over the samples of all workers together: [Note: weights] in window.py, with the total learnt late.

The end is found at the end of a backward and not at `step()`, because between the two the user looks at `p.grad`, clips
it, or has a loss scaler unscale it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.comm.group import Group
from paceline.core.window import BatchInHand, Window
from paceline.errors import UsageError


class Finished(NamedTuple):
    """What one worker has finished when its round ends."""

    samples: float  # as they are weighed
    batches: int  # micro-batches with a backward
    seconds: float
    handed: int  # micro-batches that its loader has handed out in this epoch


class OpenWindow(Window):
    """A window that ends when `closes` says so: [Note: rounds]."""

    def __init__(
        self, group: Group, closes: Callable[[float, float], bool], clock: Callable[[], float], *, summed: bool = False
    ) -> None:
        """closes: told the seconds since the round began, and those of a micro-batch in it."""
        super().__init__(group, sys.maxsize, summed=summed)
        self.closes, self.clock = closes, clock
        self.learnt = 0.0  # the samples of all workers in this round, once they are known
        self._samples, self._computed_batches = 0.0, 0  # of this round
        self._began: float | None = None
        self._seconds, self._looks = 0.0, 0  # since the round began; micro-batches finished in them
        self._closing = False
        self._asked = False  # about the micro-batch in hand

    @property
    def closing(self) -> bool:
        return self._closing and not self.no_sync

    @property
    def asked_for(self) -> float:
        """The samples that the user wants in a step: the batch size."""
        return self._totals[0] if self._totals else self.batch.total if self.batch else float(self.group.world_size)

    @property
    def loader(self) -> int | None:
        """The number of the loader whose batch is in hand."""
        return next(reversed(self._counting()), None)

    def take(self, batch: BatchInHand, loader: int = 0, *, trains: bool = True) -> None:
        super().take(batch, loader, trains=trains)
        if trains:
            self._asked = False
            self._begin()

    def count(self) -> None:
        if len(self._counting()) > 1:
            raise UsageError(
                f"one backward is of the batches of {len(self._counting())} loaders",
                why="workers take different numbers of micro-batches, and so would come to the end of each loader at "
                "another place",
                do="put the data sets together in one loader, or use a method in which all workers take a share of "
                "every batch",
            )
        self._begin()
        super().count()
        if self._just_counted:
            self._samples += self._weight()
            self._computed_batches += 1

    def uncount(self) -> None:
        if self._just_counted:
            self._samples -= self._weight()
            self._computed_batches -= 1
        super().uncount()

    def ends(self) -> bool:
        """A micro-batch is finished: does the round end with it? Asked once of each; True the first time only."""
        if self._asked or self._closing or self.no_sync:
            return False
        if self._began is None:  # a second step() by the same gradients, on all workers alike
            self._closing = True
            return True
        self._seconds, self._looks = self.clock() - self._began, self._looks + 1
        self._asked = True
        out_of_data = any(batch.last for batch in self._counting().values())
        self._closing = out_of_data or self.closes(self._seconds, self._seconds / self._looks)
        return self._closing

    def finished(self) -> Finished:
        """What this worker tells the others."""
        return Finished(self._samples, self._computed_batches, self._seconds, self.batch.number if self.batch else 0)

    def learn(self, everyone: Sequence[Finished]) -> None:
        """All workers have said what they have finished."""
        self.learnt = sum(one.samples for one in everyone)

    def factor(self) -> float:
        if self._at_scale or self.summed or not self.learnt:
            return 1.0
        return self.asked_for / self.learnt

    def hold(self) -> None:
        super().hold()
        self._asked = False

    def over(self) -> None:
        super().over()
        self._samples, self._computed_batches, self.learnt, self._looks = 0.0, 0, 0.0, 0
        self._closing = self._asked = False
        self._began = None

    def _begin(self) -> None:
        if self._began is None:
            self._began = self.clock()

    def _weight(self) -> float:
        return self.batch.weight if self.batch else 1.0
