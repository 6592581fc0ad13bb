"""Only the largest entries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.knobs import knob
from paceline.parts import Comm, Part, Reduced, Reducer
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class TopK(Reducer):
    """Of each tensor the k = max(1, ⌈ratio·numel⌉) entries of largest magnitude: value and place, 8 bytes each.

    Workers choose different places, so what arrives is added, not written. Everyone gets everything: the bytes grow
    with the world, and beyond about 1/ratio workers a dense mean is cheaper. Wants error feedback.
    """

    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = "Aji & Heafield, EMNLP 2017; Stich et al., Sparsified SGD with Memory, NeurIPS 2018"
    formula: ClassVar[str] = "(W−1)·8·Σ max(1, ⌈ratio·numel⌉)"
    gives: ClassVar[frozenset[str]] = frozenset({"leftover"})

    ratio: float = knob(0.01, "share of the entries that travel", above=0.0, high=1.0)

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.error_feedback import ErrorFeedback

        return {"reducer": ErrorFeedback(of=self)}

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        where = self.select(b, x)
        mine = torch.cat([x[where].float().view(torch.uint8), where.int().view(torch.uint8)])
        everyone = await comm.gather(mine)
        mean = torch.zeros_like(x)
        for one in everyone.view(comm.world, 2, -1):  # one after the other: the same order, and so bits, everywhere
            value, place = one[0].clone().view(torch.float32), one[1].clone().view(torch.int32)
            mean.index_add_(0, place, value.to(x.dtype))
        return Reduced(mean.div_(comm.world), lambda: x.index_fill_(0, where, 0.0))

    def select(self, b: Bucket, x: Tensor) -> Tensor:
        """Places in the bucket, tensor by tensor."""
        chosen = []
        for s in b.slots:
            if s.stop > s.start:
                part = x[s.start : s.stop].abs()
                chosen.append(part.topk(self._k(part.numel()), sorted=False).indices.add_(s.start))
        return torch.cat(chosen)

    def _k(self, numel: int) -> int:
        return max(1, math.ceil(self.ratio * numel))

    def sends(self, b: Bucket, world: int) -> int:
        return (world - 1) * 8 * sum(self._k(s.stop - s.start) for s in b.slots if s.stop > s.start)
