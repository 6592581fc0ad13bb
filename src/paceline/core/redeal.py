"""A step that did not count, and whose batch is dealt again.

[Note: dealt again] Where a worker's memory does not suffice for its share of a batch, nothing is wrong with the batch:
no worker counts the step, and all of them are given the same batch once more, in smaller parts. It takes four who each
do a little:

- `paceline.retry()` (session/retry.py) catches the error, or a forward or a backward that raised tells of it, and
  `Redeal.ran_out` remembers it. Nothing is sent yet: the loop's body is left first, and with it what it had computed.
- The loader asks `Redeal.verdict` before it deals the next micro-batch. A worker that ran out of memory now takes part
  in the exchange that the others are in, or will come to: it sends zeros, and its vote says why (`OUT_OF_MEMORY`,
  vote.py). It leaves out the micro-batches before that exchange, of which the others need nothing.
- The others learn it from the vote, at the end of the backward that exchanges. Their `step()` does nothing, and their
  loaders ask for the verdict too.
- All loaders go back to the first batch of the step, cut it finer, and put the random streams where they stood then.
  The modules' buffers are what they were (buffers.py).

A sync that does not exchange gradients in this step has nobody to tell: the worker deals its own share again, alone.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from paceline.core.vote import OUT_OF_MEMORY, Bad

if TYPE_CHECKING:
    from paceline.core.engine import Engine


_SAID = re.compile(r"tried to allocate [\d.]+ \w+|[\d.]+ \w+ is free", re.IGNORECASE)


def what_was_missing(error: BaseException) -> str:
    """What the allocator said: how much was asked for, and how much was free where it says that."""
    text = " ".join(str(error).split())
    return ", ".join(_SAID.findall(text)) or text[:200] or type(error).__name__


class Redeal:
    """Whether the step under way of one engine has to be dealt again: [Note: dealt again].

    on: the loader can deal a batch again.
    """

    def __init__(self, engine: Engine, *, on: bool) -> None:
        self._engine, self.on = engine, on
        self._lost: Bad = {}  # whose memory did not suffice, as the workers have agreed
        self.missing = ""  # on this worker: what the allocator said

    @property
    def asks(self) -> bool:
        """Must the host know what the others have voted before the next batch is dealt?"""
        return self.on and self._engine.group.world_size > 1

    @property
    def lost(self) -> bool:
        """Do all workers know that this step does not count?"""
        return bool(self._lost)

    @property
    def given_up(self) -> bool:
        """Does this worker know that this step does not count?"""
        return self.lost or bool(self.missing)

    @property
    def between_steps(self) -> bool:
        """Is nothing of a step under way, so that the next batch is the first of one?"""
        return self._engine.window.fresh and not self._engine.exchanged

    @property
    def possible(self) -> bool:
        """Can the step under way still be given up? Not once the workers have agreed on its gradients.

        An evaluation is no part of a step.
        """
        engine = self._engine
        agreed = engine.exchanged and not engine.under_way
        return self.on and torch.is_grad_enabled() and not engine.making and not agreed

    def ran_out(self, error: BaseException | None) -> None:
        """This worker's memory did not suffice. None: its backward raised, and what it raised is not known here."""
        if self.on:
            self.missing = what_was_missing(error) if error is not None else self.missing or "its backward raised"

    def hear(self, bad: Bad) -> None:
        """The workers' votes are here."""
        if self.on and OUT_OF_MEMORY in bad.values():
            self._lost = {rank: why for rank, why in bad.items() if why == OUT_OF_MEMORY}

    def verdict(self) -> list[int]:
        """Whose memory did not suffice for the step under way, which is over if there is any.

        Called when the next micro-batch is asked for.
        """
        if self._engine.under_way:
            self.ran_out(None)
        if self.missing:
            self.take_part()
        if self._lost:
            self._engine.give_up_lost()
        return sorted(self._lost)

    def take_part(self) -> None:
        """This worker ran out of memory: take part in the exchange that the others are in, or will come to."""
        if not self._lost:
            self._engine.run_out_of_memory()
            self._lost = self._lost or {self._engine.group.rank: OUT_OF_MEMORY}  # a step of which no other hears

    def forget(self) -> None:
        """The batch is dealt again, or the loop was left."""
        self.missing, self._lost = "", {}
