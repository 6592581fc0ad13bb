"""Only the largest entries of each tensor are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Part, Reduced, Reducer
from paceline.kernels import largest
from paceline.knobs import knob
from paceline.reducers._memory import scratch
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@register
@dataclass(kw_only=True)
class TopK(Reducer):
    """The k = max(1, ⌈ratio·numel⌉) entries of largest magnitude of each tensor: value and index, 8 bytes each.

    Workers choose different entries, so what arrives is added up. Every worker gets every message, so the bytes grow
    with the number of workers; where the dense mean takes fewer bytes, from about 1/ratio workers on, the dense mean is
    sent. It needs error feedback.
    """

    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = "Aji & Heafield, EMNLP 2017; Stich et al., Sparsified SGD with Memory, NeurIPS 2018"
    formula: ClassVar[str] = "(W−1)·8·Σ max(1, ⌈ratio·numel⌉), at most 2·4·n·(W−1)/W"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.LEFTOVER})

    ratio: float = knob(0.01, "share of the entries that travel", above=0.0, high=1.0)
    how: Literal["exact", "sampled"] = knob("exact", "sampled: by an estimated threshold, much faster on a GPU")

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.error_feedback import ErrorFeedback

        return {"reducer": ErrorFeedback(of=self)}

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        if self._sparse(b, comm.world_size) > dense(b, comm.world_size):
            return Reduced((await comm.mean(x.float())).to(x.dtype))
        where = self.select(b, x)
        mine = torch.stack([x.index_select(0, where).float().view(torch.int32), where.int()])
        mean = scratch(self, b, x).zero_()
        for value, place in await comm.all_gather(mine):  # in rank order, so that all workers get the same bits
            mean.index_add_(0, place, value.view(torch.float32).to(x.dtype))
        return Reduced(mean.div_(comm.world_size), lambda: x.index_fill_(0, where, 0.0))

    def select(self, b: Bucket, x: Tensor) -> Tensor:
        """The indices in the bucket of the chosen entries, tensor by tensor."""
        tensors = [(s.start, x[s.start : s.stop]) for s in b.slots if s.stop > s.start]
        sampled = self.how == "sampled"
        chosen = [largest(t, self._k(t.numel()), sampled=sampled).add_(start) for start, t in tensors]
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=x.device)

    def _k(self, numel: int) -> int:
        return max(1, math.ceil(self.ratio * numel))

    def _sparse(self, b: Bucket, world_size: int) -> int:
        return (world_size - 1) * 8 * sum(self._k(s.stop - s.start) for s in b.slots if s.stop > s.start)

    def sends(self, b: Bucket, world_size: int) -> int:
        return min(self._sparse(b, world_size), dense(b, world_size))


def dense(b: Bucket, world_size: int) -> int:
    """The bytes that one worker sends in an all-reduce of the whole bucket in fp32."""
    return 2 * 4 * b.flat.numel() * (world_size - 1) // world_size
