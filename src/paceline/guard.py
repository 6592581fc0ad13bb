"""Gradients that are not finite, and parameters without any: what a person is told, and when it is enough."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Literal

from paceline.bucket import Bucket
from paceline.errors import NonFiniteError
from paceline.telemetry import Note, Recorder, Skip

Mode = Literal["skip", "raise", "off"]
PATIENCE = 20  # steps in a row that may fail to count before training is given up


class Guard:
    """Counts the steps in a row that did not count."""

    def __init__(self, mode: Mode, rank: int, recorder: Recorder) -> None:
        self.mode, self.rank, self.recorder = mode, rank, recorder
        self.in_a_row = 0
        self._told = False  # of unused parameters

    def skipped(self, step: int, bad: list[int], *, alone: bool = False) -> None:
        """A step that does not count leaves no trace but this. `alone`: the other workers made it."""
        self.in_a_row += 1
        who = f"worker{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"
        why = f"the gradient of {who} is not finite (NaN or infinity)"
        self.recorder.emit(Skip(t=time.monotonic(), step=step, workers=bad, why=why))
        if self.mode == "raise" or self.in_a_row >= PATIENCE:
            raise NonFiniteError(
                f"step {step} does not count, {self.in_a_row} in a row: {why}",
                do="look at that worker's data and loss; lower the learning rate; guard='off' turns this check off",
            )
        if self.rank == 0 or self.rank in bad:
            where = "on this worker" if alone else "on all workers"
            warnings.warn(f"paceline: step {step} is skipped {where}: {why}", stacklevel=5)

    def counted(self, buckets: Sequence[Bucket]) -> None:
        """A step counts. Once, at the first: parameters that no worker used are a mistake more often than not."""
        self.in_a_row = 0
        if self._told:
            return
        self._told = True
        names = [s.name for b in buckets for s in b.slots if s.param.requires_grad and s.param.grad is None]
        if names and self.rank == 0:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            text = f"{len(names)} parameters got no gradient on any worker and stay as they are: {shown}"
            self.recorder.emit(Note(t=time.monotonic(), text=text))
            warnings.warn(f"paceline: {text}", stacklevel=5)
