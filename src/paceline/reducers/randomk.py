"""Entries drawn at random, the same ones on every worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Part, Reduced, Reducer
from paceline.knobs import knob
from paceline.reducers._memory import scratch
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@register
@dataclass(kw_only=True)
class RandomK(Reducer):
    """The mean of k = ⌈ratio·n⌉ entries of a bucket, drawn anew in each step from a seed that all workers share.

    All workers send the same entries, so no indices are sent and the values can be summed on the way: a mean of k
    elements, whose bytes do not grow with the number of workers. It needs error feedback.
    """

    name: ClassVar[str] = "randomk"
    paper: ClassVar[str] = "Stich et al., Sparsified SGD with Memory, NeurIPS 2018"
    formula: ClassVar[str] = "2·4·⌈ratio·n⌉·(W−1)/W"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.ELEMENTWISE, Fact.LEFTOVER})

    ratio: float = knob(0.01, "share of the entries that travel", above=0.0, high=1.0)
    seed: int = knob(0, "of the lot", low=0)

    def recipe(self) -> dict[str, Part]:
        from paceline.reducers.error_feedback import ErrorFeedback

        return {"reducer": ErrorFeedback(of=self)}

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        where = self._draw(b)
        mean = scratch(self, b, x).zero_()
        mean[where] = (await comm.mean(x[where].float())).to(x.dtype)
        return Reduced(mean, lambda: x.index_fill_(0, where, 0.0))

    def _draw(self, b: Bucket) -> Tensor:
        """One index from each of k stretches of nearly equal length: no index twice, and no sorting."""
        k, device = self._k(b), b.flat.device
        edges = torch.arange(k + 1, device=device) * b.n // k
        generator = torch.Generator(device).manual_seed((self.seed * 1_000_003 + b.index) * 1_000_003 + b.step)
        lot = torch.rand(k, generator=generator, device=device, dtype=torch.float64)
        return edges[:-1] + (lot * edges.diff()).long()

    def _k(self, b: Bucket) -> int:
        return max(1, math.ceil(self.ratio * b.n))

    def sends(self, b: Bucket, world_size: int) -> int:
        return 2 * 4 * self._k(b) * (world_size - 1) // world_size
