"""Steps that do not count, and parameters without gradients: what a person is told, and when it is enough."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Literal

from paceline.comm.group import Group
from paceline.core.bucket import Bucket
from paceline.core.summed import summed_term
from paceline.core.vote import NOT_FINITE, OUT_OF_MEMORY, Bad, told
from paceline.errors import NonFiniteError
from paceline.telemetry.events import Note, Skip
from paceline.telemetry.recorder import Recorder

Mode = Literal["skip", "raise", "off"]
PATIENCE = 20  # steps in a row that may fail to count before training is given up


class Guard:
    """Counts the steps in a row that did not count, and says what a person should know of them."""

    def __init__(self, mode: Mode, group: Group, recorder: Recorder) -> None:
        self.mode, self.group, self.recorder = mode, group, recorder
        self.in_a_row = 0
        self._told = False
        self._looked = False  # of unused parameters

    def skipped(self, step: int, bad: Bad, *, alone: bool = False) -> None:
        """A step that does not count leaves no trace but this. alone: the other workers made it."""
        why = told(bad)
        self.recorder.emit(Skip(t=time.monotonic(), step=step, workers=list(bad), why=why))
        if OUT_OF_MEMORY in bad.values():
            return  # its batch is dealt again
        self.in_a_row += 1
        if (self.mode == "raise" and NOT_FINITE in bad.values()) or self.in_a_row >= PATIENCE:
            raise NonFiniteError(
                f"step {step} does not count, {self.in_a_row} in a row: {why}",
                do="look at that worker's data and loss; lower the learning rate; guard='off' turns this check off",
            )
        if self.group.rank == 0 or self.group.rank in bad:
            where = "on this worker" if alone else "on all workers"
            warnings.warn(f"paceline: step {step} is skipped {where}: {why}", stacklevel=5)

    def gave_up(self) -> None:
        """This worker's backward raised, and the user's loop goes on."""
        text = "a backward raised an error and was given up: the gradients of this step are dropped"
        self.recorder.emit(Note(t=time.monotonic(), text=text))
        warnings.warn(f"paceline: worker {self.group.rank}: {text}", stacklevel=5)

    def counted(self) -> None:
        """A step counts."""
        self.in_a_row = 0

    def name_unused(self, buckets: Sequence[Bucket], used: Sequence[Sequence[bool]] | None = None) -> None:
        """At the first step that counts, name parameters that no worker used: mostly they are a mistake. used: where
        it cannot be seen by p.grad.
        """
        if self._told:
            return
        self._told = True
        slots = [s for b in buckets for s in b.slots]
        there = [a for row in used for a in row] if used else [s.param.grad is not None for s in slots]
        names = [s.name for s, anywhere in zip(slots, there, strict=True) if s.param.requires_grad and not anywhere]
        if names and self.group.rank == 0:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            text = f"{len(names)} parameters got no gradient on any worker and stay as they are: {shown}"
            self.recorder.emit(Note(t=time.monotonic(), text=text))
            warnings.warn(f"paceline: {text}", stacklevel=5)

    def look_at_loss(self) -> None:
        """In the first backward, say so if the loss is a sum over samples: its gradients are averaged over workers."""
        if self._looked:
            return
        self._looked = True
        if self.group.rank == 0 and (term := summed_term()):
            text = (
                f"the loss has a term with reduction='sum' ({term}), and its gradient is averaged over the samples: "
                "prepare(loss='sum') adds gradients up, as one process with all the samples does"
            )
            self.recorder.emit(Note(t=time.monotonic(), text=text))
            warnings.warn(f"paceline: {text}", stacklevel=5)
