"""What one worker owns of one parameter, and what its optimizer steps in that parameter's place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.bucket import Bucket, Slot, memory

if TYPE_CHECKING:
    from paceline.core.engine import Engine

MASTER = "master"  # the name an fp32 master copy has beside the optimizer's own state


@dataclass(frozen=True)
class ShardCut:
    """Where a shard is cut: the stretch from start to stop of its bucket's flat vector, inside one parameter."""

    bucket: Bucket
    slot: Slot
    start: int
    stop: int
    source: Tensor | None = None  # this worker's shard of the bucket's parameters, where those are not always whole
    master: Tensor | None = None  # the fp32 masters of this worker's shard of the bucket, where it keeps any


class Shard:
    """What this worker owns of one parameter."""

    def __init__(self, cut: ShardCut) -> None:
        self.bucket, self.slot, self.source = cut.bucket, cut.slot, cut.source
        self.place(cut.start, cut.stop)
        now, p = self.now(), self.slot.param
        copied = self.source is None and now.untyped_storage().data_ptr() != p.untyped_storage().data_ptr()
        self.apart = copied or cut.master is not None  # the optimizer steps memory that is not the parameter's
        if cut.master is not None:
            self.param = cut.master[self.here].copy_(now)  # what the optimizer steps
        else:
            self.param = now.clone() if self.apart else now

    def place(self, start: int, stop: int) -> None:
        """Note where the shard lies. start, stop: in the bucket's flat vector."""
        self.inside = slice(start - self.slot.start, stop - self.slot.start)  # in the parameter
        self.here = slice(start - self.bucket.own.start, stop - self.bucket.own.start)  # in what this worker owns

    def at_hand(self, *, changed: bool) -> AbstractContextManager[Any]:
        """Have the shards of its bucket and their state in memory inside the context. changed: they are written."""
        return contextlib.nullcontext()

    def remember(self, known: dict[str, Any]) -> dict[str, Any]:
        """Move what an optimizer remembers of this shard to where such state is kept."""
        return known

    def now(self) -> Tensor:
        """Give the parameter's own elements."""
        return memory(self.slot.param)[self.inside] if self.source is None else self.source[self.here]

    def look(self, x: Tensor) -> Tensor:
        """Give the elements of x, which is part of this shard's state, wherever that lies."""
        return x.detach()

    def grad(self) -> Tensor:
        """Give the elements of the gradient."""
        return self.bucket.kept[self.here]

    def take(self) -> None:
        """Before a step: take the parameter's and the gradient's values as they are now."""
        self.follow()
        self.show(None)

    def show(self, mean: Tensor | None) -> None:
        """Let the optimizer find a gradient at what it steps. mean: this shard of it, if it is in fp32 already."""
        p = self.slot.param
        if p.grad is None:
            self.param.grad = None
        elif p.grad is self.slot.shown:
            self.param.grad = self.grad().to(self.param.dtype) if mean is None else mean
        else:  # the user's own
            self.param.grad = self.of(p.grad).to(self.param)

    def write(self, x: Tensor) -> None:
        """Overwrite the parameter's elements, and the master with them."""
        self.now().copy_(x)
        if self.apart:
            self.param.copy_(x)

    def published(self) -> None:
        """Note that the parameter is what the optimizer steps, so that it is not looked through for changes."""

    def follow(self) -> None:
        """Let what the optimizer steps follow the parameter, where the user has written into it."""
        now = self.now()
        if self.apart:
            now = now.to(self.param.device)
            known = self.param.to(now.dtype) == now
            self.param.copy_(torch.where(known, self.param, now.to(self.param.dtype)))
        else:
            self.param.data = now  # p.data may be another than it was

    def norm(self, p: float, dtype: torch.dtype) -> Tensor:
        """Give the p-norm of the gradient."""
        norm: Tensor = torch.linalg.vector_norm(self.grad(), p, dtype=dtype)
        return norm

    def finite(self) -> Tensor:
        """Say whether all of the gradient is finite."""
        finite: Tensor = torch.isfinite(self.grad()).all()
        return finite

    def remembers(self) -> bool:
        """Say whether factors of the gradient are remembered with `scale`, and not multiplied into its memory."""
        return False

    def scale(self, factor: Tensor | float) -> None:
        """Remember a factor of the gradient, where `remembers` says so."""
        raise NotImplementedError

    def of(self, x: Tensor) -> Tensor:
        """Give this shard of a tensor in the parameter's shape."""
        like = torch.empty_like(self.slot.view, dtype=x.dtype, device=self.param.device)
        return memory(like.copy_(x.to_dense() if x.is_sparse else x))[self.inside]


class Owned:
    """The parameters of some engines that are sharded over the workers, and this worker's shards of them."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.ids: set[int] = set()  # trained parameters whose gradient and state are sharded
        self.gathered: set[int] = set()  # parameters that are whole only while a module computes with them
        self.shards: dict[int, Shard] = {}  # shards of trained parameters, by the parameter's id
        self.frozen: dict[int, Shard] = {}  # shards of parameters that are not trained, by the parameter's id
        for engine in engines:
            layout = engine.method.layout
            # A slot with a gradient of the layout's own is sharded, even where no part of it is this worker's.
            ids = {id(s.param) for b in engine.buckets for s in b.slots if s.shown is not None}
            if ids:
                self.ids |= ids
                self.gathered |= layout.sharded_parameters()
                self.frozen |= {id(shard.slot.param): shard for shard in layout.frozen_shards()}
                self.shards |= {id(shard.slot.param): shard for shard in layout.shards()}

    def of_model(self, p: Tensor) -> Shard | None:
        """Give this worker's shard of a parameter, trained or not."""
        return self.shards.get(id(p)) or self.frozen.get(id(p))
