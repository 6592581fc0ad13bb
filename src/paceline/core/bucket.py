"""The vectors: parameters back to back in flat buckets, cut once (cutting.py) and never again.

A bucket is what one exchange is about. It holds the gradients of some parameters back to back in one flat vector
(`flat`), padded so that every worker can own an equal shard; after an exchange each `p.grad` is a view of it, or what
the layout shows in its place. The bucket owns where its gradients are: others ask it to `take` them, to `keep` a mean,
to `bind` it to the parameters, to `abandon` it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.blank import blank
from paceline.errors import UsageError

_ALIGN = 16  # elements: shards start on cache lines and on what vector instructions like
TAIL = 4  # elements behind the gradients, for a word between workers that costs no bytes of its own: vote.py


class Slot:
    """One parameter's place in its bucket."""

    def __init__(self, name: str, param: Tensor, flat: Tensor, start: int) -> None:
        self.name, self.param = name, param
        self.start, self.stop = start, start + _length(param)
        self.view = _view(flat[self.start : self.stop], param)
        self.arrived = False  # its gradient is part of the backward under way, or of the window
        self.sparse = False  # its gradient came as a sparse tensor, and is given back as one
        self.shown: Tensor | None = None  # set by the layout: what p.grad is after an exchange, if not the view
        self.accumulator: object = None  # autograd's node that adds to p.grad, kept alive for its hooks: hooks.py
        self.renew: Callable[[], None] | None = None  # set by the layout: let another object be `shown` from now on
        self.hooks: list[Callable[[Any], None]] = []  # of its parameter: engines.py
        self.known: Tensor | None = None  # p.grad as the engine knows it: by_hand.py
        self.known_version = -1
        self.carried = False  # p.grad was `shown` when another gradient arrived, which is added as autograd would


