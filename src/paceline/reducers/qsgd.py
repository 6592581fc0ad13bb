"""Stochastic rounding to a few uniform levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.kernels import Code, key
from paceline.knobs import knob
from paceline.reducers._coded import Coded
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class QSGD(Coded):
    """Each block of d values: its norm in fp32 and, for each value v, one of the levels -s..s of s·v/norm.

    v is rounded up or down at random, with the probability that makes it right on average, so no error feedback is
    needed. s = 2^(bits-1) - 1. What each worker sends cannot be summed on the way: everyone gets everything, and the
    bytes grow with the world.
    """

    name: ClassVar[str] = "qsgd"
    paper: ClassVar[str] = "Alistarh et al., QSGD, NIPS 2017"
    formula: ClassVar[str] = "(W−1)·⌈n/d⌉·(d·bits/8 + 4)"
    gives: ClassVar[frozenset[str]] = frozenset({"unbiased", "elementwise", "leftover"})

    bits: Literal[4, 2, 8] = knob(4, "fewer: fewer bytes, more noise")
    norm: Literal["max", "l2"] = knob("max", "max (QSGDinf) has less variance, l2 is the paper's")
    d: int = knob(1024, "smaller: less variance, more norms to send", unit="values", low=32, high=1 << 16)
    seed: int = knob(0, "of the rounding; each worker has a stream of its own", low=0)

    def code(self) -> Code:
        return Code("uniform", self.bits, self.d, self.norm)

    def key(self, b: Bucket, rank: int) -> int:
        """A step that is redone throws the same again."""
        return key(self.seed, rank, b.index, b.step)
