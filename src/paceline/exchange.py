"""What a Sync and a Layout see: means, without knowing how they are made.

[Note: loss scale] A GradScaler multiplies the loss by a scale it changes as it goes. A part that keeps something of
one step for a later one must not mix scales, so for such a method gradients are brought to their true size before
the sync sees them and back to scale after.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from paceline.bucket import Bucket
from paceline.method import Method
from paceline.parts import KEEPS, Comm


class Exchange:
    """This worker's side of the agreement: the method's reducer and layout over one lane."""

    def __init__(self, method: Method, comm: Comm, optimizer: Optimizer) -> None:
        self.method, self.comm, self.optimizer = method, comm, optimizer
        self.step = 0  # agreed: the number of steps that have counted
        self.rank, self.world = comm.rank, comm.world
        facts = frozenset().union(*(part.facts() for part in method.axes().values()))
        self.keeps = KEEPS in facts
        self.exact_everywhere = facts >= {"exact mean", "gradients agree", "whole gradients"}
        self.loss_scale: Callable[[], Tensor | None] = lambda: None  # set where a GradScaler is known

    async def grad(self, b: Bucket) -> None:
        """A bucket of local gradients is full: the sync's turn, in true units where they matter."""
        scale, g = self.loss_scale() if self.keeps else None, b.flat[: b.n]  # [Note: loss scale]
        if scale is not None:
            g.div_(scale)
        await self.method.sync.on_grad(b, self)
        if scale is not None:
            g.mul_(scale)

    async def mean(self, b: Bucket, x: Tensor) -> Tensor:
        """The mean of x over the workers, as well as the reducer knows it. x may be overwritten, and so may the mean in
        the next step: copy what is to stay.
        """
        return (await self.method.reducer.mean(b, x, self.comm)).mean

    async def mine(self, b: Bucket, x: Tensor) -> Tensor:
        """This worker's slice of the mean."""
        return (await self.method.reducer.mine(b, x, self.comm)).mean

    async def exact(self, x: Tensor) -> Tensor:
        """The mean itself, for what must not be compressed (buffers, norms)."""
        return await self.comm.mean(x)

    async def keep(self, b: Bucket) -> None:
        """Turn the bucket's local gradients into the agreed ones, as the layout keeps them."""
        await self.method.layout.keep(b, self)
