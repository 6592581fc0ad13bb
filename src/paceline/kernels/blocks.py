"""Block codes in plain torch: the CPU's implementation, and the reference for the Triton kernels.

[Note: chunks] A dozen passes over a vector that does not fit the cache read it from memory a dozen times. So the work
goes chunk by chunk: all passes over one megabyte, in place, in scratch memory that is allocated once a call. On a GPU,
where the cost is in the launches, there is one chunk.

[Note: dice] Random rounding needs one number for each element: cheap, the same on every device, and the same again when
a step is repeated. So it is a hash of the element's index and a key: one hash gives sixteen bits to each of two
neighbours. The numbers are made odd, which makes them symmetric around zero, so a value that is a level already is not
changed; the remaining bias is below 2^-16 of a level.

[Note: powers] To round y at random to 0, 1, 2, 4, ...: a float is m · 2^e with m in [1, 2), and random bits added to
its mantissa carry into e with probability m - 1, which is the right one. For y between 0 and 1 the right probability is
y, which is the mantissa of y + 1. So the exponent of max(y + 1, 2y), after the carry, is the number of the level.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.kernels.code import BlockCode, split

CHUNK = 1 << 18  # elements: with smaller chunks the calls cost more than the cache saves
LEAST = 1e-36  # smallest norm that is sent: quotients by it stay finite, and zeros stay zeros
MOST = torch.finfo(torch.float32).max  # largest norm that is sent: a norm must only be no less than any value
STRIDE, MIX = 0x6D2B79F5, -2073254261  # odd multipliers that mix bits well


def encode(x: Tensor, code: BlockCode, key: int) -> Tensor:
    """Encode x as bytes: the blocks' norms and the packed codes. `key` seeds the random rounding."""
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


def accumulate(into: Tensor, coded: Tensor, code: BlockCode, *, factor: float, keep: bool) -> None:
    """Set into = (into if keep else 0) + factor · the sum of the decoded rows of `coded`."""
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


def _chunk(x: Tensor, code: BlockCode) -> int:
    """The number of blocks in a chunk: [Note: chunks]."""
    blocks = code.blocks(x.numel())
    return blocks if x.is_cuda else min(blocks, max(1, CHUNK // code.d))


def _chunks(x: Tensor, code: BlockCode) -> Iterator[tuple[slice, Tensor]]:
    """For each chunk the range of its blocks, and their elements; the last block may have fewer than d."""
    at_a_time = _chunk(x, code)
    for first in range(0, code.blocks(x.numel()), at_a_time):
        piece = x[first * code.d : (first + at_a_time) * code.d]
        yield slice(first, first + code.blocks(piece.numel())), piece


def _full(piece: Tensor, y: Tensor) -> Tensor:
    """The chunk as whole blocks in fp32: a view of it if possible, else a copy in y, padded with zeros."""
    if piece.numel() == y.numel() and piece.dtype == torch.float32:
        return piece.view(y.shape)
    flat = y.view(-1)
    flat[: piece.numel()].copy_(piece)
    flat[piece.numel() :].zero_()
    return y


def _norms(v: Tensor, r: Tensor, code: BlockCode) -> Tensor:
    """The norm of each row of v; afterwards r holds |v|."""
    torch.abs(v, out=r)
    if code.norm == "mean":
        return r @ r.new_full((code.d,), 1 / code.d)  # divide before adding: the sum may overflow
    norm = r.amax(1).clamp_(min=LEAST)
    if code.norm == "l2":  # divide by the maximum first, because squares may overflow
        norm.mul_(torch.linalg.vector_norm(r * norm.reciprocal()[:, None], dim=1).clamp_(min=1.0))
    return norm.clamp_(max=MOST)


def _powers(v: Tensor, norm: Tensor, y: Tensor, r: Tensor, dice: Dice, start: int, code: BlockCode) -> Tensor:
    """The codes of v on levels that are powers of two: [Note: powers]. The caller leaves |v| in r."""
    top = code.top
    minus = v.view(torch.int32).bitwise_right_shift(31)  # -1 where the sign bit is set
    torch.mul(r, norm.reciprocal()[:, None], out=y).mul_(2.0 ** (top - 1))  # in two steps: one factor could overflow
    y.add_(torch.clamp(y, min=1.0, out=r))
    carry = dice.roll(r.view(torch.int32), start).bitwise_left_shift_(7).add_((1 << 22) - (127 << 23))
    level = y.view(torch.int32).add_(carry).bitwise_right_shift_(23).clamp_(max=top)
    return level.sub_(minus, alpha=top + 1)


class Dice:
    """The random numbers of one message: [Note: dice]."""

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


def _pack(packed: Tensor, c: Tensor, code: BlockCode) -> None:
    """Pack the codes c, which are overwritten; element j of a block shares a byte with j + d/k, j + 2d/k, ..."""
    k = 8 // code.bits
    parts = c.view(len(c), k, code.d // k)
    for i in range(k - 1, 0, -1):
        parts[:, i - 1].add_(parts[:, i], alpha=2**code.bits)
    byte = parts[:, 0]
    if code.levels == "uniform":  # levels start at -top: add top to all k codes of a byte at once
        byte = byte.add_(sum(code.top << (code.bits * i) for i in range(k)))
    packed.copy_(byte.to(torch.int16))  # via int16: a direct conversion from fp32 to bytes is seven times slower


def _unpack(g: Tensor, packed: Tensor, code: BlockCode) -> None:
    """Write the codes into g as whole numbers; g may be of any type."""
    k = 8 // code.bits
    parts = g.view(len(g), k, code.d // k)
    for i in range(k):
        part = packed.bitwise_right_shift(code.bits * i) if i else packed
        parts[:, i] = part.bitwise_and(2**code.bits - 1) if i < k - 1 else part


def _decode(g: Tensor, packed: Tensor, code: BlockCode) -> None:
    """Write the decoded values into g, as multiples of their blocks' norms."""
    top = code.top
    if code.levels != "powers":
        _unpack(g, packed, code)
        _ = g.mul_(2).sub_(1) if code.levels == "sign" else g.sub_(top).mul_(1 / top)
        return
    c = g.view(torch.int32)
    _unpack(c, packed, code)
    sign = (c >> (code.bits - 1)).bitwise_left_shift_(31)
    c.bitwise_and_(top).add_(127 - top).bitwise_left_shift_(23)  # the bits of a float with this exponent, mantissa 0
    torch.threshold_(g, 2.0**-top, 0.0)  # where the code is zero
    c.bitwise_or_(sign)