class Bucket:
    """A flat vector and the parameters it stands for."""

    def __init__(self, index: int, named: Sequence[tuple[str, Tensor]], world_size: int) -> None:
        first = named[0][1]
        self.index = index
        self.step = 0  # agreed: how many steps had counted when its exchange began. Schedules go by this
        self.rate = 0.0  # agreed: the sum of the groups' learning rates then. Policies look whether it falls
        self.n = sum(_length(p) for _, p in named)
        step = _ALIGN * world_size
        self.flat = torch.zeros(-(-(self.n + TAIL) // step) * step, dtype=_real(first), device=first.device)
        self.device = first.device
        self.own = slice(0, self.flat.numel())  # set by the layout: which stretch of a mean this worker keeps
        self.kept = self.flat  # what it has kept of the last mean: see `keep`
        self.aside: Tensor | None = None  # what it has kept of earlier ones, which the next is added to
        self.slots: list[Slot] = []
        for name, param in named:
            start = self.slots[-1].stop if self.slots else 0
            self.slots.append(Slot(name, param, self.flat, start))
        self.whole: Bucket = self  # what it is a chunk of
        self.start = 0  # where in that it begins
        self.chunks: list[Bucket] = [self]  # as what it travels
        self.waiting_for = 0  # parameters whose gradient is still to come in this backward
        self.holds = False  # flat already carries earlier micro-batches of the window
        self._fresh: list[Slot] = []
        self._came: set[int] = set()  # the ids of the slots that have arrived in this backward
        self._taken = False  # ... before their gradients were taken

    def divide(self, cap_bytes: int, world_size: int) -> None:
        """Let it travel in equal chunks of about this size, so that others can go in between."""
        grain, count = _ALIGN * world_size, max(round(self.flat.nbytes / cap_bytes), 1)
        length = -(-self.flat.numel() // (count * grain)) * grain
        starts = range(0, self.n, length)
        if len(starts) > 1:
            stops = [*starts[1:], self.flat.numel()]
            self.chunks = [Chunk(self, k, *ends) for k, ends in enumerate(zip(starts, stops, strict=True))]

    @property
    def tail(self) -> Tensor:
        """The elements behind the gradients that carry a whisper."""
        return self.flat[self.n : self.n + TAIL]

    @property
    def full(self) -> bool:
        """Have all gradients of the backward under way arrived?"""
        return self.waiting_for == 0

    @property
    def active(self) -> bool:
        """Is anything in it trained at the moment?"""
        return any(s.param.requires_grad for s in self.slots)

    def arm(self) -> None:
        """A backward begins."""
        self.waiting_for = sum(s.param.requires_grad for s in self.slots)
        self._fresh.clear()
        self._came.clear()
        self._taken = False

    def arrive(self, slot: Slot) -> None:
        """Autograd has written slot.param.grad."""
        if id(slot) in self._came:
            if self._taken:
                raise UsageError(
                    f"{slot.name} gets a second gradient in one backward, after the first one has left",
                    why="its module is used in several reentrant checkpoints, and each is a backward of its own",
                    do="give checkpoint(..., use_reentrant=False)",
                )
            return  # added to what is there
        self._came.add(id(slot))
        slot.arrived = True
        self.waiting_for -= 1
        if slot.param.grad is not slot.view:  # else autograd added into the view by itself
            self._fresh.append(slot)

    def take(self) -> None:
        """Move the gradients that came as tensors of their own into the flat vector."""
        self._taken = True
        if self.flat.is_meta:
            self._lay(blank(torch.empty_like(self.flat, device=self.device)))
        if not self.holds:
            self._put_aside()
            self._fill_absent()
        grads = self.fresh()
        views = [s.view for s in self._fresh]
        if grads and self.holds:
            torch._foreach_add_(views, grads)
        elif grads:
            torch._foreach_copy_(views, grads)
        for s in self._fresh:
            if s.shown is not None:  # the gradient's own memory is free again
                s.param.grad = s.shown
        self._fresh.clear()
        self.holds = False  # what it carried leaves with these, unless `hide` says that it is kept

    def fresh(self) -> list[Tensor]:
        """The gradients that came as tensors of their own and have not been taken."""
        return [_dense(s) for s in self._fresh]

    def drop_fresh(self) -> None:
        """Forget the gradients of a backward that raised."""
        for s in self.slots:
            s.param.grad, s.arrived, s.carried = None, False, False
        self._fresh.clear()
        self._came.clear()

    def zero(self) -> None:
        """Have zeros to send, in the place of gradients that are not to come."""
        if self.flat.is_meta:
            self._lay(torch.empty_like(self.flat, device=self.device))
        self.flat.zero_()
        self.aside = None

    def free(self) -> None:
        """Give the flat vector's memory back until the next gradients are taken."""
        blank(self.flat)
        self._lay(torch.empty_like(self.flat, device="meta"))

    def _lay(self, flat: Tensor) -> None:
        self.flat = flat
        for s, view in zip(self.slots, self.views(flat), strict=True):
            s.view = view

    def _put_aside(self) -> None:
        """Remember a mean that is kept elsewhere and was not zeroed since: the next one is added to it."""
        on = [s.carried or (s.shown is not None and s.param.grad is s.shown) for s in self.slots]
        if any(on):
            self.aside = self.kept.clone()
            for s, carried in zip(self.slots, on, strict=True):
                if not carried:
                    self.aside[max(s.start - self.own.start, 0) : max(s.stop - self.own.start, 0)] = 0.0
                s.carried = False
        for s, carried in zip(self.slots, on, strict=True):
            # A reference beside the slot's own and this call's: the user has kept an earlier mean, which is over.
            if s.renew is not None and not carried and sys.getrefcount(s.shown) > 2:
                s.renew()

    def _fill_absent(self) -> None:
        """Write what this backward did not bring: what p.grad holds beside the mean that was put aside, or zero.

        A gradient that the user has thrown away since an earlier backward of this step has not arrived.
        """
        fresh = {id(s) for s in self._fresh}
        for s in self.slots:
            if id(s) in fresh:
                continue
            grad = s.param.grad
            s.arrived = grad is not None
            if grad is None or grad is s.shown:
                s.view.zero_()
            elif grad is not s.view:
                s.view.copy_(_dense(s))

    def keep(self, mean: Tensor) -> None:
        """This is what the worker has of the last mean: a stretch of `flat`, or memory of its own."""
        self.kept = mean

    def add_aside(self) -> None:
        """Add what was kept of earlier means of this step."""
        if self.aside is not None:
            self.kept.add_(self.aside)
            self.aside = None

    def hide(self) -> None:
        """In the middle of a window the sum lives in flat alone, so that half a sum cannot be clipped or zeroed."""
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
        self.holds, self.aside = False, None
        for s in self.slots:
            s.arrived = s.carried = False

    def drop(self) -> None:
        """Free the last mean, where it is kept in memory of its own and no p.grad shows it any more."""
        if self.flat.is_meta and all(s.param.grad is None for s in self.slots):
            self.kept = self.flat[self.own]

    def abandon(self) -> None:
        """A failed exchange may still write into flat: leave it to that and take a new vector."""
        self._lay(torch.zeros_like(self.flat, device=self.device))
        self.kept = self.flat[self.own]
        for chunk in self.chunks:
            chunk.flat = chunk.kept = self.flat[chunk.start : chunk.start + chunk.flat.numel()]
        self.aside, self.holds = None, False
        self._fresh.clear()
        for s in self.slots:
            s.param.grad, s.carried = None, False

    def weights(self, out: Tensor | None = None) -> Tensor:
        """The parameters back to back, as flat has their gradients, in fp32 at least; the padding is zero."""
        if out is None:
            out = torch.zeros_like(self.flat, dtype=torch.promote_types(self.flat.dtype, torch.float32))
        torch._foreach_copy_(self.views(out), [s.param.detach() for s in self.slots])
        return out

    def write(self, x: Tensor) -> None:
        """Copy a vector over this bucket into the parameters."""
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


class Chunk(Bucket):
    """A stretch of a bucket that travels by itself. The parameters are the whole bucket's."""

    def __init__(self, whole: Bucket, k: int, start: int, stop: int) -> None:
        self.whole, self.chunks, self.slots = whole, [self], []
        self.index = (whole.index + 1) * 1_000_000 + k  # no other bucket has it
        self.start, self.aside = start, None
        self.flat = self.kept = whole.flat[start:stop]
        self.n, self.step, self.rate = min(stop, whole.n) - start, 0, 0.0


def _real(p: Tensor) -> torch.dtype:
    return p.dtype.to_real() if p.is_complex() else p.dtype


def _length(p: Tensor) -> int:
    return p.numel() * (2 if p.is_complex() else 1)


def _dense(slot: Slot) -> Tensor:
    grad = slot.param.grad
    assert grad is not None
    if grad.dtype != slot.view.dtype or grad.shape != slot.view.shape:
        then, now = (f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in (slot.view, grad))
        raise UsageError(
            f"the parameter {slot.name} was {then} when it was prepared, and its gradient is {now}",
            why="the vectors in which gradients travel were cut for what it was",
            do="cast the model (model.to, .double(), .bfloat16()) and replace p.data before paceline.prepare",
        )
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
