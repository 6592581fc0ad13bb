"""The entries of largest magnitude, in plain torch.

[Note: threshold] Selecting k of n exactly is many passes. A small sample says about where the k-th largest lies:
one pass finds the entries that may be among them, and only the few near the border are looked at closely.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.kernels.blocks import CHUNK

SAMPLE = 1 << 16  # elements a threshold is estimated from
FEW = 1 << 14  # elements that are not worth a threshold


def exact(x: Tensor, k: int) -> Tensor:
    """The places of the k entries of largest magnitude."""
    if x.is_cuda or x.numel() <= FEW or 2 * k > x.numel():
        return x.abs().topk(k, sorted=False).indices
    places = _over(x, threshold(x, k, spare=4.0))
    size = x.index_select(0, places).abs_()
    sure = size > threshold(x, k, spare=-4.0)  # of the few that are neither above nor below both, the largest
    lacking = k - int(sure.sum())
    if len(places) < k or lacking < 0:  # the sample was not like the rest
        return x.abs().topk(k, sorted=False).indices
    return torch.cat([places[sure], places[~sure][size[~sure].topk(lacking, sorted=False).indices]])


def sampled(x: Tensor, k: int) -> Tensor:
    """k places, nearly those: the entries above an estimated threshold. If they are too many the last ones wait for
    the next step, if they are too few the first of the others are taken with them.
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
    """About k entries of x are larger than this; more by `spare` standard errors of the estimate."""
    some = x[:: max(1, x.numel() // SAMPLE)].abs().float()
    expected = k * some.numel() / x.numel()
    rank = min(some.numel(), max(1, round(expected + spare * math.sqrt(expected)) + (spare > 0)))
    if x.is_cuda:  # sorting keeps the whole device busy, selecting does not
        return some.sort(descending=True).values[rank - 1]
    return some.kthvalue(some.numel() - rank + 1).values


def _over(x: Tensor, tau: Tensor) -> Tensor:
    v = torch.empty(min(x.numel(), CHUNK), device=x.device)
    flags = torch.empty(v.shape, dtype=torch.int8, device=x.device)
    found = []
    for start in range(0, x.numel(), v.numel()):
        piece = x[start : start + v.numel()]
        y, f = v[: piece.numel()].copy_(piece), flags[: piece.numel()]
        f.copy_(y.abs_().gt_(tau))  # by way of fp32 and int8: a comparison straight to bool is three times slower
        found.append(f.view(torch.bool).nonzero().view(-1).add_(start))
    return torch.cat(found)
