"""BAGUA's QAdam: the momentum in eight bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.parts import Part
from paceline.registry import register
from paceline.syncs.onebit_adam import OneBitAdam


@register
@dataclass(kw_only=True)
class QAdam(OneBitAdam):
    """As onebit_adam, with the momentum averaged by int8's scatter-gather in place of one bit each.

    Eight bits are near enough to go without error feedback: nothing is remembered but Adam's own moments.
    """

    name: ClassVar[str] = "qadam"
    paper: ClassVar[str] = "Gan et al., BAGUA (QAdam), VLDB 2021"

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.int8 import Int8

        return {"sync": self, "reducer": Int8()}
