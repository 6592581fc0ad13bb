"""Eight bits each way: BAGUA's ByteGrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Reduced, Reducer
from paceline.kernels import add_bytes, encode_bytes
from paceline.kernels.minmax import HEAD
from paceline.reducers._memory import scratch
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@register
@dataclass(kw_only=True)
class Int8(Reducer):
    """Every worker sends shard r to worker r, which averages it and sends the mean to all; both legs in 8 bits.

    A shard is sent as its smallest value, the width of a level and a byte for each element, which is rounded to the
    nearest of the 256 levels from the smallest value to the largest. No error feedback, as in the paper; the bytes do
    not grow with the number of workers.
    """

    name: ClassVar[str] = "int8"
    paper: ClassVar[str] = "Gan et al., BAGUA (ByteGrad), VLDB 2021"
    formula: ClassVar[str] = "2·(W−1)/W·(n + 8·W)"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.ELEMENTWISE, Fact.LEFTOVER})

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        shards = x.view(comm.world_size, -1)
        sent = encode_bytes(shards)
        mine = torch.empty(shards.shape[1], device=x.device)
        add_bytes(mine, await comm.all_to_all(sent), factor=1 / comm.world_size, keep=False)
        back = await comm.all_gather(encode_bytes(mine[None])[0])
        mean = scratch(self, b, x).view_as(shards)
        for one, coded in zip(mean, back, strict=True):
            add_bytes(one, coded[None], factor=1.0, keep=False)

        def left() -> Tensor:
            for one, coded in zip(shards, sent, strict=True):
                add_bytes(one, coded[None], factor=-1.0, keep=True)
            # Worker r made the second leg's rounding error of shard r alone, so its leftover counts it W times.
            shards[comm.rank] += comm.world_size * add_bytes(mine, back[comm.rank][None], factor=-1.0, keep=True)
            return x

        return Reduced(mean.view(-1), left)

    def sends(self, b: Bucket, world_size: int) -> int:
        row = b.flat.numel() // world_size + HEAD
        return row * world_size * (world_size - 1) // world_size + row * (world_size - 1)
