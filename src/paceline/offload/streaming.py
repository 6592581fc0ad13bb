"""State that is stepped on the host, with gradients that are not kept there.

[Note: streamed] An OffloadedBucket keeps its gradient until the step, 2 bytes a parameter of the host's memory, so that
a step ahead can be undone. Here the gradient comes into one of a few vectors that take turns, the new parameters are
written over it, and they leave from there. What would have to be undone is refused before anything else changes. Two
things are not known when a gradient comes: whether a later one is finite, and whether `step` will be called. If it is
not, some buckets are a step ahead of the others, and the optimizer's state is lost.

A gradient that did not come on this worker, so that it is not known yet whether its parameters are stepped, is kept
until the step, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import StoreError, UsageError
from paceline.offload.copies import Give, at_once
from paceline.offload.offloaded import OffloadedBucket, OffloadedShard, ShardStep


class StreamedBucket(OffloadedBucket):
    """One bucket whose gradients are stepped as they come and not kept: [Note: streamed]."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._own = self.g  # where a gradient is kept that cannot be stepped at once
        self._give: Give | None = None  # gives g back to the ring
        self._keeps = False  # g is the last gradient
        self._zeroed: set[OffloadedShard] = set()  # those whose gradient the user has made zero since

    def _gradient_memory(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype)

    def receive(self, mean: Tensor, ahead: list[ShardStep] | None) -> None:
        self.make_ready()
        self._zeroed.clear()
        self._keeps = not ahead
        if ahead:
            self.g, self._give = self.ring.take(self.vectors.n, self.dtype)
        else:
            if not self._own.numel():
                self._own = super()._gradient_memory()
            self.g = self._own
        super().receive(mean, ahead)

    def _output_vector(self) -> tuple[Tensor, Give]:
        return self.g, self._give_back

    def _release_gradient(self) -> None:
        self._give_back(at_once)

    def _give_back(self, wait: Callable[[], None]) -> None:
        give, self._give, self.g = self._give, None, self._own
        if give is not None:
            give(wait)

    def make_ready(self) -> None:
        if self._is_ahead():
            raise StoreError(
                f"{self.bucket} was stepped, and the step was not made",
                why="it was given up (a gradient is not finite), or never asked for; step=stream cannot undo it",
                do="go on from the last checkpoint: the parameters are whole, the optimizer's state is that of a "
                "half-made step. step='ahead' survives it",
            )
        super().make_ready()

    def _can_be_undone(self) -> bool:
        """Say whether a gradient is stepped as it comes. It is never undone, so only one that is not finite is not."""
        return bool(self._norm.isfinite())

    def _is_ahead(self) -> bool:
        """Say whether the bucket was stepped and the user's step has not come."""
        return self._job is not None and not self.requested and self._result() is not None

    def undo(self) -> None:
        if self._is_ahead():
            raise self._refused(
                "the optimizer's state is looked at, or gradients or parameters are changed, between backward and step"
            )
        if not self.requested:
            self._job = None

    def request(self, steps: list[ShardStep]) -> None:
        if self._keeps:
            super().request(steps)
            self._keeps = False  # the new parameters are written over it
            return
        made = self._result() if self._job else None
        if made is None:
            raise StoreError(
                f"a gradient of {self.bucket} is not finite, and the step is to be made all the same",
                why="with step=stream it is gone; others may have been stepped",
                do="go on from the last checkpoint, with guard='skip' or step='ahead'",
            )
        if made.steps != steps:
            raise self._refused("the optimizer's settings, or which gradients there are, changed since backward")
        self.requested = True

    def replace_gradients(self, shards: Sequence[OffloadedShard]) -> None:
        if shards:
            self.check_kept("gradients of the user's own are put in the place of these")
        super().replace_gradients(shards)

    # ------------------------------------------------------------------------------------------------ the gradient

    def check_kept(self, what: str) -> None:
        if not self._keeps:
            raise self._refused(what)

    def grad(self, shard: OffloadedShard) -> Tensor:
        if shard in self._zeroed:
            return self.placeholder.new_zeros(1).expand(shard.here.stop - shard.here.start)
        self.check_kept("a gradient is asked for: by a second backward before the step, or a norm not of order 2")
        return super().grad(shard)

    def zero(self, shard: OffloadedShard) -> None:
        if self._keeps:
            super().zero(shard)
            return
        self.undo()
        self._zeroed.add(shard)

    def bring_back(self, part: Tensor) -> Tensor | None:
        if not self._gradient_left or self._keeps:
            return super().bring_back(part)
        for shard in self.shards:
            if shard not in self._zeroed and bool(part[shard.here].any()):
                raise self._refused("a second backward before the step, or a gradient that was not zeroed after it")
        self._gradient_left = False
        return None

    def _refused(self, what: str) -> UsageError:
        return UsageError(
            what,
            why=f"with step=stream {self.bucket} was stepped as soon as its gradient came, which is not kept",
            do="use step='ahead': it keeps gradients until the step, 2 bytes a parameter of the host's memory",
        )
