"""One bit each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.kernels import Code
from paceline.knobs import knob
from paceline.parts import Part
from paceline.reducers._coded import Coded
from paceline.registry import register


@register
@dataclass(kw_only=True)
class Sign(Coded):
    """Each block of d values as one bit each and their mean magnitude: v ≈ ±mean|v|. Wants error feedback.

    Everyone gets everything: the bytes grow with the world.
    """

    name: ClassVar[str] = "sign"
    paper: ClassVar[str] = "Seide et al., 1-Bit SGD, Interspeech 2014; Karimireddy et al., EF-SignSGD, ICML 2019"
    formula: ClassVar[str] = "(W−1)·⌈n/d⌉·(d/8 + 4)"
    gives: ClassVar[frozenset[str]] = frozenset({"elementwise", "leftover"})

    d: int = knob(1024, "smaller: nearer to the values, more scales to send", unit="values", low=32, high=1 << 16)

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.error_feedback import ErrorFeedback

        return {"reducer": ErrorFeedback(of=self)}

    def code(self) -> Code:
        return Code("sign", 1, self.d, "mean")
