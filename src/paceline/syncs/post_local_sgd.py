"""Synchronous SGD while the learning rate is high, local SGD after it has dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.knobs import knob
from paceline.registry import register
from paceline.syncs.local_sgd import LocalSGD

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange

DROP = 0.5  # share of the highest learning rate so far; a rate above it only decays, a rate below it has dropped


@register
@dataclass(kw_only=True)
class PostLocalSGD(LocalSGD):
    """Gradients are averaged exactly until step `start`, or until the learning rate first drops; then local_sgd.

    While the learning rate is high, workers that train alone drift apart too far; once it is low, a little drift even
    helps to find flat minima. A drop is a fall below half of the highest learning rate so far, in the first parameter
    group.
    """

    name: ClassVar[str] = "post_local_sgd"
    paper: ClassVar[str] = "Lin et al., Don't use large mini-batches, use local SGD, ICLR 2020"
    formula: ClassVar[str] = "2·n·s·(W−1)/W at first, then as the reducer, once in H steps"

    start: int = knob(0, "the step from which workers train alone; 0: at the first drop", unit="steps", low=0)

    def due(self, step: int) -> bool:
        return step < (self.start or self.state.get("start", step + 1))

    def agrees(self, step: int) -> bool:
        return not self.due(step) and super().agrees(step)

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        await ex.exact(b.flat)  # the reducer's leftovers are differences of weights, and must not mix with gradients

    async def before_step(self, b: Bucket, ex: Exchange) -> None:
        if not self.due(ex.step):
            await super().before_step(b, ex)
        elif b.index == 0 and not self.start:
            lr = float(ex.optimizer.param_groups[0]["lr"])
            highest = self.state["highest"] = max(lr, self.state.get("highest", 0.0))
            if lr < DROP * highest:
                self.state["start"] = ex.step + 1

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        if not self.due(ex.step):
            await super().on_step(b, ex)
