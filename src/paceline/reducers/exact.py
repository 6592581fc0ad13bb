"""The mean itself, by all-reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Reduced, Reducer
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@register
@dataclass(kw_only=True)
class Exact(Reducer):
    """The exact mean: every byte of every gradient, as torch DDP sends it."""

    name: ClassVar[str] = "exact"
    paper: ClassVar[str] = "Li et al., PyTorch Distributed, VLDB 2020"
    formula: ClassVar[str] = "2·n·s·(W−1)/W"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.UNBIASED, Fact.ELEMENTWISE, Fact.EXACT_MEAN, Fact.CLOSE_MEAN})

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        return Reduced(await comm.mean(x))

    async def mine(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        return Reduced(await comm.reduce_scatter_mean(x))

    def sends(self, b: Bucket, world_size: int) -> int:
        return 2 * b.flat.nbytes * (world_size - 1) // world_size
