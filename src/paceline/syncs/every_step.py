"""All workers agree on every gradient in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class EveryStep(Sync):
    """Synchronous data parallelism: the same result as one worker with the whole batch."""

    name: ClassVar[str] = "every_step"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.REPLICAS_AGREE, Fact.GRADIENTS_AGREE})

    limit: ClassVar[dict[str, Any]] = {}

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        await ex.keep(b)
