"""Agree on every gradient, in every step, with everyone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.parts import Sync
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange


@register
@dataclass(kw_only=True)
class EveryStep(Sync):
    """Synchronous data parallelism: one worker with the whole batch, computed by many."""

    name: ClassVar[str] = "every_step"
    gives: ClassVar[frozenset[str]] = frozenset({"replicas agree", "gradients agree"})

    limit: ClassVar[dict[str, Any]] = {}

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        await ex.keep(b)
