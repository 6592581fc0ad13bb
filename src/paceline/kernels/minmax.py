"""One byte for each value, between the smallest and the largest, in plain torch. See [Note: chunks] in blocks.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.kernels.blocks import CHUNK

HEAD = 8  # bytes before the levels: the smallest value and the width of a level, in fp32


def encode(rows: Tensor) -> Tensor:
    """Encode each row [n] as HEAD + n bytes: 256 levels, evenly spaced from its smallest value to its largest."""
    out = torch.empty(len(rows), HEAD + rows.shape[1], dtype=torch.uint8, device=rows.device)
    v = torch.empty(_chunk(rows), device=rows.device)
    for row, coded in zip(rows, out, strict=True):
        low, high = (x.float() for x in row.aminmax())
        width = high * (1 / 255) - low * (1 / 255)  # divide first: the difference may overflow
        coded[:HEAD].view(torch.float32).copy_(torch.stack([low, width]))
        scale = (1 / width).nan_to_num_(posinf=0.0)  # infinite if all values are equal, or nearly
        for piece in _chunks(row):
            y = torch.sub(row[piece].float(), low, out=v[: piece.stop - piece.start])
            y.mul_(scale).round_().clamp_(0, 255)
            coded[HEAD + piece.start : HEAD + piece.stop] = y.to(torch.int16)  # see _pack in blocks.py
    return out


def accumulate(into: Tensor, coded: Tensor, *, factor: float, keep: bool) -> None:
    """Set into = (into if keep else 0) + factor · the sum of the decoded rows of `coded`."""
    low, width = coded[:, :HEAD].view(torch.float32).mul(factor).unbind(1)
    total, scratch = (torch.empty(_chunk(into[None]), device=into.device) for _ in range(2))
    for piece in _chunks(into):
        n = piece.stop - piece.start
        t, g = total[:n].copy_(low.sum().expand(n)), scratch[:n]
        for w, one in zip(width, coded, strict=True):
            t.addcmul_(g.copy_(one[HEAD + piece.start : HEAD + piece.stop]), w)
        _ = into[piece].add_(t) if keep else into[piece].copy_(t)


def _chunk(rows: Tensor) -> int:
    return rows.shape[1] if rows.is_cuda else min(rows.shape[1], CHUNK)


def _chunks(row: Tensor) -> Iterator[slice]:
    n, at_a_time = row.numel(), _chunk(row[None])
    for start in range(0, n, at_a_time):
        yield slice(start, min(n, start + at_a_time))
