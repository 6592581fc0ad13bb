"""All workers take the same number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.parts import Balance, Speed
from paceline.registry import register


@register
@dataclass(kw_only=True)
class Even(Balance):
    """Each worker takes batch/W samples; if that leaves a remainder, the first workers take one more each."""

    name: ClassVar[str] = "even"

    def shares(self, speeds: Sequence[Speed], batch: int) -> list[int]:
        share, rest = divmod(batch, len(speeds))
        return [share + (rank < rest) for rank in range(len(speeds))]
