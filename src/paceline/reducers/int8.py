"""Eight bits each way: BAGUA's ByteGrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.kernels import add_bytes, encode_bytes
from paceline.kernels.minmax import HEAD
from paceline.parts import Comm, Reduced, Reducer
from paceline.reducers._memory import scratch
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class Int8(Reducer):
    """Scatter-gather with both legs in 8 bits: everyone sends slice r to worker r, which averages it and sends it on.

    A slice travels as its smallest value, the width of a level and a byte for each element, which is rounded to the
    nearest of the 256 levels from the smallest value to the largest. No error feedback, as in the paper; the bytes do
    not grow with the world.
    """

    name: ClassVar[str] = "int8"
    paper: ClassVar[str] = "Gan et al., BAGUA (ByteGrad), VLDB 2021"
    formula: ClassVar[str] = "2·(W−1)/W·(n + 8·W)"
    gives: ClassVar[frozenset[str]] = frozenset({"elementwise", "leftover"})

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        slices = x.view(comm.world, -1)
        sent = encode_bytes(slices)
        mine = torch.empty(slices.shape[1], device=x.device)
        add_bytes(mine, await comm.alltoall(sent), factor=1 / comm.world, keep=False)
        back = await comm.gather(encode_bytes(mine[None])[0])
        mean = scratch(self, b, x).view_as(slices)
        for one, coded in zip(mean, back, strict=True):
            add_bytes(one, coded[None], factor=1.0, keep=False)

        def left() -> Tensor:
            for one, coded in zip(slices, sent, strict=True):
                add_bytes(one, coded[None], factor=-1.0, keep=True)
            # What the second leg rounded away of everyone's mean is this worker's to remember, W-fold.
            slices[comm.rank] += comm.world * add_bytes(mine, back[comm.rank][None], factor=-1.0, keep=True)
            return x

        return Reduced(mean.view(-1), left)

    def sends(self, b: Bucket, world: int) -> int:
        row = b.flat.numel() // world + HEAD
        return row * world * (world - 1) // world + row * (world - 1)
