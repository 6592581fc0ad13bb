"""Gradients that were made or changed by hand, of which no hook tells.

[Note: by hand] `torch.autograd.grad` runs no hook of ours: what the user then assigns to `p.grad` is this worker's own
gradient, and stepping by it would let the replicas drift apart. Such gradients are found when they are about to be
used: at `step()`, and before torch's functions that clip. A step that was not exchanged yet takes them up as if a
backward had brought them. Where the mean is there already and the user has changed it since (scaled it, added noise,
put another tensor in its place), the workers compare what they have. Mostly that is a function of the mean and equal on
all of them, and then it is the user's word. What differs is averaged, weighed by samples: the mean of (mean + gᵢ) is
the mean plus the mean of the gᵢ.

Whether a gradient was changed is told by its tensor and by torch's version counter, without looking at its elements.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.bucket import Bucket, Slot
from paceline.errors import UsageError
from paceline.telemetry.events import Note

if TYPE_CHECKING:
    from paceline.core.engine import Engine

_NONE, _UNTOUCHED = -1, -2  # in the place of a fingerprint: there is no gradient; it is the one that was bound
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(x: Tensor) -> Tensor:
    """A number that differs between tensors of different bits, nearly always: the sum of the bits as integers."""
    real = torch.view_as_real(x) if x.is_complex() else x
    flat = real.detach().contiguous().view(-1).view(_BITS[real.element_size()])
    return flat.sum(dtype=torch.int64) & 0x7FFFFFFFFFFFFFFF


class ByHand:
    """The gradients of one engine as it knows them: [Note: by hand]."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.trusts = False  # what changes gradients now does the same on all workers: a GradScaler that is known
        self._told: set[str] = set()

    def bound(self) -> None:
        """The means have been bound: these are known. Others that are there are not."""
        for _, s in self._slots():
            if (g := s.param.grad) is None or g is s.view or g is s.shown or s.sparse:
                _know(s)

    def note(self) -> None:
        """Whatever p.grad is now is known: it was changed alike on all workers."""
        for _, s in self._slots():
            _know(s)

    def changed(self) -> list[tuple[Bucket, Slot]]:
        """The gradients that are there and are not as they are known."""
        return [
            (b, s)
            for b, s in self._slots()
            if (g := s.param.grad) is not None
            and g is not s.shown
            and (g is not s.known or g._version != s.known_version)
        ]

    def _taken_away(self) -> bool:
        """Has the user set a known gradient to None?"""
        return any(s.param.grad is None and s.known is not None for _, s in self._slots())

    def _slots(self) -> Iterator[tuple[Bucket, Slot]]:
        return ((b, s) for b in self.engine.buckets for s in b.slots)

    def agree(self) -> None:
        """Average what was changed since it was bound, where the workers have changed it differently.

        All workers must be here: a user's code changes gradients on all of them, or on none.
        """
        changed = {id(s) for _, s in self.changed()}
        if not (changed or self._taken_away()):
            return None
        if self.trusts:
            return self.note()
        engine, slots = self.engine, list(self._slots())
        device = slots[0][0].device
        prints = torch.full((len(slots),), _UNTOUCHED, dtype=torch.int64, device=device)
        for i, (_, s) in enumerate(slots):
            if id(s) in changed:
                prints[i] = fingerprint(dense(s.param.grad)).to(device)
            elif s.param.grad is None:
                prints[i] = _NONE
        everyones = engine.comm.all_gather(prints).wait()
        differ = (everyones != everyones[:1]).any(0).nonzero().flatten().tolist()
        if differ:
            self._average([slots[i][1] for i in differ])
            self.say("gradients were changed by hand after backward and differ between workers: their mean is used")
        return self.note()

    def _average(self, slots: Sequence[Slot]) -> None:
        engine = self.engine
        if engine.window.summed and engine.exchanged:
            raise UsageError(
                "gradients were changed by hand after backward, and differ between the workers",
                why="with loss='sum' the sum that was exchanged cannot be told from what was added to it",
                do="add the losses before backward",
            )
        scale = 1.0 if engine.window.several else engine.window.scale
        for s in slots:
            g = s.param.grad
            x = torch.zeros_like(s.view) if g is None else dense(g).detach().clone()
            real = torch.view_as_real(x) if x.is_complex() else x
            real = engine.comm.mean(real.contiguous().mul_(scale)).wait()
            mean = torch.view_as_complex(real) if x.is_complex() else real
            if g is None:
                s.param.grad = mean
            elif g.is_sparse:
                s.param.grad = mean.to_sparse(1)
            else:
                g.detach().copy_(mean)  # in place: the user's code may hold it

    def before_clipping(self, grads: Iterable[Tensor]) -> bool:
        """Torch is about to clip these: have the mean there, in the tensors that it was given. Gives: are any ours?"""
        mine = {id(g): s for _, s in self._slots() if (g := s.param.grad) is not None}
        if not any(id(g) in mine for g in grads):
            return False
        if self.engine.exchanged:
            if self.engine.overlap.barrier():
                self.engine.overlap.say("gradients are clipped before it")
            self.agree()
        elif new := self.changed():
            self._take_up(new)
        return True

    def _take_up(self, new: Sequence[tuple[Bucket, Slot]]) -> None:
        """Exchange them, and have the mean in the very tensors that the user's code holds."""
        if any(s.shown is not None for _, s in new):  # where this worker would get its shard of the mean alone
            self._average([s for _, s in new])
            self.engine.exchanged = self.engine.landed = True
        else:
            own = [(s, s.param.grad) for _, s in new]
            self.engine.take_up(new)
            for s, g in own:
                if g is not None and g is not s.view and not g.is_sparse and self.engine.exchanged:
                    g.detach().copy_(s.view)
                    s.param.grad = g
        self.note()

    def say(self, text: str) -> None:
        """Tell once what was found."""
        if text not in self._told and self.engine.group.rank == 0:
            self.engine.recorder.emit(Note(t=time.monotonic(), text=text))
            warnings.warn(f"paceline: {text}", stacklevel=6)
        self._told.add(text)


def _know(s: Slot) -> None:
    g = s.known = s.param.grad
    s.known_version = -1 if g is None or g is s.shown else g._version


def dense(g: Any) -> Tensor:
    """The gradient with all its elements."""
    x: Tensor = g.to_dense() if g.is_sparse else g
    return x
