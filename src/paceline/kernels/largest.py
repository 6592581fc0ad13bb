"""The entries of largest magnitude, in plain torch.

[Note: threshold] Selecting k of n exactly takes many passes. A small sample gives an estimate of the k-th largest
magnitude: one pass finds the entries that may be among the k, and only the few near the threshold are compared exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.kernels.blocks import CHUNK

SAMPLE = 1 << 16  # elements from which a threshold is estimated
FEW = 1 << 14  # elements: up to here an estimate costs more than it saves


def exact(x: Tensor, k: int) -> Tensor:
    """The indices of the k entries of largest magnitude."""
    if x.is_cuda or x.numel() <= FEW or 2 * k > x.numel():
        return x.abs().topk(k, sorted=False).indices
    places = _over(x, threshold(x, k, spare=4.0))
    size = x.index_select(0, places).abs_()
    sure = size > threshold(x, k, spare=-4.0)  # the rest of the k are the largest between the two thresholds
    lacking = k - int(sure.sum())
    if len(places) < k or lacking < 0:  # the sample was not representative
        return x.abs().topk(k, sorted=False).indices
    return torch.cat([places[sure], places[~sure][size[~sure].topk(lacking, sorted=False).indices]])


def sampled(x: Tensor, k: int) -> Tensor:
    """The indices of k entries that are nearly the largest: those above an estimated threshold.

    If they are too many the last ones are left out; if they are too few the first of the other entries are added.
    """
    if x.numel() <= FEW or 8 * k > x.numel():
        return exact(x, k)
    tau = threshold(x, k, spare=-1.0)
    places = _over(x, tau)
    if len(places) < k:
        others = (x[: 8 * k].abs() <= tau).nonzero().view(-1)
        places = torch.cat([places, others[: k - len(places)]])
    return places[:k] if len(places) >= k else exact(x, k)


def threshold(x: Tensor, k: int, spare: float) -> Tensor:
    """An estimate that about k entries of x exceed; `spare` lowers it by so many standard errors."""
    some = x[:: max(1, x.numel() // SAMPLE)].abs().float()
    expected = k * some.numel() / x.numel()
    rank = min(some.numel(), max(1, round(expected + spare * math.sqrt(expected)) + (spare > 0)))
    if x.is_cuda:  # sorting keeps the whole device busy, selecting does not
        return some.sort(descending=True).values[rank - 1]
    return some.kthvalue(some.numel() - rank + 1).values


def _over(x: Tensor, tau: Tensor) -> Tensor:
    """The indices of all entries with a magnitude above tau."""
    v = torch.empty(min(x.numel(), CHUNK), device=x.device)
    flags = torch.empty(v.shape, dtype=torch.int8, device=x.device)
    found = []
    for start in range(0, x.numel(), v.numel()):
        piece = x[start : start + v.numel()]
        y, f = v[: piece.numel()].copy_(piece), flags[: piece.numel()]
        f.copy_(y.abs_().gt_(tau))  # via fp32 and int8: a direct comparison to bool is three times slower
        found.append(f.view(torch.bool).nonzero().view(-1).add_(start))
    return torch.cat(found)
