"""Every worker holds a shard of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.core.facts import Fact
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.offload.nvme import OnDisk
from paceline.offload.params import ParameterStores
from paceline.registry import register
from paceline.sharding import hooks
from paceline.sharding.sharded import ShardedLayout
from paceline.sharding.unshard import Unsharding

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange
    from paceline.core.shard import Shard
    from paceline.offload.params import ParameterStore


@register
@dataclass(kw_only=True)
class Zero3(ShardedLayout):
    """Stage 3 of ZeRO: as stage 2, and parameters are gathered before a module computes and given back after.

    With 16-bit parameters and Adam a worker holds 16/W bytes a parameter between steps; while it computes, beside
    them, the buckets of the module that runs and of the next one. Parameters that are frozen from the start are
    sharded too, 2/W. With `params` elsewhere those buckets are all there is of the parameters on the device.
    """

    name: ClassVar[str] = "zero3"
    paper: ClassVar[str] = "Rajbhandari et al., ZeRO, SC20"
    formula: ClassVar[str] = "n·s·(W−1)/W for the gradients with exact, else as the reducer; twice that for parameters"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.GATHERS_IN_FORWARD})
    background: ClassVar[bool] = True
    shards_parameters: ClassVar[bool] = True

    params: Literal["device", "cpu", "nvme"] = knob("device", "with another store: where the parameters live")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.params != "device" and self.store == "device":
            raise MethodError(
                f"{self.name}: params={self.params} with store=device",
                why="what is stepped on the device is needed there, and is most of the memory",
                do="give store='cpu' or store='nvme' too",
            )

    def on_disk(self) -> bool:
        return super().on_disk() or self.params == "nvme"

    def attach(self, models: Sequence[torch.nn.Module], ex: Exchange) -> None:
        super().attach(models, ex)
        named = [named for model in models for named in model.named_parameters()]
        shares = {t: sum(p.nbytes for _, p in named if p.requires_grad is t) // ex.world_size for t in (True, False)}
        self.param_stores = ParameterStores(Path(self.path) if self.params == "nvme" else None, ex.rank, shares)
        self.unsharding = Unsharding(ex, self._store_of)
        self._models = models
        hooks.unshard_for_modules(models, self.unsharding)
        if ex.world_size > 1 or self.params != "device":
            self.unsharding.shard_frozen(named)

    def _store_of(self, b: Bucket) -> ParameterStore | None:
        """Say where this worker's shard of a bucket's parameters lies. None: on the device, like its state."""
        trained = b.index >= 0
        offloaded = self.offload.buckets.get(b.index) if self.offload else None
        if self.params == "device" or (trained and offloaded is None):
            return None
        drafts = offloaded is not None and isinstance(offloaded.vectors, OnDisk)
        store = self.param_stores.add(b.own.stop - b.own.start, b.flat.dtype, b.device, trained=trained, drafts=drafts)
        if offloaded is not None:
            offloaded.store = store
        return store

    def source(self, b: Bucket, ex: Exchange) -> Tensor | None:
        hooks.unshard_for_modules(self._models, self.unsharding)  # there may be new ones
        self.unsharding.thaw(b)
        sharded = self.unsharding.add(b)
        return sharded.shard if sharded.store is None else None

    def own(self, b: Bucket, ex: Exchange) -> None:
        super().own(b, ex)
        self._hooks += hooks.watch_gradients(b, self.unsharding)
        b.free()
        b.keep(b.flat[b.own])

    def sharded_parameters(self) -> set[int]:
        return set(self.unsharding.bucket_of)

    def frozen_shards(self) -> list[Shard]:
        return self.unsharding.frozen_shards()

    def reshard(self) -> None:
        self.unsharding.reshard()

    def begin_micro_batch(self) -> None:
        self.unsharding.order[True].begin_micro_batch()

    def joining(self, ex: Exchange, left: int) -> AbstractContextManager[None]:
        return self.unsharding.joining(left)

    def give_up(self, ex: Exchange) -> None:
        self.unsharding.give_up()

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        await self.keep_shard(b, ex)

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        self.unsharding.reshard()
        result = super().apply(step, ex)
        with torch.no_grad():
            self.put_new(ex)
            for index, shards in self.bucket_shards.items():
                if index in self.masters:
                    self.unsharding.buckets[index].shard.copy_(self.masters[index])
                elif self.offload is None or index not in self.offload.buckets:
                    for shard in (shard for shard in shards if shard.apart):
                        shard.now().copy_(shard.param)
        self.unsharding.changed()
        return result

    def put_new(self, ex: Exchange) -> None:
        for b in ex.buckets:
            if self.offload and b.index in self.offload.new:
                self.unsharding.buckets[b.index].shard.copy_(self.offload.take_new(b.index))
                self.published(b)

    def settle(self, ex: Exchange) -> None:
        if self.step == "late" and self.offload is not None:
            self.reshard()
        super().settle(ex)
        self.unsharding.settle()

    def collect(self, ex: Exchange) -> None:
        super().collect(ex)
        self.unsharding.reshard()
        self.unsharding.make_trained_whole()
        self.param_stores.close_trained()
