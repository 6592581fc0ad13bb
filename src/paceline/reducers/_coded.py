"""What reducers share whose messages cannot be summed on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.errors import MethodError
from paceline.kernels import Code, add_blocks, encode_blocks
from paceline.parts import Comm, Reduced, Reducer
from paceline.reducers._memory import scratch

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@dataclass(kw_only=True)
class Coded(Reducer):
    """Everyone sends its vector to everyone, in a block code. The bytes grow with the world."""

    def __post_init__(self) -> None:
        super().__post_init__()
        d = self.code().d
        if d & (d - 1):
            raise MethodError(
                f"{self.name}: d={d} is not a power of two",
                why="blocks are packed into bytes",
                do=f"d={2 ** (d.bit_length() - 1)} or d={2 ** d.bit_length()}",
            )

    def code(self) -> Code:
        raise NotImplementedError

    def key(self, b: Bucket, rank: int) -> int:
        """Of the dice, where there are any."""
        return 0

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        code, mean, v = self.code(), scratch(self, b, x), x[: b.n]
        everyone = await comm.gather(encode_blocks(v, code, self.key(b, comm.rank)))
        add_blocks(mean[: b.n], everyone, code, factor=1 / comm.world, keep=False)
        mean[b.n :] = 0.0

        def left() -> Tensor:
            add_blocks(v, everyone[comm.rank :][:1], code, factor=-1.0, keep=True)
            return x

        return Reduced(mean, left)

    def sends(self, b: Bucket, world: int) -> int:
        return (world - 1) * self.code().bytes(b.n)
