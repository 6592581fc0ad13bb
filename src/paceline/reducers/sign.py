"""One bit each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.knobs import knob
from paceline.parts import Comm, Part, Reduced, Reducer
from paceline.reducers._bits import pack, rows, unpack
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class Sign(Reducer):
    """Each block of d values as one bit each and their mean magnitude: v ≈ ±mean|v|. Wants error feedback.

    Everyone gets everything: the bytes grow with the world.
    """

    name: ClassVar[str] = "sign"
    paper: ClassVar[str] = "Seide et al., 1-Bit SGD, Interspeech 2014; Karimireddy et al., EF-SignSGD, ICML 2019"
    formula: ClassVar[str] = "(W−1)·(n/8 + 4·⌈n/d⌉)"
    gives: ClassVar[frozenset[str]] = frozenset({"elementwise", "leftover"})

    d: int = knob(1024, "smaller: nearer to the values, more scales to send", unit="values", low=16, high=1 << 20)

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.error_feedback import ErrorFeedback

        return {"reducer": ErrorFeedback(of=self)}

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        v = rows(x.float(), self.d)
        bits = pack((v >= 0).to(torch.uint8).view(-1), 1)
        everyone = await comm.gather(torch.cat([bits, v.abs().mean(1).view(torch.uint8)]))
        mean = torch.zeros_like(v).view(-1)
        for one in everyone:
            mean += self.decode(one, v.numel())
        mine = everyone[comm.rank]
        mean = mean[: x.numel()].div_(comm.world).to(x.dtype)
        return Reduced(mean, lambda: x - self.decode(mine, v.numel())[: x.numel()].to(x.dtype))

    def decode(self, one: Tensor, n: int) -> Tensor:
        bits, scale = one.split([n // 8, one.numel() - n // 8])
        signs = unpack(bits, 1).float().mul_(2).sub_(1).view(-1, self.d)
        return signs.mul_(scale.clone().view(torch.float32)[:, None]).view(-1)

    def sends(self, b: Bucket, world: int) -> int:
        blocks = -(-b.flat.numel() // self.d)
        return (world - 1) * (blocks * self.d // 8 + 4 * blocks)
