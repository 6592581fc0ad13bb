"""Eight bits each way: BAGUA's ByteGrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.parts import Comm, Reduced, Reducer
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class Int8(Reducer):
    """Scatter-gather with both legs in 8 bits: everyone sends slice r to worker r, which averages it and sends it on.

    A slice travels as its smallest and largest value and a byte for each element, which is rounded to the nearest
    of the 256 values evenly between them. No error feedback, as in the paper; the bytes do not grow with the world.
    """

    name: ClassVar[str] = "int8"
    paper: ClassVar[str] = "Gan et al., BAGUA (ByteGrad), VLDB 2021"
    formula: ClassVar[str] = "2·(W−1)/W·(n + 8·W)"
    gives: ClassVar[frozenset[str]] = frozenset({"elementwise", "leftover"})

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        slices = x.view(comm.world, -1).float()
        sent = encode(slices)
        mine = decode(await comm.alltoall(sent)).mean(0)
        back = await comm.gather(encode(mine[None])[0])
        mean = decode(back).flatten().to(x.dtype)

        def left() -> Tensor:
            unsent = slices - decode(sent)
            # What the second leg rounded away of everyone's mean is this worker's to remember, W-fold.
            unsent[comm.rank] += comm.world * (mine - decode(back[comm.rank][None])[0])
            return unsent.flatten().to(x.dtype)

        return Reduced(mean, left)

    def sends(self, b: Bucket, world: int) -> int:
        row = b.flat.numel() // world + 8
        return row * world * (world - 1) // world + row * (world - 1)


def encode(rows: Tensor) -> Tensor:
    """Each row as bytes: 256 levels from its smallest to its largest value, which come first, in fp32."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    step = (high - low) / 255
    scale = torch.where(step > 0, 1 / step, 0.0).nan_to_num_(posinf=0.0)  # a flat row, or one too narrow to divide
    level = (rows - low).mul_(scale).round_().clamp_(0, 255).to(torch.uint8)
    return torch.cat([torch.cat([low, high], 1).view(torch.uint8), level], 1)


def decode(coded: Tensor) -> Tensor:
    low, high = coded[:, :8].contiguous().view(torch.float32).split(1, 1)
    return coded[:, 8:].float().mul_((high - low) / 255).add_(low)
