"""What a Sync and a Layout see: means, without knowing how they are made.

[Note: loss scale] A GradScaler multiplies the loss by a scale it changes as it goes. A part that keeps something of
one step for a later one must not mix scales, so for such a method gradients are brought to their true size before
they are reduced and back to scale after.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from torch import Tensor

from paceline.bucket import Bucket
from paceline.method import Method
from paceline.parts import KEEPS, Comm, Reduced


class Exchange:
    """This worker's side of the agreement: the method's reducer and layout over one lane."""

    def __init__(self, method: Method, comm: Comm) -> None:
        self.method, self.comm = method, comm
        self.step = 0  # agreed: the number of steps that have counted
        self.rank, self.world = comm.rank, comm.world
        facts = {fact for part in method.parts() for fact in part.gives}
        self.keeps = KEEPS in facts
        self.exact_everywhere = facts >= {"exact mean", "gradients agree", "whole gradients"}
        self.loss_scale: Callable[[], Tensor | None] = lambda: None  # set where a GradScaler is known

    async def mean(self, b: Bucket, x: Tensor) -> Tensor:
        """The mean of x over the workers, as well as the reducer knows it. x may be overwritten."""
        return await self._unscaled(self.method.reducer.mean, b, x)

    async def mine(self, b: Bucket, x: Tensor) -> Tensor:
        """This worker's slice of the mean."""
        return await self._unscaled(self.method.reducer.mine, b, x)

    async def _unscaled(self, reduce: Callable[..., Awaitable[Reduced]], b: Bucket, x: Tensor) -> Tensor:
        scale = self.loss_scale() if self.keeps else None  # [Note: loss scale]
        if scale is None:
            return (await reduce(b, x, self.comm)).mean
        return (await reduce(b, x.div_(scale), self.comm)).mean.mul_(scale)

    async def exact(self, x: Tensor) -> Tensor:
        """The mean itself, for what must not be compressed (buffers, norms)."""
        return await self.comm.mean(x)

    async def keep(self, b: Bucket) -> None:
        """Turn the bucket's local gradients into the agreed ones, as the layout keeps them."""
        await self.method.layout.keep(b, self)
