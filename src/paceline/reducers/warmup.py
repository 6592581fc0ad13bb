"""Exact at first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from paceline.knobs import knob
from paceline.parts import Comm, Reduced, Reducer
from paceline.reducers.half import Half
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class Warmup(Reducer):
    """The exact mean for the first steps, when gradients are large and change fast; then the reducer inside.

    It goes by the number of steps that have counted, which all workers agree on.
    """

    name: ClassVar[str] = "warmup"
    paper: ClassVar[str] = "Lin et al., Deep Gradient Compression, ICLR 2018"
    formula: ClassVar[str] = "2·n·s·(W−1)/W at first, then as the reducer inside"

    steps: int = knob(100, "how long the mean is exact", unit="steps", low=1)
    of: Reducer = knob(Half(), "the reducer after that")

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        if b.step < self.steps:
            return Reduced(await comm.mean(x))
        return await self.of.mean(b, x, comm)

    def sends(self, b: Bucket, world: int) -> int:
        if b.step < self.steps:
            return 2 * b.flat.nbytes * (world - 1) // world
        return self.of.sends(b, world)
