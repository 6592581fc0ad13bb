"""BAGUA's QAdam: the momentum in eight bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.parts import Part
from paceline.registry import register
from paceline.syncs.onebit_adam import OneBitAdam


@register
@dataclass(kw_only=True)
class QAdam(OneBitAdam):
    """1-bit Adam with the momentum averaged by the reducer int8 instead of by signs.

    Eight bits are precise enough without error feedback: there is no state besides Adam's own moments.
    """

    name: ClassVar[str] = "qadam"
    paper: ClassVar[str] = "Gan et al., BAGUA (QAdam), VLDB 2021"

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.int8 import Int8

        return {"sync": self, "reducer": Int8()}
