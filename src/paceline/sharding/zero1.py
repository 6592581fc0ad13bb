"""Every worker holds all parameters and gradients, and a shard of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.registry import register
from paceline.sharding.sharded import ShardedLayout

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class Zero1(ShardedLayout):
    """Stage 1 of ZeRO: worker r takes shard r of the mean gradient, steps shard r, and all gather the parameters.

    With 16-bit parameters and Adam a worker holds 4 + 12/W bytes a parameter: 2 for the parameter, 2 for the gradient,
    and of the fp32 master and the two moments its share.
    """

    name: ClassVar[str] = "zero1"
    paper: ClassVar[str] = "Rajbhandari et al., ZeRO, SC20"
    publishes: ClassVar[bool] = True
    formula: ClassVar[str] = "n·s·(W−1)/W for the gradients with exact, else as the reducer; n·s·(W−1)/W for parameters"

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        b.keep(b.flat[b.own])
        b.kept.copy_(await ex.mine(b, b.flat))
        self.offload_gradient(b, ex)

    async def publish(self, b: Bucket, ex: Exchange) -> None:
        late = self.offload is not None and self.offload.is_late(b.index)
        # A parameter that was frozen between backward and step is stepped all the same, as its gradient is there.
        stepped = b.active or any(s.param.grad is not None for s in b.slots)
        if stepped and not late:
            b.write((await ex.comm.all_gather(self._stepped(b))).view(-1))
            self.published(b)

    def _stepped(self, b: Bucket) -> Tensor:
        """Give this worker's shard of the new parameters."""
        if self.offload and b.index in self.offload.new:
            return self.offload.take_new(b.index)
        if b.index in self.masters:
            return self.masters[b.index].to(b.flat.dtype)
        x = torch.zeros(b.own.stop - b.own.start, dtype=b.flat.dtype, device=b.device)
        if shards := self.bucket_shards[b.index]:
            torch._foreach_copy_([x[shard.here] for shard in shards], [shard.param for shard in shards])
        return x
