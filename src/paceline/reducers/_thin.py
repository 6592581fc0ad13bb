"""Operations on many thin matrices at a time, without overflow: for a single one most of the cost is the call."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


def scaled(Qt: list[Tensor]) -> list[Tensor]:
    """Each Qᵀ scaled so that M·Q is no larger than M."""
    if not Qt:
        return []
    largest = torch._foreach_norm(Qt, math.inf)
    torch._foreach_clamp_min_(largest, _TINY)
    Qt = list(torch._foreach_div(Qt, largest))  # two divisions, because the product of the divisors may be infinite
    torch._foreach_div_(Qt, [float(qt.shape[1]) for qt in Qt])
    return Qt


def orthonormal(Pt: list[Tensor]) -> list[Tensor]:
    """Matrices P with orthogonal columns of length √n, by Householder reflections in fp32.

    Columns that are zero or alike are completed to a basis, so a matrix whose gradient was zero for a while is
    compressed normally again. The length is √n and not 1, so that PᵀM/n is no larger than M. Neighbours of one shape
    are one call.
    """
    P: list[Tensor] = []
    for (_, n), alike in itertools.groupby(Pt, key=lambda pt: pt.shape):
        stack = torch.stack(list(alike))
        stack /= stack.abs().amax((1, 2), keepdim=True).clamp_(min=_TINY)
        P += torch.linalg.qr(stack.mT).Q.mul_(n**0.5).unbind()
    return P


def over_n(P: list[Tensor]) -> list[Tensor]:
    """Each P divided by its number of rows n."""
    return list(torch._foreach_div(P, [float(len(p)) for p in P])) if P else []
