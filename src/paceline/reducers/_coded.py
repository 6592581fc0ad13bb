"""The base of reducers whose messages cannot be summed on the way, and are all-gathered instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.parts import Reduced, Reducer
from paceline.errors import MethodError
from paceline.kernels import BlockCode, add_blocks, encode_blocks
from paceline.reducers._memory import scratch

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@dataclass(kw_only=True)
class Coded(Reducer):
    """Each worker sends its vector in a block code to all others. The bytes grow with the number of workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        d = self.code().d
        if d & (d - 1):
            raise MethodError(
                f"{self.name}: d={d} is not a power of two",
                why="blocks are packed into bytes",
                do=f"d={2 ** (d.bit_length() - 1)} or d={2 ** d.bit_length()}",
            )

    def code(self) -> BlockCode:
        raise NotImplementedError

    def key(self, b: Bucket, rank: int) -> int:
        """The key of this message's random rounding; unused by codes that round to the nearest."""
        return 0

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        code, mean, v = self.code(), scratch(self, b, x), x[: b.n]
        messages = await comm.all_gather(encode_blocks(v, code, self.key(b, comm.rank)))
        add_blocks(mean[: b.n], messages, code, factor=1 / comm.world_size, keep=False)
        mean[b.n :] = 0.0

        def left() -> Tensor:
            add_blocks(v, messages[comm.rank :][:1], code, factor=-1.0, keep=True)
            return x

        return Reduced(mean, left)

    def sends(self, b: Bucket, world_size: int) -> int:
        return (world_size - 1) * self.code().bytes(b.n)
