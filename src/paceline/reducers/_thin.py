"""Thin matrices, many at a time: a model has dozens, and what one costs is mostly the call. Nothing here overflows."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


def scaled(Qt: list[Tensor]) -> list[Tensor]:
    """Each to a size at which M·Q is no larger than M."""
    if not Qt:
        return []
    largest = torch._foreach_norm(Qt, math.inf)
    torch._foreach_clamp_min_(largest, _TINY)
    Qt = list(torch._foreach_div(Qt, largest))  # one after the other: their product may be infinite
    torch._foreach_div_(Qt, [float(qt.shape[1]) for qt in Qt])
    return Qt


def orthonormal(Pt: list[Tensor]) -> list[Tensor]:
    """By Householder's reflections, in fp32: also for columns that are zero or alike, which it completes to a basis.
    So a matrix whose gradient was zero for a while comes back to life. Columns have length √n, not 1, so that PᵀM/n
    is no larger than M. Neighbours of one shape are one call.
    """
    P: list[Tensor] = []
    for (_, n), alike in itertools.groupby(Pt, key=lambda pt: pt.shape):
        stack = torch.stack(list(alike))
        stack /= stack.abs().amax((1, 2), keepdim=True).clamp_(min=_TINY)
        P += torch.linalg.qr(stack.mT).Q.mul_(n**0.5).unbind()
    return P


def over_n(P: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_div(P, [float(len(p)) for p in P])) if P else []
