"""A loader's way back to a batch that did not fit: [Note: dealt again], core/redeal.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from paceline.data import random_streams
from paceline.data.micro_batches import MicroBatchSize
from paceline.errors import DataError, UsageError
from paceline.telemetry.events import Cut
from paceline.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.group import Group
    from paceline.core.redeal import Redeal


class Redeals:
    """Where the step under way began in the data, and where the random streams stood.

    together: the workers agree that a step does not count; else each deals its own share again, alone.
    others: counts the steps of this worker's other optimizers.
    """

    def __init__(
        self,
        redeal: Redeal,
        size: MicroBatchSize,
        group: Group,
        recorder: Recorder,
        *,
        accumulate: int,
        together: bool,
        others: Callable[[], int],
    ) -> None:
        self.redeal, self.size, self.group, self.recorder = redeal, size, group, recorder
        self.accumulate, self.together, self.others = accumulate, together, others
        self._others = 0  # steps of other optimizers, when the batch was handed out
        self._first: int | None = None  # the first batch of the step under way
        self._streams: dict[str, Tensor] = {}
        self._largest = 0  # samples of the largest micro-batch of that batch
        self._whole = True  # that batch is not cut
        self._in_batch = False  # micro-batches of the batch handed out last are still to come
        self._trains = False
        self._why = ""  # of the size that is being tried, until it has fitted

    def begin(self) -> None:
        """A loop begins: what an earlier one has left does not matter."""
        self._first, self._in_batch = None, False
        self.redeal.forget()

    def before(self, k: int) -> bool:
        """The next micro-batch is asked for, and batches before k are done. Gives: is k to be cut anew?"""
        if self._in_batch or not torch.is_grad_enabled() or not self.redeal.between_steps:
            return False
        again = False
        if self._first is not None and self._first < k:
            again = self._fitted(self._first, k)
        self._first, self._largest, self._streams = k, 0, random_streams.states()
        return again

    def handed_out(self, left: int, largest: int) -> None:
        """A micro-batch is handed out. left: how many of the same batch are to come."""
        if not self._largest:
            self._largest, self._whole = largest, not left
        self._in_batch, self._trains, self._others = left > 0, torch.is_grad_enabled(), self.others()

    def after(self) -> int | None:
        """The loop's body is over. Gives the batch to go back to, if memory did not suffice in the step under way."""
        if self._trains and self.others() != self._others:
            raise several(2)
        if not self._trains or not (short := self.redeal.verdict()):
            return None
        assert self._first is not None
        missing = self.redeal.missing
        self.redeal.forget()
        if self._largest <= 1:
            raise _too_small(short, missing)
        smaller = self.size.too_large(self._first, self._first + self.accumulate - 1, self._largest)
        workers = f"worker{'s' * (len(short) > 1)} {', '.join(map(str, short))}"
        self._why = f"the memory of {workers} did not suffice for {self._largest} samples"
        self._tell(smaller, short)
        random_streams.restore(self._streams)
        self._in_batch, self._largest = False, 0
        return self._first

    def _fitted(self, first: int, k: int) -> bool:
        """The step that began with batch `first` has gone well. Gives: is another size tried from batch k on?"""
        if self._why and (self.group.rank == 0 or not self.together):
            found = self.size.of(first)
            print(f"paceline: micro-batches of at most {found} samples: {self._why}", file=sys.stderr, flush=True)
        self._why = ""
        if not self.size.fitted(whole=self._whole):
            return False
        assert self.size.most is not None
        self._why = "a larger size is tried again"
        self._tell(self.size.most, [])
        return True

    def _tell(self, samples: int, workers: list[int]) -> None:
        self.recorder.emit(
            Cut(t=time.monotonic(), step=self.recorder.step, samples=samples, workers=workers, why=self._why)
        )


def _too_small(workers: list[int], missing: str) -> DataError:
    where = f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
    return DataError(
        f"one sample does not fit into the memory of {where}",
        why=missing or "how much is missing is said in the output there",
        do="use a smaller model or shorter samples, activation checkpointing, a 16-bit type, or a layout that shards "
        "(zero3, with store='cpu')",
    )


def several(optimizers: int) -> UsageError:
    """The error for a loop with several optimizers, whose batches cannot be dealt again."""
    return UsageError(
        f"micro_batch='auto' with {optimizers} optimizers",
        why="a worker that ran out of memory cannot know which of them the others will step next",
        do="give a number for micro_batch=",
    )
