"""Stochastic rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.kernels import BlockCode
from paceline.knobs import knob
from paceline.reducers.qsgd import QSGD
from paceline.registry import register


@register
@dataclass(kw_only=True)
class NUQSGD(QSGD):
    """QSGD with levels that are dense near zero: 0, 2^-(L-1), ..., 1/4, 1/2, 1 times the block's L2 norm.

    There are L = 2^(bits-1) - 1 levels besides zero, and a sign. A value between two levels is rounded to one of them
    at random, with the probability that makes it right on average.
    """

    name: ClassVar[str] = "nuqsgd"
    paper: ClassVar[str] = "Ramezani-Kebrya et al., NUQSGD, JMLR 2021"

    norm: Literal["l2"] = knob("l2", "of a block; the paper's")

    def code(self) -> BlockCode:
        return BlockCode("powers", self.bits, self.d, self.norm)
