"""Stochastic rounding to a few uniform levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from paceline.knobs import knob
from paceline.parts import Comm, Reduced, Reducer
from paceline.reducers._bits import l2, pack, rows, uniform, unpack
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class QSGD(Reducer):
    """Each block of d values: its norm in fp32 and, for each value v, one of the levels -s..s of s·v/norm.

    v is rounded up or down at random, with the probability that makes it right on average, so no error feedback is
    needed. s = 2^(bits-1) - 1. What each worker sends cannot be summed on the way: everyone gets everything, and the
    bytes grow with the world.
    """

    name: ClassVar[str] = "qsgd"
    paper: ClassVar[str] = "Alistarh et al., QSGD, NIPS 2017"
    formula: ClassVar[str] = "(W−1)·(n·bits/8 + 4·⌈n/d⌉)"
    gives: ClassVar[frozenset[str]] = frozenset({"unbiased", "elementwise", "leftover"})

    bits: Literal[4, 2, 8] = knob(4, "fewer: fewer bytes, more noise")
    norm: Literal["max", "l2"] = knob("max", "max (QSGDinf) has less variance, l2 is the paper's")
    d: int = knob(1024, "smaller: less variance, more norms to send", unit="values", low=16, high=1 << 20)
    seed: int = knob(0, "of the rounding; each worker has a stream of its own", low=0)

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        codes, norms = self.encode(x, b, comm.rank)
        everyone = await comm.gather(torch.cat([pack(codes, self.bits), norms.view(torch.uint8).flatten()]))
        mean = torch.zeros(codes.numel(), device=x.device)
        for one in everyone:
            mean += self.decode(one, codes.numel())
        mean = mean[: x.numel()].div_(comm.world).to(x.dtype)
        return Reduced(mean, lambda: x - self.decode(everyone[comm.rank], codes.numel())[: x.numel()].to(x.dtype))

    def encode(self, x: Tensor, b: Bucket, rank: int) -> tuple[Tensor, Tensor]:
        s = 2 ** (self.bits - 1) - 1
        v = rows(x.float(), self.d)
        norms = v.abs().amax(1) if self.norm == "max" else l2(v)
        scale = torch.where(norms > 0, s / norms, 0.0).nan_to_num_(posinf=0.0)  # all zeros, or too small to divide by
        level = uniform(v, self.seed, rank, b.index, b.step).addcmul_(v, scale[:, None]).floor_()
        return level.clamp_(-s, s).add_(s).to(torch.uint8).view(-1), norms

    def decode(self, one: Tensor, n: int) -> Tensor:
        s = 2 ** (self.bits - 1) - 1
        packed, norms = one.split([n * self.bits // 8, one.numel() - n * self.bits // 8])
        level = unpack(packed, self.bits).float().sub_(s).view(-1, self.d)
        return level.mul_(norms.clone().view(torch.float32)[:, None] / s).view(-1)

    def sends(self, b: Bucket, world: int) -> int:
        blocks = -(-b.flat.numel() // self.d)
        return (world - 1) * (blocks * self.d * self.bits // 8 + 4 * blocks)
