"""A worker's gradients of all buckets as one vector, for a sync that sends them all at once, through host memory.

Behind the gradients: for each parameter 1 if it has one, and the weight with which it counts. Summed over the
workers these say which parameters anyone used, and what to divide by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.exchange import Exchange


def tail(ex: Exchange) -> int:
    """How much is behind the gradients."""
    return sum(len(b.slots) for b in ex.buckets) + 1


def pack(ex: Exchange) -> Tensor:
    """This worker's own gradients, with weight 1."""
    if getattr(ex.optimizer, "grad_scale", None) is not None:
        raise UsageError(
            "a fused optimizer under a GradScaler leaves the loss scale in the gradients",
            why="workers' scales differ, and their gradients are summed",
            do="make the optimizer with fused=False",
        )
    vectors: list[Tensor] = []
    used: list[float] = []
    for b in ex.buckets:
        x = torch.zeros_like(b.flat, dtype=torch.promote_types(b.flat.dtype, torch.float32))
        for s, view in zip(b.slots, b.views(x), strict=True):
            grad = s.param.grad
            used.append(float(grad is not None))
            if grad is not None:
                s.sparse = grad.is_sparse
                view.copy_(grad.to_dense() if s.sparse else grad)
        vectors.append(x.cpu())
    return torch.cat([*vectors, torch.tensor([*used, 1.0])])


def weights(ex: Exchange) -> Tensor:
    """The parameters, as `pack` has their gradients."""
    return torch.cat([b.weights().cpu() for b in ex.buckets])


def unpack(total: Tensor, ex: Exchange) -> None:
    """From the sum over the workers: every p.grad becomes the mean; what nobody used has none."""
    used = iter(total[-tail(ex) :].tolist())
    mean = total[: -tail(ex)].div_(total[-1])
    for b, x in zip(ex.buckets, mean.split([b.flat.numel() for b in ex.buckets]), strict=True):
        for s, view in zip(b.slots, b.views(x.to(b.flat)), strict=True):
            grad = view.to_sparse(1) if s.sparse else view
            s.param.grad = grad if next(used) else None
