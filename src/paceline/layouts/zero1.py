"""Everyone holds all parameters and gradients, and a share of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.registry import register
from paceline.shards.pieces import Shards

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange


@register
@dataclass(kw_only=True)
class Zero1(Shards):
    """Stage 1 of ZeRO: worker r takes slice r of the mean gradient, steps slice r, and all gather the parameters.

    With 16-bit parameters and Adam a worker holds 4 + 12/W bytes a parameter: 2 for the parameter, 2 for the gradient,
    and of the fp32 master and the two moments its share.
    """

    name: ClassVar[str] = "zero1"
    paper: ClassVar[str] = "Rajbhandari et al., ZeRO, SC20"
    formula: ClassVar[str] = "n·s·(W−1)/W for the gradients with exact, else as the reducer; n·s·(W−1)/W for parameters"

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        b.kept = b.flat[b.own]
        b.kept.copy_(await ex.mine(b, b.flat))
        self.hand(b, ex)

    async def publish(self, b: Bucket, ex: Exchange) -> None:
        waits = self.offload is not None and b.index in self.offload.of and b.index not in self.offload.new
        if b.active and not waits:  # for a step that is late
            b.write((await ex.comm.gather(self._stepped(b))).view(-1))
            self.published(b)

    def _stepped(self, b: Bucket) -> Tensor:
        """This worker's slice of the parameters."""
        if self.offload and b.index in self.offload.new:
            return self.offload.take_new(b.index)
        if b.index in self.masters:
            return self.masters[b.index].to(b.flat.dtype)
        x = torch.zeros(b.own.stop - b.own.start, dtype=b.flat.dtype, device=b.device)
        if pieces := self.pieces[b.index]:
            torch._foreach_copy_([x[piece.here] for piece in pieces], [piece.param for piece in pieces])
        return x
