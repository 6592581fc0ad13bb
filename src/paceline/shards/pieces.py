"""What the stages of ZeRO share: who owns what of a bucket, and an optimizer that steps only that.

[Note: shards] A bucket's flat vector is cut into as many equal slices as there are workers, and worker r owns slice r:
of the parameters, of the mean gradient, of the optimizer's state. A slice begins and ends anywhere, so it holds pieces
of parameters, and a piece belongs to its parameter's group: weight decay and rates are the group's. While the user's
optimizer steps, its groups hold this worker's pieces in place of the parameters; at any other time they are as the
user knows them, so a scheduler that changes a rate there changes it here. The optimizer makes moments for what it is
given, so its state is a slice without knowing.

A piece of a 16-bit parameter is stepped in fp32, on a master copy that only its owner has. A parameter that somebody
has written into since the last step is noticed, and the master follows.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.bucket import Bucket, Slot, memory
from paceline.comm import NARROW
from paceline.parts import Layout
from paceline.shards import elementwise, hooks, whole
from paceline.shards.grad import SlicedGrad

if TYPE_CHECKING:
    from paceline.exchange import Exchange


class Piece:
    """What this worker owns of one parameter."""

    def __init__(self, b: Bucket, slot: Slot, start: int, stop: int, source: Tensor | None) -> None:
        """start, stop: in the bucket's flat vector. source: where this worker's slice of the parameters lives, if the
        parameters themselves are not always there.
        """
        self.bucket, self.slot, self.source = b, slot, source
        self.inside = slice(start - slot.start, stop - slot.start)  # of the parameter
        self.here = slice(start - b.own.start, stop - b.own.start)  # of this worker's slice
        now, p = self.now(), slot.param
        copied = source is None and now.untyped_storage().data_ptr() != p.untyped_storage().data_ptr()
        self.apart = copied or p.dtype in NARROW
        wide = torch.float32 if p.dtype in NARROW else now.dtype
        self.param = now.to(wide, copy=True) if self.apart else now  # what the optimizer steps

    def now(self) -> Tensor:
        """The parameter's own elements."""
        return memory(self.slot.param)[self.inside] if self.source is None else self.source[self.here]

    def grad(self) -> Tensor:
        return self.bucket.kept[self.here]

    def take(self) -> None:
        """Before a step: what the parameter and its gradient are now."""
        now, p = self.now(), self.slot.param
        if self.apart:
            known = self.param.to(now.dtype) == now
            self.param.copy_(torch.where(known, self.param, now.to(self.param.dtype)))
        else:
            self.param.data = now  # p.data may be another than it was
        if p.grad is None:
            self.param.grad = None
        elif p.grad is self.slot.shown:
            self.param.grad = self.grad().to(self.param.dtype)
        else:  # the user's own
            self.param.grad = self.of(p.grad).to(self.param.dtype)

    def write(self, x: Tensor) -> None:
        """The parameter's elements become these."""
        self.now().copy_(x)
        if self.apart:
            self.param.copy_(x)

    def of(self, x: Tensor) -> Tensor:
        """This stretch of a tensor in the parameter's shape."""
        like = torch.empty_like(self.slot.view, dtype=x.dtype, device=self.param.device)
        return memory(like.copy_(x.to_dense() if x.is_sparse else x))[self.inside]


@dataclass(kw_only=True)
class Shards(Layout):
    """[Note: shards]. A stage says what becomes of the gradients and of the parameters."""

    lends: ClassVar[bool] = False  # parameters are whole only while a module computes with them

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pieces: dict[int, list[Piece]] = {}  # by bucket
        self._hooks: list[RemovableHandle] = []
        self._shared: Any = None  # the optimizer's state, while it shows a whole one
        self._coming: dict[int, Any] = {}  # a state that is being loaded, by the parameter's number

    def check(self, optimizer: Optimizer) -> None:
        elementwise.check(self.name, optimizer)

    def rests(self, params: Sequence[Tensor]) -> bool:
        return not any(p.dtype in NARROW for p in params)

    def attach(self, models: Sequence[torch.nn.Module], ex: Exchange) -> None:
        hooks.show_whole(self, ex)

    def own(self, b: Bucket, ex: Exchange) -> None:
        length = b.flat.numel() // ex.world
        b.own = slice(ex.rank * length, (ex.rank + 1) * length)
        b.kept = b.flat[b.own]
        ends = [(s, max(s.start, b.own.start), min(s.stop, b.own.stop)) for s in b.slots]
        source = self.source(b, ex)
        self.pieces[b.index] = [Piece(b, s, start, stop, source) for s, start, stop in ends if start < stop]
        for s in b.slots:
            s.shown = SlicedGrad(s.view, self._slices(b, s), ex.comm)
        self._hooks += hooks.watch_arrivals(b.slots)
        whole.take(b, self.pieces[b.index], ex.optimizer)

    def source(self, b: Bucket, ex: Exchange) -> Tensor | None:
        """A vector of its own for this worker's slice of the parameters, where they are not whole on every worker."""
        return None

    def put_away(self) -> None:
        """Slices are going to be written from outside: what was made whole out of them goes."""

    async def keep_slice(self, b: Bucket, ex: Exchange) -> None:
        """Of the mean this worker's slice stays, and the bucket's memory is given back."""
        b.kept = (await ex.mine(b, b.flat)).clone()
        b.free()

    def _slices(self, b: Bucket, slot: Slot) -> Callable[[], list[Tensor]]:
        mine = [piece for piece in self.pieces[b.index] if piece.slot is slot]
        return lambda: [piece.grad() for piece in mine]

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        mine = [piece for pieces in self.pieces.values() for piece in pieces]
        with torch.no_grad():
            for piece in mine:
                piece.take()
        try:
            with _holding(ex.optimizer, mine):
                return step()
        finally:
            for piece in mine:
                piece.param.grad = None

    # ------------------------------------------------------------------------------------------------ whole

    def collect(self, ex: Exchange) -> None:
        ex.optimizer.state = whole.state(self.pieces, ex)
        for b in ex.buckets:
            for s in b.slots:
                s.param.grad = None if s.param.grad is s.shown else s.param.grad
        for hook in self._hooks:
            hook.remove()
        self.pieces.clear()
        self._hooks.clear()

    def saving(self, ex: Exchange) -> None:
        if self.pieces:
            self._shared, ex.optimizer.state = ex.optimizer.state, whole.state(self.pieces, ex)

    def saved(self, ex: Exchange) -> None:
        if self.pieces:
            ex.optimizer.state, self._shared = self._shared, None

    def loading(self, saved: dict[str, Any]) -> dict[str, Any]:
        if not self.pieces:
            return saved
        self._coming = saved["state"]
        return {**saved, "state": {}}  # the optimizer would make it whole on every worker first

    def loaded(self, ex: Exchange) -> None:
        if not self.pieces:
            return
        params = [p for group in ex.optimizer.param_groups for p in group["params"]]
        for i, state in self._coming.items():
            ex.optimizer.state[params[i]] = dict(state)
        self._coming = {}
        for b in ex.buckets:
            whole.take(b, self.pieces[b.index], ex.optimizer)


@contextlib.contextmanager
def _holding(optimizer: Optimizer, pieces: Sequence[Piece]) -> Iterator[None]:
    """Inside, the optimizer's groups hold pieces in place of parameters."""
    of: dict[int, list[Tensor]] = defaultdict(list)
    for piece in pieces:
        of[id(piece.slot.param)].append(piece.param)
    groups, params = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    for group in groups:
        group["params"] = [x for p in group["params"] for x in of[id(p)]]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, its in zip(groups, params, strict=True):
            group["params"] = its
