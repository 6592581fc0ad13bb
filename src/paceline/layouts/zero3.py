"""Everyone holds a share of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.registry import register
from paceline.shards import hooks
from paceline.shards.loans import Loans
from paceline.shards.pieces import Shards
from paceline.stores.nvme import OnDisk
from paceline.stores.params import Homes

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange
    from paceline.shards.piece import Piece
    from paceline.stores.params import Home


@register
@dataclass(kw_only=True)
class Zero3(Shards):
    """Stage 3 of ZeRO: as stage 2, and parameters are gathered before a module computes and given back after.

    With 16-bit parameters and Adam a worker holds 16/W bytes a parameter between steps; while it computes, beside
    them, the buckets of the module that runs and of the next one. Parameters that are frozen from the start are shared
    out too, 2/W. With `params` elsewhere those buckets are all there is of the parameters on the device.
    """

    name: ClassVar[str] = "zero3"
    paper: ClassVar[str] = "Rajbhandari et al., ZeRO, SC20"
    formula: ClassVar[str] = "n·s·(W−1)/W for the gradients with exact, else as the reducer; twice that for parameters"
    background: ClassVar[bool] = True
    lends: ClassVar[bool] = True

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
        sizes = {trained: sum(p.nbytes for _, p in named if p.requires_grad is trained) for trained in (True, False)}
        shares = {trained: size // ex.world for trained, size in sizes.items()}
        self.homes = Homes(Path(self.path) if self.params == "nvme" else None, ex.rank, shares)
        self.loans = Loans(ex, self._home)
        hooks.lend(models, self.loans)
        if ex.world > 1 or self.params != "device":
            self.loans.lend_frozen(named)

    def _home(self, b: Bucket) -> Home | None:
        """Of this worker's slice of its parameters, if not the device. What is stepped on the device stays there."""
        trained = b.index >= 0
        away = self.offload.of.get(b.index) if self.offload else None
        if self.params == "device" or (trained and away is None):
            return None
        drafts = away is not None and isinstance(away.vectors, OnDisk)
        home = self.homes.add(b.own.stop - b.own.start, b.flat.dtype, b.device, trained=trained, drafts=drafts)
        if away is not None:
            away.home = home
        return home

    def source(self, b: Bucket, ex: Exchange) -> Tensor | None:
        self.loans.thaw(b)
        loan = self.loans.add(b)
        return loan.mine if loan.home is None else None

    def own(self, b: Bucket, ex: Exchange) -> None:
        super().own(b, ex)
        self._hooks += hooks.watch_gradients(b, self.loans)
        b.free()
        b.kept = b.flat[b.own]

    def lent(self) -> set[int]:
        return set(self.loans.home)

    def frozen(self) -> list[Piece]:
        return self.loans.frozen()

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
                self.loans.of[b.index].mine.copy_(self.offload.take_new(b.index))
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
        self.homes.close_trained()
