"""The group of workers does not change during a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.parts import Membership
from paceline.registry import register


@register
@dataclass(kw_only=True)
class Fixed(Membership):
    """A lost worker ends the job: every worker raises an error with its rank and the cause."""

    name: ClassVar[str] = "fixed"

    def commit(self, ok: bool) -> bool:
        return ok
