"""The micro-batches of one step, and how much each counts.

[Note: weights] The mean is over samples, not over workers. With w_r of the T samples of a batch, worker r's
gradient (of its own mean loss) enters as g_r * w_r * W / T, so the mean over W workers is sum(w_r g_r) / T. In a
window of micro-batches with totals T_1, T_2, ... everything is weighed against T_1, and the sum is brought to scale
once, by T_1 / (T_1 + T_2 + ...). Every worker knows all totals, so all multiply by the same number.
"""

from __future__ import annotations

from typing import Protocol


class Batch(Protocol):
    """What the loader says of the batch in hand."""

    @property
    def weight(self) -> float: ...
    @property
    def total(self) -> float: ...
    @property
    def last(self) -> bool: ...


class Window:
    """From one step to the next. Without accumulation it is one batch long and all this is 1."""

    def __init__(self, world: int, accumulate: int) -> None:
        self.world, self.accumulate = world, accumulate
        self.holding = False  # the user holds communication back
        self.batch: Batch | None = None  # none: there is no loader, every worker counts the same
        self.scale = 1.0  # what an arriving gradient is multiplied by
        self.micro = 0  # calls of step() since the last real one
        self._totals: list[float] = []
        self._counted: Batch | None = None
        self._at_scale = False

    @property
    def closing(self) -> bool:
        """Is the batch in hand the last of its window?"""
        full = self.micro + 1 >= self.accumulate or (self.batch is not None and self.batch.last)
        return full and not self.holding

    @property
    def several(self) -> bool:
        return bool(self._totals)

    def take(self, batch: Batch) -> None:
        """The loader hands out a batch."""
        self.batch = batch
        reference = self._totals[0] if self._totals else batch.total
        self.scale = batch.weight * self.world / reference if reference else 0.0

    def count(self) -> None:
        """A backward begins. A batch counts once, however many backwards it takes."""
        if not (self.accumulate > 1 or self.holding or self._totals):
            return
        if self.batch is None or self.batch is not self._counted:
            self._counted = self.batch
            total = self.batch.total if self.batch else float(self.world)
            if total:  # nothing counted anywhere: nothing to weigh against
                self._totals.append(total)

    def factor(self) -> float:
        """What brings the sum to scale: 1 where it is already."""
        return 1.0 if self._at_scale or not self._totals else self._totals[0] / sum(self._totals)

    def close(self) -> None:
        """The sum has been brought to scale: what a further backward of this batch adds must be at scale too."""
        self.scale *= self.factor()
        self._at_scale = True

    def over(self) -> None:
        """The step was made, or given up."""
        if self._at_scale:
            self.scale = 1.0  # until the next batch says otherwise
        self._totals.clear()
        self._counted, self._at_scale, self.micro = None, False, 0
