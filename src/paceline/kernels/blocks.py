"""Block codes in plain torch: what the Triton kernels must equal, and what runs on a CPU.

[Note: chunks] A dozen passes over a vector that does not fit the cache cost a dozen times memory's speed. So the
work goes chunk by chunk, every pass of it over the same megabyte, in place, in scratch that is made once a call. On
a GPU, where launches are what costs, there is one chunk.

[Note: dice] Rounding at random needs one number for each element, cheaply, the same on every device, and the same
again when a step is redone. So it is a hash of the element's place and of a key: sixteen bits for each of two
neighbours. Made odd they are symmetric around zero, so what is a level already stays where it is; the bias left is
below 2^-16 of a level.

[Note: powers] Rounding y at random to 0, 1, 2, 4, ...: a float is m · 2^e with m in [1, 2), and random bits added to
its mantissa carry into e with the probability m - 1, which is the right one. Between 0 and 1, where it is y, it
is the mantissa of y + 1. So the exponent of max(y + 1, 2y), after the carry, is the number of the level.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.kernels.code import Code, split

CHUNK = 1 << 18  # elements: smaller ones cost more in calls than they gain in cache
LEAST = 1e-36  # a norm below it is sent as this: what it divides stays finite, and zeros stay zeros
MOST = torch.finfo(torch.float32).max  # and above it as this: it only has to be no less than any value
STRIDE, MIX = 0x6D2B79F5, -2073254261  # odd multipliers that spread bits well


def encode(x: Tensor, code: Code, key: int) -> Tensor:
    """The blocks' norms and the packed codes, as bytes. `key` decides how the dice fall."""
    out = torch.empty(code.bytes(x.numel()), dtype=torch.uint8, device=x.device)
    norms, packed = split(out[None], code)
    at_a_time = _chunk(x, code)
    v, scratch = (torch.empty(at_a_time, code.d, device=x.device) for _ in range(2))
    dice = None if code.levels == "sign" else Dice(v.numel(), key, x.device)
    for rows, piece in _chunks(x, code):
        m = rows.stop - rows.start
        y, r = v[:m], scratch[:m]
        source = _full(piece, y)
        norms[0, rows] = norm = _norms(source, r, code)
        if dice is None:
            c = torch.ge(source, 0, out=r)
        elif code.levels == "uniform":
            torch.mul(source, (code.top / norm)[:, None], out=y)
            y.add_(dice.roll(r, rows.start), alpha=2.0**-16)
            c = y.round_().clamp_(-code.top, code.top)
        else:
            c = _powers(source, norm, y, r, dice, rows.start, code)
        _pack(packed[0, rows], c, code)
    return out


def accumulate(into: Tensor, coded: Tensor, code: Code, *, factor: float, keep: bool) -> None:
    """into = (into if keep) + factor · the sum of what the rows of `coded` say."""
    norms, packed = split(coded, code)
    total, scratch = (torch.empty(_chunk(into, code), code.d, device=into.device) for _ in range(2))
    for rows, piece in _chunks(into, code):
        m = rows.stop - rows.start
        t, g = total[:m].zero_(), scratch[:m]
        for norm, codes in zip(norms[:, rows], packed[:, rows], strict=True):
            _decode(g, codes, code)
            t.addcmul_(g, norm[:, None], value=factor)
        flat = t.view(-1)[: piece.numel()]
        _ = piece.add_(flat) if keep else piece.copy_(flat)


