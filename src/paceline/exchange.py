"""What a Sync and a Layout see: means, without knowing how they are made."""

from __future__ import annotations

from torch import Tensor

from paceline.bucket import Bucket
from paceline.method import Method
from paceline.parts import Comm


class Exchange:
    """This worker's side of the agreement: the method's reducer and layout over one lane."""

    def __init__(self, method: Method, comm: Comm) -> None:
        self.method, self.comm = method, comm
        self.step = 0  # agreed: the number of steps that have counted
        self.rank, self.world = comm.rank, comm.world

    async def mean(self, b: Bucket, x: Tensor) -> Tensor:
        """The mean of x over the workers, as well as the reducer knows it. x may be overwritten."""
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
