"""Stochastic rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from paceline.knobs import knob
from paceline.reducers._bits import l2, rows, uniform, unpack
from paceline.reducers.qsgd import QSGD
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class NUQSGD(QSGD):
    """As qsgd, with the levels where gradients are: 0, 2^-(L-1), ..., 1/4, 1/2, 1 times the block's L2 norm.

    L = 2^(bits-1) - 1 levels besides zero, and a sign. A value between two levels goes to one of them at random,
    with the probability that makes it right on average.
    """

    name: ClassVar[str] = "nuqsgd"
    paper: ClassVar[str] = "Ramezani-Kebrya et al., NUQSGD, JMLR 2021"

    norm: Literal["l2"] = knob("l2", "of a block; the paper's")

    def encode(self, x: Tensor, b: Bucket, rank: int) -> tuple[Tensor, Tensor]:
        levels = 2 ** (self.bits - 1) - 1
        v = rows(x.float(), self.d)
        norms = l2(v)
        scale = torch.where(norms > 0, 1 / norms, 0.0).nan_to_num_(posinf=0.0)
        r = (v * scale[:, None]).abs_().clamp_(max=1.0)
        _, exponent = torch.frexp(r)  # r = m · 2^exponent with m in [1/2, 1)
        below = torch.ldexp(torch.ones_like(r), exponent - 1)  # the power of two at or under r
        smallest = 2.0 ** (1 - levels)
        under = r < smallest
        below.masked_fill_(under, 0.0)
        gap = torch.where(under, smallest, below)  # to the next level: powers of two are as far apart as they are large
        up = uniform(v, self.seed, rank, b.index, b.step).mul_(gap) < r.sub_(below)
        index = torch.where(under, 0, exponent - 1 + levels) + up
        sign = (v < 0).to(torch.uint8) << (self.bits - 1)
        return (index.clamp_(0, levels).to(torch.uint8) | sign).view(-1), norms

    def decode(self, one: Tensor, n: int) -> Tensor:
        levels = 2 ** (self.bits - 1) - 1
        packed, norms = one.split([n * self.bits // 8, one.numel() - n * self.bits // 8])
        table = torch.tensor([0.0] + [2.0 ** (j - levels) for j in range(1, levels + 1)], device=one.device)
        codes = unpack(packed, self.bits).int()
        value = torch.cat([table, -table])[codes].view(-1, self.d)
        return value.mul_(norms.clone().view(torch.float32)[:, None]).view(-1)
