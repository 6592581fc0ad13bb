"""The vectors: parameters back to back in flat buckets, cut once (cutting.py) and never again.

A bucket is what one exchange is about. It holds the gradients of some parameters back to back in one flat vector
(`flat`), padded so that every worker can own an equal slice; after an exchange each `p.grad` is a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

_ALIGN = 16  # elements: slices start on cache lines and on what vector instructions like
TAIL = 4  # elements behind the gradients, for a word between workers that costs no bytes of its own: ballot.py


class Slot:
    """One parameter's place in its bucket."""

    def __init__(self, name: str, param: Tensor, flat: Tensor, start: int) -> None:
        self.name, self.param = name, param
        self.start, self.stop = start, start + _length(param)
        self.view = _view(flat[self.start : self.stop], param)
        self.arrived = False  # its gradient is part of the backward under way, or of the window
        self.sparse = False  # its gradient came as a sparse tensor, and is given back as one
        self.shown: Tensor | None = None  # by the layout: what p.grad is after an exchange, if not the view
        self.hooks: list[Callable[[Tensor], None]] = []  # of its parameter: pack.py
        self.carried = False  # p.grad was that when another gradient arrived: it is added, as autograd would


class Bucket:
    """A flat vector and the parameters it stands for."""

    def __init__(self, index: int, named: Sequence[tuple[str, Tensor]], world: int) -> None:
        first = named[0][1]
        self.index = index
        self.step = 0  # agreed: how many steps had counted when its exchange began. Schedules go by this
        self.n = sum(_length(p) for _, p in named)
        step = _ALIGN * world
        self.flat = torch.zeros(-(-(self.n + TAIL) // step) * step, dtype=_real(first), device=first.device)
        self.device = first.device
        self.own = slice(0, self.flat.numel())  # of flat, by the layout: what this worker keeps of a mean
        self.kept = self.flat  # ... of the last one
        self.aside: Tensor | None = None  # ... of earlier ones, which the next is added to
        self.slots: list[Slot] = []
        for name, param in named:
            start = self.slots[-1].stop if self.slots else 0
            self.slots.append(Slot(name, param, self.flat, start))
        self.whole, self.start, self.pieces = self, 0, [self]  # what it is a piece of, from where; as what it travels
        self.waiting_for = 0  # parameters whose gradient is still to come in this backward
        self.holds = False  # flat already carries earlier micro-batches of the window
        self._fresh: list[Slot] = []

    def divide(self, cap_bytes: int, world: int) -> None:
        """Let it travel in equal pieces of about this size, so that others can go in between."""
        grain, count = _ALIGN * world, max(round(self.flat.nbytes / cap_bytes), 1)
        length = -(-self.flat.numel() // (count * grain)) * grain
        starts = range(0, self.n, length)
        if len(starts) > 1:
            stops = [*starts[1:], self.flat.numel()]
            self.pieces = [Piece(self, k, *ends) for k, ends in enumerate(zip(starts, stops, strict=True))]

    @property
    def tail(self) -> Tensor:
        return self.flat[self.n : self.n + TAIL]

    @property
    def full(self) -> bool:
        return self.waiting_for == 0

    @property
    def active(self) -> bool:
        """Is anything in it trained at the moment?"""
        return any(s.param.requires_grad for s in self.slots)

    def arm(self) -> None:
        """A backward begins."""
        self.waiting_for = sum(s.param.requires_grad for s in self.slots)
        self._fresh.clear()

    def arrive(self, slot: Slot) -> None:
        """Autograd has written slot.param.grad."""
        slot.arrived = True
        self.waiting_for -= 1
        if slot.param.grad is not slot.view:  # else autograd added into the view by itself
            self._fresh.append(slot)

    def take(self) -> None:
        """Move the gradients that came as tensors of their own into the flat vector."""
        if self.flat.is_meta:
            self._lay(torch.empty_like(self.flat, device=self.device))
        if not self.holds:
            self._put_aside()
            self._clear_absent()
        grads = [_dense(s) for s in self._fresh]
        views = [s.view for s in self._fresh]
        if grads and self.holds:
            torch._foreach_add_(views, grads)
        elif grads:
            torch._foreach_copy_(views, grads)
        for s in self._fresh:
            if s.shown is not None:  # the gradient's own memory is free again
                s.param.grad = s.shown
        self._fresh.clear()

    def free(self) -> None:
        """Give the flat vector's memory back until the next gradients are taken."""
        self._lay(torch.empty_like(self.flat, device="meta"))

    def _lay(self, flat: Tensor) -> None:
        self.flat = flat
        for s, view in zip(self.slots, self.views(flat), strict=True):
            s.view = view

    def _put_aside(self) -> None:
        """A mean that is kept elsewhere and that nobody has zeroed since: the next one is added to it."""
        on = [s.carried or (s.shown is not None and s.param.grad is s.shown) for s in self.slots]
        if any(on):
            self.aside = self.kept.clone()
            for s, carried in zip(self.slots, on, strict=True):
                if not carried:
                    self.aside[max(s.start - self.own.start, 0) : max(s.stop - self.own.start, 0)] = 0.0
                s.carried = False

    def _clear_absent(self) -> None:
        """What did not arrive counts as zero, unless an earlier exchange of this step already put it there."""
        for s in self.slots:
            if s.arrived or s.param.grad is s.view:
                continue
            if s.param.grad is None or s.param.grad is s.shown:
                s.view.zero_()
            else:
                s.view.copy_(_dense(s))

    def hide(self) -> None:
        """In the middle of a window the sum lives in flat alone: nobody clips, unscales or zeroes half a sum."""
        for s in self.slots:
            s.param.grad = None
        self.holds = True

    def bind(self, used: Sequence[bool]) -> None:
        """p.grad becomes the agreed mean; parameters that no worker used keep having none."""
        for s, anywhere in zip(self.slots, used, strict=True):
            if anywhere and s.sparse and s.shown is None:
                s.param.grad = s.view.to_sparse(1)
            elif anywhere and s.param.grad is not s.view:
                s.param.grad = s.view if s.shown is None else s.shown

    def reset(self) -> None:
        """The step is over, one way or the other."""
        self.holds = False
        for s in self.slots:
            s.arrived = False

    def drop(self) -> None:
        """Nobody wants the last mean any more, where it is kept in memory of its own."""
        if self.flat.is_meta and all(s.param.grad is None for s in self.slots):
            self.kept = self.flat[self.own]

    def abandon(self) -> None:
        """A failed exchange may still write into flat: leave it to that and take a new vector."""
        self._lay(torch.zeros_like(self.flat, device=self.device))
        self.kept = self.flat[self.own]
        for piece in self.pieces:
            piece.flat = piece.kept = self.flat[piece.start : piece.start + piece.flat.numel()]
        for s in self.slots:
            s.param.grad = None

    def weights(self, out: Tensor | None = None) -> Tensor:
        """The parameters back to back, as flat has their gradients, in fp32 at least; the padding is zero."""
        if out is None:
            out = torch.zeros_like(self.flat, dtype=torch.promote_types(self.flat.dtype, torch.float32))
        torch._foreach_copy_(self.views(out), [s.param.detach() for s in self.slots])
        return out

    def write(self, x: Tensor) -> None:
        """The parameters become what x says."""
        torch._foreach_copy_([s.param.detach() for s in self.slots], self.views(x))

    def views(self, x: Tensor) -> list[Tensor]:
        """Each parameter's place in a vector over this bucket, in its shape."""
        return [_as(s.view, x[s.start : s.stop]) for s in self.slots]

    def split(self, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A vector over this bucket, by parameter name and in the parameter's shape."""
        for s in self.slots:
            yield s.name, x[s.start : s.stop]

    def __repr__(self) -> str:
        return f"Bucket({self.index}, {len(self.slots)} parameters, {self.n} elements)"


class Piece(Bucket):
    """A stretch of a bucket that travels by itself. The parameters are the whole's."""

    def __init__(self, whole: Bucket, k: int, start: int, stop: int) -> None:
        self.whole, self.pieces, self.slots = whole, [self], []
        self.index = (whole.index + 1) * 1_000_000 + k  # nobody else's
        self.start, self.aside = start, None
        self.flat = self.kept = whole.flat[start:stop]
        self.n, self.step = min(stop, whole.n) - start, 0


def _real(p: Tensor) -> torch.dtype:
    return p.dtype.to_real() if p.is_complex() else p.dtype


def _length(p: Tensor) -> int:
    return p.numel() * (2 if p.is_complex() else 1)


def _dense(slot: Slot) -> Tensor:
    grad = slot.param.grad
    assert grad is not None
    slot.sparse = grad.is_sparse
    return grad.to_dense() if grad.is_sparse else grad.detach()


def _view(flat: Tensor, p: Tensor) -> Tensor:
    """The slice in the parameter's own shape and, where it is dense, its own strides (channels_last stays so)."""
    if p.is_complex():
        return torch.view_as_complex(flat.view(*p.shape, 2))
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset()) if _gapless(p) else flat.view(p.shape)


def _as(view: Tensor, flat: Tensor) -> Tensor:
    if view.is_complex():
        return torch.view_as_complex(flat.view(*view.shape, 2))
    return flat.as_strided(view.shape, view.stride(), flat.storage_offset())


def memory(p: Tensor) -> Tensor:
    """The parameter's elements in the order its bucket has them: its own memory, or a copy where that has gaps."""
    x = p.detach()
    if x.is_complex():
        return torch.view_as_real(x).reshape(-1)
    return x.as_strided((x.numel(),), (1,), x.storage_offset()) if _gapless(x) else x.reshape(-1)


def _gapless(p: Tensor) -> bool:
    extent = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
    return p.numel() > 0 and extent == p.numel() and torch._debug_has_internal_overlap(p) == 0