def _chunk(x: Tensor, code: Code) -> int:
    """Blocks in a chunk. [Note: chunks]"""
    blocks = code.blocks(x.numel())
    return blocks if x.is_cuda else min(blocks, max(1, CHUNK // code.d))


def _chunks(x: Tensor, code: Code) -> Iterator[tuple[slice, Tensor]]:
    """Which blocks, and their elements: the last block of all may have fewer than d."""
    at_a_time = _chunk(x, code)
    for first in range(0, code.blocks(x.numel()), at_a_time):
        piece = x[first * code.d : (first + at_a_time) * code.d]
        yield slice(first, first + code.blocks(piece.numel())), piece


def _full(piece: Tensor, y: Tensor) -> Tensor:
    """The piece as whole blocks in fp32: itself where it is that, else a copy in y, filled up with zeros."""
    if piece.numel() == y.numel() and piece.dtype == torch.float32:
        return piece.view(y.shape)
    flat = y.view(-1)
    flat[: piece.numel()].copy_(piece)
    flat[piece.numel() :].zero_()
    return y


def _norms(v: Tensor, r: Tensor, code: Code) -> Tensor:
    """Of each row of v; r is left with |v|."""
    torch.abs(v, out=r)
    if code.norm == "mean":
        return r @ r.new_full((code.d,), 1 / code.d)  # the sum may not fit where the mean does
    norm = r.amax(1).clamp_(min=LEAST)
    if code.norm == "l2":  # of what is at most one, because squares do not fit where values do
        norm.mul_(torch.linalg.vector_norm(r * norm.reciprocal()[:, None], dim=1).clamp_(min=1.0))
    return norm.clamp_(max=MOST)


def _powers(v: Tensor, norm: Tensor, y: Tensor, r: Tensor, dice: Dice, start: int, code: Code) -> Tensor:
    """[Note: powers]. Comes with |v| in r."""
    top = code.top
    minus = v.view(torch.int32).bitwise_right_shift(31)  # -1 where the sign bit is set
    torch.mul(r, norm.reciprocal()[:, None], out=y).mul_(2.0 ** (top - 1))  # in two steps: the product may not fit
    y.add_(torch.clamp(y, min=1.0, out=r))
    carry = dice.roll(r.view(torch.int32), start).bitwise_left_shift_(7).add_((1 << 22) - (127 << 23))
    level = y.view(torch.int32).add_(carry).bitwise_right_shift_(23).clamp_(max=top)
    return level.sub_(minus, alpha=top + 1)


class Dice:
    """[Note: dice]"""

    def __init__(self, n: int, key: int, device: torch.device) -> None:
        self._first = torch.arange(n // 2, dtype=torch.int32, device=device).mul_(STRIDE).add_(key)
        self._h, self._t = torch.empty_like(self._first), torch.empty_like(self._first)

    def roll(self, out: Tensor, block: int) -> Tensor:
        """Odd numbers between -2^15 and 2^15 for the blocks (rows of `out`) from `block` on."""
        half = out.numel() // 2
        ahead = (block * out.shape[1] // 2 * STRIDE + 2**31) % 2**32 - 2**31
        h, t = torch.add(self._first[:half], ahead, out=self._h[:half]), self._t[:half]
        h.bitwise_xor_(torch.bitwise_right_shift(h, 15, out=t).bitwise_and_(0x1FFFF)).mul_(MIX)
        h.add_(torch.bitwise_right_shift(h, 16, out=t)).bitwise_or_(0x00010001)
        out.view(-1).copy_(h.view(torch.int16))
        return out


def _pack(packed: Tensor, c: Tensor, code: Code) -> None:
    """Element j of a block shares a byte with j + d/k, j + 2d/k, ...: whole stretches at a time. c is used up."""
    k = 8 // code.bits
    parts = c.view(len(c), k, code.d // k)
    for i in range(k - 1, 0, -1):
        parts[:, i - 1].add_(parts[:, i], alpha=2**code.bits)
    byte = parts[:, 0]
    if code.levels == "uniform":  # levels are counted from -top: all k of a byte are lifted together
        byte = byte.add_(sum(code.top << (code.bits * i) for i in range(k)))
    packed.copy_(byte.to(torch.int16))  # by way of int16: straight from fp32 to bytes is seven times slower


def _unpack(g: Tensor, packed: Tensor, code: Code) -> None:
    """The codes as whole numbers, into g, which may be of any type."""
    k = 8 // code.bits
    parts = g.view(len(g), k, code.d // k)
    for i in range(k):
        part = packed.bitwise_right_shift(code.bits * i) if i else packed
        parts[:, i] = part.bitwise_and(2**code.bits - 1) if i < k - 1 else part


def _decode(g: Tensor, packed: Tensor, code: Code) -> None:
    """g becomes multiples of the blocks' norms."""
    top = code.top
    if code.levels != "powers":
        _unpack(g, packed, code)
        _ = g.mul_(2).sub_(1) if code.levels == "sign" else g.sub_(top).mul_(1 / top)
        return
    c = g.view(torch.int32)
    _unpack(c, packed, code)
    sign = (c >> (code.bits - 1)).bitwise_left_shift_(31)
    c.bitwise_and_(top).add_(127 - top).bitwise_left_shift_(23)  # a float's exponent, and nothing else
    torch.threshold_(g, 2.0**-top, 0.0)  # where the code is zero
    c.bitwise_or_(sign)
