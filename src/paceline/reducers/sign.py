"""One bit for each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.facts import Fact
from paceline.core.parts import Part
from paceline.kernels import BlockCode
from paceline.knobs import knob
from paceline.reducers._coded import Coded
from paceline.registry import register


@register
@dataclass(kw_only=True)
class Sign(Coded):
    """Each block of d values is sent as their signs and their mean magnitude: v ≈ ±mean|v|. It needs error feedback.

    Every worker gets every message: the bytes grow with the number of workers.
    """

    name: ClassVar[str] = "sign"
    paper: ClassVar[str] = "Seide et al., 1-Bit SGD, Interspeech 2014; Karimireddy et al., EF-SignSGD, ICML 2019"
    formula: ClassVar[str] = "(W−1)·⌈n/d⌉·(d/8 + 4)"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.ELEMENTWISE, Fact.LEFTOVER})

    d: int = knob(1024, "smaller: nearer to the values, more scales to send", unit="values", low=32, high=1 << 16)

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.error_feedback import ErrorFeedback

        return {"reducer": ErrorFeedback(of=self)}

    def code(self) -> BlockCode:
        return BlockCode("sign", 1, self.d, "mean")
