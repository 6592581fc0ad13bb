"""Stochastic rounding to a few uniform levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Reduced
from paceline.kernels import BlockCode, key
from paceline.knobs import knob
from paceline.reducers._coded import Coded
from paceline.reducers._memory import scratch
from paceline.reducers._slices import mean_by_slices, sent_by_slices
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@register
@dataclass(kw_only=True)
class QSGD(Coded):
    """Each block of d values is sent as its norm in fp32 and, for each value v, one of the levels -s..s of s·v/norm.

    v is rounded up or down at random, with the probability that makes it right on average, so no error feedback is
    needed. s = 2^(bits-1) - 1. Messages cannot be summed on the way, so every worker gets every message, and the bytes
    grow with the number of workers. With route="slices" they do not: worker r averages shard r of all workers, rounds
    it at random once more and sends it to all, which is still right on average, with more noise.
    """

    name: ClassVar[str] = "qsgd"
    paper: ClassVar[str] = "Alistarh et al., QSGD, NIPS 2017"
    formula: ClassVar[str] = "(W−1)·⌈n/d⌉·(d·bits/8 + 4); by slices 2·(W−1)·⌈n/(W·d)⌉·(d·bits/8 + 4)"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.UNBIASED, Fact.ELEMENTWISE, Fact.LEFTOVER})

    bits: Literal[4, 2, 8] = knob(4, "fewer: fewer bytes, more noise")
    norm: Literal["max", "l2"] = knob("max", "max (QSGDinf) has less variance, l2 is the paper's")
    d: int = knob(1024, "smaller: less variance, more norms to send", unit="values", low=32, high=1 << 16)
    route: Literal["gather", "slices"] = knob(
        "gather", "gather: everyone gets everything, as in the paper; slices: fewer bytes from three workers on"
    )
    seed: int = knob(0, "of the rounding; each worker has a stream of its own", low=0)

    def code(self) -> BlockCode:
        return BlockCode("uniform", self.bits, self.d, self.norm)

    def key(self, b: Bucket, rank: int, *more: int) -> int:
        """The key of a random rounding: the same numbers again when a step is repeated."""
        return key(self.seed, rank, b.index, b.step, *more)

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        if self.route == "gather":
            return await super().mean(b, x, comm)
        v, dice = x[: b.n], (self.key(b, comm.rank), self.key(b, comm.rank, 1))
        sliced, added = await mean_by_slices(v, comm, self.code(), dice)
        mean = scratch(self, b, x)
        mean[: b.n], mean[b.n :] = sliced, 0.0

        def left() -> Tensor:
            v.sub_(added())
            return x

        return Reduced(mean, left)

    def sends(self, b: Bucket, world_size: int) -> int:
        return super().sends(b, world_size) if self.route == "gather" else sent_by_slices(b.n, world_size, self.code())
