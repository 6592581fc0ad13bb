"""What a Sync and a Layout see: means, without knowing how they are made."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from paceline.bucket import Bucket
from paceline.method import Method
from paceline.parts import KEEPS, Comm
from paceline.telemetry import Recorder


class Exchange:
    """This worker's side of the agreement: the method's reducer and layout over one lane."""

    def __init__(
        self, method: Method, comm: Comm, optimizer: Optimizer, recorder: Recorder, background: Comm | None = None
    ) -> None:
        self.method, self.comm, self.optimizer, self.recorder = method, comm, optimizer, recorder
        self._background = background
        self.buckets: list[Bucket] = []
        self.step = 0  # agreed: the number of steps that have counted
        self.rank, self.world = comm.rank, comm.world
        facts = frozenset().union(*(part.facts() for part in method.axes().values()))
        self.keeps = KEEPS in facts
        self.exact_everywhere = facts >= {"exact mean", "gradients agree", "whole gradients"}
        self.loss_scale: Callable[[], Tensor | None] = lambda: None  # set where a GradScaler is known

    @property
    def background(self) -> Comm:
        """A lane beside the gradients', for a sync that asked for one (`Sync.background`)."""
        assert self._background is not None
        return self._background

    @property
    def sent(self) -> int:
        """Payload bytes, on all lanes."""
        return self.comm.sent + (self._background.sent if self._background else 0)

    async def grad(self, b: Bucket) -> None:
        """A bucket of local gradients is full: the sync's turn, in true units where they matter."""
        scale, g = self.loss_scale() if self.keeps else None, b.flat[: b.n]  # [Note: loss scale], loss_scale.py
        if scale is not None:
            g.div_(scale)
        await self.method.sync.on_grad(b, self)
        if scale is not None:
            b.kept[: b.n].mul_(scale)
        if b.aside is not None:
            b.kept.add_(b.aside)
            b.aside = None

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

    async def before_step(self, b: Bucket) -> None:
        await self.method.sync.before_step(b, self)

    async def after_step(self, b: Bucket) -> None:
        await self.method.layout.publish(b, self)
        await self.method.sync.on_step(b, self)
