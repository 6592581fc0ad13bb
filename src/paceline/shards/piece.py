"""What one worker owns of one parameter, and what its optimizer steps in that parameter's place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from paceline.bucket import Bucket, Slot, memory

STRETCH = 1 << 25  # elements: what is compared at a time takes as much memory again


class Piece:
    """What this worker owns of one parameter."""

    def __init__(
        self, b: Bucket, slot: Slot, start: int, stop: int, source: Tensor | None, home: Tensor | None = None
    ) -> None:
        """start, stop: in the bucket's flat vector. source: where this worker's slice of the parameters lives, if the
        parameters themselves are not always there. home: where the master of that slice does, if not on the device.
        """
        self.bucket, self.slot, self.source = b, slot, source
        self.place(start, stop)
        now, p = self.now(), slot.param
        copied = source is None and now.untyped_storage().data_ptr() != p.untyped_storage().data_ptr()
        self.apart = copied or home is not None
        if home is not None:
            self.param = home[self.here].copy_(now)  # what the optimizer steps
        else:
            self.param = now.clone() if self.apart else now

    def place(self, start: int, stop: int) -> None:
        """start, stop: in the bucket's flat vector."""
        self.inside = slice(start - self.slot.start, stop - self.slot.start)  # of the parameter
        self.here = slice(start - self.bucket.own.start, stop - self.bucket.own.start)  # of this worker's slice

    def at_hand(self, *, changed: bool) -> AbstractContextManager[Any]:
        """Inside, what its bucket's pieces are and remember can be looked at, and changed if that is said."""
        return contextlib.nullcontext()

    def remember(self, known: dict[str, Any]) -> dict[str, Any]:
        """What an optimizer knows of it, to be kept where such things are."""
        return known

    def now(self) -> Tensor:
        """The parameter's own elements."""
        return memory(self.slot.param)[self.inside] if self.source is None else self.source[self.here]

    def look(self, x: Tensor) -> Tensor:
        """What is remembered of it, to be looked at."""
        return x.detach()

    def grad(self) -> Tensor:
        return self.bucket.kept[self.here]

    def take(self) -> None:
        """Before a step: what the parameter and its gradient are now."""
        self.follow()
        self.show(None)

    def show(self, mean: Tensor | None) -> None:
        """The optimizer finds a gradient of what it steps: that of the parameter. mean: if it is already wide."""
        p = self.slot.param
        if p.grad is None:
            self.param.grad = None
        elif p.grad is self.slot.shown:
            self.param.grad = self.grad().to(self.param.dtype) if mean is None else mean
        else:  # the user's own
            self.param.grad = self.of(p.grad).to(self.param)

    def write(self, x: Tensor) -> None:
        """The parameter's elements become these."""
        self.now().copy_(x)
        if self.apart:
            self.param.copy_(x)

    def published(self) -> None:
        """The parameter is what the optimizer steps, and nobody has to look whether it is."""

    def follow(self) -> None:
        """What the optimizer steps is what the parameter is now, where somebody has written into it."""
        now = self.now()
        if self.apart:
            now = now.to(self.param.device)
            known = self.param.to(now.dtype) == now
            self.param.copy_(torch.where(known, self.param, now.to(self.param.dtype)))
        else:
            self.param.data = now  # p.data may be another than it was

    def norm(self, p: float, dtype: torch.dtype) -> Tensor:
        """Of its gradient."""
        norm: Tensor = torch.linalg.vector_norm(self.grad(), p, dtype=dtype)
        return norm

    def finite(self) -> Tensor:
        """Is its gradient?"""
        finite: Tensor = torch.isfinite(self.grad()).all()
        return finite

    def remembers(self) -> bool:
        """Factors of its gradient, in place of multiplying it?"""
        return False

    def scale(self, factor: Tensor | float) -> None:
        """... which is one."""
        raise NotImplementedError

    def of(self, x: Tensor) -> Tensor:
        """This stretch of a tensor in the parameter's shape."""
        like = torch.empty_like(self.slot.view, dtype=x.dtype, device=self.param.device)
        return memory(like.copy_(x.to_dense() if x.is_sparse else x))[self.inside]


def take_all(pieces: Sequence[Piece], master: Tensor) -> None:
    """`take` for all pieces of a bucket whose masters lie in one vector: a few operations in place of a few each."""
    if not pieces:
        return
    b, now = pieces[0].bucket, pieces[0].source
    if now is None:
        now = torch.empty_like(master, dtype=b.flat.dtype)
        torch._foreach_copy_([now[piece.here] for piece in pieces], [piece.now() for piece in pieces])
    for known, theirs in zip(master.split(STRETCH), now.split(STRETCH), strict=True):
        wide = theirs.to(known.dtype)
        known.copy_(torch.where(known.to(theirs.dtype) == theirs, known, wide, out=wide))
    mean = b.kept.to(master.dtype)
    for piece in pieces:
        piece.show(mean[piece.here])
