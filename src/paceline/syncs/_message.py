"""A worker's gradients of all buckets as one vector, for a sync that sends them all at once, through host memory.

Behind the gradients: for each parameter 1 if it has one, and the weight with which it counts. Summed over the
workers these say which parameters anyone used, and what to divide by.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.exchange import Exchange


class GradientMessage:
    """One vector that is reused in every step, since fresh memory costs more than all that is done here."""

    def __init__(self, ex: Exchange) -> None:
        self.ex, self.slots = ex, [s for b in ex.buckets for s in b.slots]
        dtypes = [b.flat.dtype for b in ex.buckets]
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self.n = sum(b.flat.numel() for b in ex.buckets)
        self.vector = torch.zeros(self.n + len(self.slots) + 1, dtype=dtype)
        self._views = self._split(self.vector)

    def fits(self) -> bool:
        """Are the parameters still those this vector was made for?"""
        return len(self.slots) == sum(len(b.slots) for b in self.ex.buckets)

    def pack(self) -> Tensor:
        """This worker's own gradients, with weight 1."""
        if getattr(self.ex.optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "a fused optimizer under a GradScaler leaves the loss scale in the gradients",
                why="workers' scales differ, and their gradients are summed",
                do="make the optimizer with fused=False",
            )
        grads = [s.param.grad for s in self.slots]
        for s, grad, view in zip(self.slots, grads, self._views, strict=True):
            s.sparse = grad is not None and grad.is_sparse
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if s.sparse else grad)
        self.vector[self.n :] = torch.tensor([*(float(g is not None) for g in grads), 1.0])
        return self.vector

    def weights(self) -> Tensor:
        """The parameters, as `pack` has their gradients."""
        return torch.cat([b.weights().cpu() for b in self.ex.buckets])

    def unpack(self, total: Tensor) -> None:
        """From the sum over the workers, every p.grad becomes the mean; a parameter that no worker used gets none."""
        used = total[self.n : -1].tolist()
        total[: self.n].div_(total[-1])
        for s, view, anywhere in zip(self.slots, self._split(total), used, strict=True):
            if not anywhere:
                s.param.grad = None
            else:
                mean = view.to(s.param)
                s.param.grad = mean.to_sparse(1) if s.sparse else mean

    def _split(self, x: Tensor) -> list[Tensor]:
        """Each parameter's place in x, in its shape."""
        buckets = self.ex.buckets
        parts = x[: self.n].split([b.flat.numel() for b in buckets])
        return [view for b, part in zip(buckets, parts, strict=True) for view in b.views(part)]
