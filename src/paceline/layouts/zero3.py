"""Everyone holds a share of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from paceline.registry import register
from paceline.shards import hooks
from paceline.shards.loans import Loans
from paceline.shards.pieces import Shards

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange


@register
@dataclass(kw_only=True)
class Zero3(Shards):
    """Stage 3 of ZeRO: as stage 2, and parameters are gathered before a module computes and given back after.

    With 16-bit parameters and Adam a worker holds 16/W bytes a parameter between steps; while it computes, beside
    them, the buckets of the module that runs and of the next one. Parameters that are frozen from the start are shared
    out too, 2/W.
    """

    name: ClassVar[str] = "zero3"
    paper: ClassVar[str] = "Rajbhandari et al., ZeRO, SC20"
    formula: ClassVar[str] = "n·s·(W−1)/W for the gradients with exact, else as the reducer; twice that for parameters"
    background: ClassVar[bool] = True
    lends: ClassVar[bool] = True

    def attach(self, models: Sequence[torch.nn.Module], ex: Exchange) -> None:
        super().attach(models, ex)
        self.loans = Loans(ex)
        hooks.lend(models, self.loans)
        if ex.world > 1:
            self.loans.lend_frozen(named for model in models for named in model.named_parameters())

    def source(self, b: Bucket, ex: Exchange) -> Tensor:
        self.loans.thaw(b)
        return self.loans.add(b).mine

    def own(self, b: Bucket, ex: Exchange) -> None:
        super().own(b, ex)
        self._hooks += hooks.watch_gradients(b, self.loans)
        b.free()
        b.kept = b.flat[b.own]

    def put_away(self) -> None:
        self.loans.give_back()

    async def keep(self, b: Bucket, ex: Exchange) -> None:
        await self.keep_slice(b, ex)

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        self.loans.give_back()
        result = super().apply(step, ex)
        with torch.no_grad():
            self.put_new(ex)
            for index, pieces in self.pieces.items():
                if index in self.masters:
                    self.loans.of[index].mine.copy_(self.masters[index])
                elif self.offload is None or index not in self.offload.of:
                    for piece in (piece for piece in pieces if piece.apart):
                        piece.now().copy_(piece.param)
        self.loans.ask_first()
        return result

    def put_new(self, ex: Exchange) -> None:
        for b in ex.buckets:
            if self.offload and b.index in self.offload.new:
                self.loans.of[b.index].mine.copy_(self.offload.new.pop(b.index))
                self.published(b)

    def settle(self, ex: Exchange) -> None:
        if self.late:
            self.put_away()
        super().settle(ex)
        self.loans.settle()

    def collect(self, ex: Exchange) -> None:
        super().collect(ex)
        self.loans.give_back()
        self.loans.end_trained()
