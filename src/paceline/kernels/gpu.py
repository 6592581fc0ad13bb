"""The kernels in Triton, for CUDA tensors: what blocks.py, minmax.py and largest.py do, in one pass over memory.

Nothing here waits for the device, and everything runs on the current stream.

[Note: words] A message is only 4-byte aligned, so its codes are read and written as 32-bit words: the bytes of four
neighbours. A tile of a block code is [k, B · C]: the k values that share a byte, and C bytes of each of B blocks. Each
thread has four consecutive columns, and so all 4 · k values of a word: it loads four values at a time and packs them
without exchanging values with other threads. B and C are one axis when memory is accessed, because the compiler
distributes values over threads by the order of axes.

[Note: magic] Adding 1.5 · 2^23 to a float leaves no bits for a fraction: the last bits of the sum are the nearest whole
number, ties to even. Conversely, bits placed in the mantissa of 2^23 are a whole number, and sixteen bits placed in
that of 2^7 (0x43) are a fraction. This costs a tenth of the conversion instructions and gives the same result.

[Note: equal] Products and sums are fused only in explicit calls of fma, and quotients are correctly rounded. So the
codes equal those of the plain formulation bit for bit wherever the norms do, which for max is always. Sums over a block
(l2, mean) are made in another order, so those norms may differ in their last bits, and with them, rarely, a code by one
level. The decoded sums differ in the last bit if the CPU's addcmul does not fuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import blocks, minmax
from paceline.kernels.code import BlockCode
from paceline.kernels.largest import FEW, threshold


class Tile(NamedTuple):
    """The work of one Triton program: the sizes that can be tuned."""

    values: int  # in a tile, a power of two; a longer block is a tile of its own
    most: int  # a block longer than this is processed in pieces of this length
    each: int  # values for each thread

    def shape(self, d: int, k: int) -> tuple[int, int, int]:
        """The number of blocks in a tile, the number of values of each block in it, and the number of warps."""
        rows, width = max(1, self.values // d), min(d, self.most)
        return rows, width, self.warps(rows * width, 4 * k)

    def warps(self, values: int, least: int = 4) -> int:
        return min(16, max(1, values // (32 * max(self.each, least))))


ENCODE = Tile(4096, 8192, 32)
ADD = Tile(4096, 4096, 32)
BYTES = Tile(4096, 4096, 16)  # min-max codes
SPAN = Tile(16384, 16384, 64)  # the smallest and largest values of min-max codes
SELECT = Tile(4096, 4096, 32)

LEAST, MOST = tl.constexpr(blocks.LEAST), tl.constexpr(blocks.MOST)
STRIDE, MIX = tl.constexpr(blocks.STRIDE), tl.constexpr(blocks.MIX)
MAGIC, MAGIC_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)


def kernel(fn: Callable[..., Any]) -> Any:
    """Compile a kernel, one binary for all keys and world sizes, assuming no alignment of messages: [Note: words]."""
    return triton.jit(fn, do_not_specialize=("key", "count", "stride", "W"))


def encode_blocks(x: Tensor, code: BlockCode, key: int) -> Tensor:
    """The same as blocks.encode, up to [Note: equal]."""
    x = x.float() if x.dtype == torch.float64 else x
    n, count = x.numel(), code.blocks(x.numel())
    words = torch.empty(code.bytes(n) // 4, dtype=torch.int32, device=x.device)
    rows, width, warps = ENCODE.shape(code.d, 8 // code.bits)
    _launch(
        _encode, (-(-count // rows),), warps, x, words.view(torch.float32), words, n, count, key, *code, rows, width
    )
    return words.view(torch.uint8)


def add_blocks(into: Tensor, coded: Tensor, code: BlockCode, *, factor: float, keep: bool) -> None:
    """The same as blocks.accumulate: into = (into if keep else 0) + factor · the sum of the decoded rows."""
    n, count = into.numel(), code.blocks(into.numel())
    rows, width, warps = ADD.shape(code.d, 8 // code.bits)
    words = coded.view(torch.int32)
    args = into, words.view(torch.float32), words, words.stride(0), len(words), n, count, float(factor)
    _launch(_add, (-(-count // rows), code.d // width), warps, *args, *code[:3], rows, width, keep)


def encode_bytes(rows: Tensor) -> Tensor:
    """The same as minmax.encode, bit for bit."""
    rows = rows.float() if rows.dtype == torch.float64 else rows
    W, n = rows.shape
    if n % 4:  # the kernels need rows of whole words, which a bucket's shards are
        return minmax.encode(rows)
    rows = rows.contiguous()
    tiles = triton.cdiv(n, SPAN.values)
    spans = torch.empty(W, 2, tiles, device=rows.device)
    words = torch.empty(W, minmax.HEAD // 4 + n // 4, dtype=torch.int32, device=rows.device)
    _launch(_span, (tiles, W), SPAN.warps(SPAN.values), rows, spans, n // 4, tiles, SPAN.values)
    _launch(_head, (W,), 4, spans, words.view(torch.float32), tiles, n // 4)
    grid = triton.cdiv(n, BYTES.values), W
    _launch(_quantise, grid, BYTES.warps(BYTES.values), rows, words.view(torch.float32), words, n // 4, BYTES.values)
    return words.view(torch.uint8)


def add_bytes(into: Tensor, coded: Tensor, *, factor: float, keep: bool) -> None:
    """The same as minmax.accumulate: into = (into if keep else 0) + factor · the sum of the decoded rows."""
    n = into.numel()
    if n % 4:
        minmax.accumulate(into, coded, factor=factor, keep=keep)
        return
    words = coded.view(torch.int32)
    args = into, words.view(torch.float32), words, words.stride(0), len(words), n // 4, float(factor)
    _launch(_add_bytes, (triton.cdiv(n, BYTES.values),), BYTES.warps(BYTES.values), *args, keep, BYTES.values)


def largest(x: Tensor, k: int) -> Tensor:
    """The same indices as largest.sampled, in the same order."""
    if x.numel() <= FEW or 8 * k > x.numel():
        return x.abs().topk(k, sorted=False).indices
    return above(x, threshold(x, k, spare=-1.0), k)


def above(x: Tensor, tau: Tensor, k: int) -> Tensor:
    """The indices of the first k entries above tau; if there are fewer, the first of the other entries follow.

    The order does not depend on timing: one pass makes a bit of each entry and counts them tile by tile, the running
    sums of the counts say where each tile's entries begin, and a pass over the bits writes the indices there.
    """
    n = x.numel()
    tiles = triton.cdiv(n, SELECT.values)
    bits = torch.empty(tiles * SELECT.values // 32, dtype=torch.int32, device=x.device)
    counts = torch.empty(tiles, dtype=torch.int32, device=x.device)
    places = torch.empty(k, dtype=torch.int64, device=x.device)
    _launch(_over, (tiles,), SELECT.warps(SELECT.values), x, tau, bits, counts, n, SELECT.values)
    ends = counts.cumsum(0)
    _launch(_gather, (tiles,), 1, bits, counts, ends, places, n, k, tiles, SELECT.values)
    return places


def _launch(fn: Any, grid: tuple[int, ...], warps: int, tensor: Tensor, *args: Any) -> None:
    with torch.cuda.device_of(tensor):
        fn[grid](tensor, *args, num_warps=warps, enable_fp_fusion=False)  # [Note: equal]


# Block codes.


@kernel
def _encode(
    x,
    norms,
    words,
    n,
    count,
    key,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Encode B blocks. If all are whole nothing is masked, so that loads are wide whatever n is."""
    first = tl.program_id(0).to(tl.int64) * B
    left = n - first * D
    x += first * D
    words += count + first * (D * BITS // 32)
    if left >= B * D:
        _encode_tile(x, norms, words, left, first, count, key, True, LEVELS, BITS, D, NORM, B, WIDTH)
    else:
        _encode_tile(x, norms, words, left, first, count, key, False, LEVELS, BITS, D, NORM, B, WIDTH)


@kernel
def _encode_tile(
    x,
    norms,
    words,
    left,
    first,
    count,
    key,
    ALL: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Encode B blocks. The first piece of a block stays in registers; the others, if any, are read twice."""
    PIECES: tl.constexpr = D // WIDTH
    v = _values(x, left, 0, ALL, BITS, D, B, WIDTH)
    if NORM == "mean":
        norm = _sums(tl.abs(v) * (1.0 / D))  # divide before adding: the sum may overflow
        for piece in range(1, PIECES):
            norm += _sums(tl.abs(_values(x, left, piece, ALL, BITS, D, B, WIDTH)) * (1.0 / D))
    else:
        norm = _tops(tl.abs(v))
        for piece in range(1, PIECES):
            norm = tl.maximum(norm, _tops(tl.abs(_values(x, left, piece, ALL, BITS, D, B, WIDTH))))
        norm = tl.maximum(norm, LEAST)
        if NORM == "l2":
            inverse = _inverse(norm, B)
            y = v * inverse
            squares = _sums(y * y)
            for piece in range(1, PIECES):
                y = _values(x, left, piece, ALL, BITS, D, B, WIDTH) * inverse
                squares += _sums(y * y)
            norm *= tl.maximum(tl.sqrt_rn(squares), 1.0)
        norm = tl.minimum(norm, MOST)
    block = first + tl.arange(0, B)
    tl.store(norms + block, norm, mask=None if ALL else block < count)
    _pack(words, v, norm, first, 0, count, key, ALL, LEVELS, BITS, D, B, WIDTH)
    for piece in range(1, PIECES):
        v = _values(x, left, piece, ALL, BITS, D, B, WIDTH)
        _pack(words, v, norm, first, piece, count, key, ALL, LEVELS, BITS, D, B, WIDTH)


@kernel
def _places(piece, BITS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr):
    """The offset of each value in the program's blocks, as [k, B · C]: [Note: words]."""
    K: tl.constexpr = 8 // BITS
    C: tl.constexpr = WIDTH // K
    q = tl.arange(0, B * C)
    return (tl.arange(0, K) * (D // K))[:, None] + (q // C * D + piece * C + q % C)[None, :]


@kernel
def _values(
    x, left, piece, ALL: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr
):
    """The values of one piece as [k, B, C] in fp32, with zeros beyond the end of x."""
    at = _places(piece, BITS, D, B, WIDTH)
    v = tl.load(x + at) if ALL else tl.load(x + at, mask=at < left, other=0.0)
    return tl.reshape(v.to(tl.float32), (8 // BITS, B, WIDTH * BITS // 8))


@kernel
def _sums(v):
    return tl.sum(tl.sum(v, axis=0), axis=1)  # first the axis that lies within one thread


@kernel
def _tops(v):
    return tl.max(tl.max(v, axis=0), axis=1)


@kernel
def _inverse(norm, B: tl.constexpr):
    return tl.div_rn(tl.full([B], 1.0, tl.float32), norm)[None, :, None]


@kernel
def _pack(
    words,
    v,
    norm,
    first,
    piece,
    count,
    key,
    ALL: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
):
    K: tl.constexpr = 8 // BITS
    C: tl.constexpr = WIDTH // K
    TOP: tl.constexpr = 2 ** (BITS - 1) - 1
    even, odd = tl.split(tl.reshape(v, (K, B, C // 2, 2)))
    added = 0
    if LEVELS == "sign":
        c = (even >= 0).to(tl.int32) | ((odd >= 0).to(tl.int32) << 8)
    else:
        # One hash for each pair of neighbours: [Note: dice] in blocks.py.
        part, block, column = tl.arange(0, K)[:, None, None], tl.arange(0, B)[None, :, None], tl.arange(0, C // 2)
        pair = part * (D // K // 2) + block * (D // 2) + (piece * (C // 2) + column)[None, None, :]
        h = (pair + (first * (D // 2)).to(tl.int32)) * STRIDE + key
        h ^= (h >> 15) & 0x1FFFF
        h *= MIX
        h += h >> 16
        h |= 0x00010001
        if LEVELS == "uniform":
            scale = _inverse(norm, B) * TOP
            c = _uniform(even, scale, h, TOP) + (_uniform(odd, scale, h >> 16, TOP) << 8)
            # The constant that _uniform adds to every code is subtracted from a whole word at once, modulo 2^32.
            ADDED: tl.constexpr = (MAGIC_BITS - TOP) * (0xFFFFFFFF // (2**BITS - 1))
            added = (ADDED + 0x80000000) % 0x100000000 - 0x80000000
        else:
            scale = _inverse(norm, B)
            c = _powers(even, scale, h, TOP) | (_powers(odd, scale, h >> 16, TOP) << 8)
    c = tl.sum(c << (BITS * tl.arange(0, K))[:, None, None], axis=0)
    low, high = tl.split(tl.reshape(c, (B * C // 4, 2)))
    word = tl.arange(0, B * C // 4)
    block = word // (C // 4)
    at = block * (D * BITS // 32) + piece * (C // 4) + word % (C // 4)
    tl.store(words + at, low + (high << 16) - added, mask=None if ALL else first + block < count)


@kernel
def _uniform(v, scale, h, TOP: tl.constexpr):
    """The level round(v · scale + the low half of h as a fraction), -TOP to TOP, plus MAGIC_BITS: [Note: magic]."""
    dice = ((h & 0xFFFF) ^ 0x43008000).to(tl.float32, bitcast=True) - 128.5
    y = tl.clamp(v * scale + dice, -1.0 * TOP, 1.0 * TOP)
    return (y + MAGIC).to(tl.int32, bitcast=True)


@kernel
def _powers(v, scale, h, TOP: tl.constexpr):
    """The codes of v on levels that are powers of two: [Note: powers] in blocks.py."""
    y = tl.abs(v) * scale * 2.0 ** (TOP - 1)  # evaluated from left to right: scale times the power may overflow
    y += tl.maximum(y, 1.0)
    level = (y.to(tl.int32, bitcast=True) + ((h << 16) >> 9) + ((1 << 22) - (127 << 23))) >> 23
    minus = v.to(tl.int32, bitcast=True) >> 31
    return tl.minimum(level, TOP) - minus * (TOP + 1)


@kernel
def _add(
    into,
    norms,
    words,
    stride,
    W,
    n,
    count,
    factor,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * B
    left = n - first * D
    into += first * D
    norms += first
    words += count + first * (D * BITS // 32)
    if left >= B * D:
        _add_tile(into, norms, words, stride, W, left, factor, True, LEVELS, BITS, D, B, WIDTH, KEEP)
    else:
        _add_tile(into, norms, words, stride, W, left, factor, False, LEVELS, BITS, D, B, WIDTH, KEEP)


@kernel
def _add_tile(
    into,
    norms,
    words,
    stride,
    W,
    left,
    factor,
    ALL: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
):
    K: tl.constexpr = 8 // BITS
    C: tl.constexpr = WIDTH // K
    piece = tl.program_id(1)
    at = _places(piece, BITS, D, B, WIDTH)
    value_there = None if ALL else at < left
    if KEEP:
        old = tl.load(into + at, mask=value_there)  # first, because it takes as long as everything else
    # Words have all three axes from the start, so that decoded values are distributed over threads as `into` is.
    word = tl.arange(0, B * C // 4)[None, :, None]
    block = word // (C // 4)
    word_at = block * (D * BITS // 32) + piece * (C // 4) + word % (C // 4)
    there = None if ALL else block * D < left
    shift = (BITS * tl.arange(0, K))[:, None, None] + (8 * tl.arange(0, 4))[None, None, :]
    total = tl.zeros([K, B * C // 4, 4], tl.float32)
    for _ in range(W):
        norm = tl.broadcast_to(tl.load(norms + block, mask=there), [K, B * C // 4, 4])
        c = (tl.load(words + word_at, mask=there) >> shift) & (2**BITS - 1)
        total = tl.fma(factor * _decode(c, LEVELS, BITS), norm, total)
        norms += stride
        words += stride
    new = tl.reshape(total, (K, B * C))
    if KEEP:
        new = old + new
    tl.store(into + at, new, mask=value_there)


@kernel
def _decode(c, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """The decoded values, as multiples of the norm."""
    TOP: tl.constexpr = 2 ** (BITS - 1) - 1
    if LEVELS == "sign":
        g = tl.where(c != 0, 1.0, -1.0)
    elif LEVELS == "uniform":
        g = _whole(c, TOP) * (1.0 / TOP)
    else:
        size = c & TOP
        exponent = tl.where(size != 0, (size + (127 - TOP)) << 23, 0)
        g = (exponent | ((c >> (BITS - 1)) << 31)).to(tl.float32, bitcast=True)
    return g


@kernel
def _whole(c, LESS: tl.constexpr):
    """The float c - LESS for a whole number c from 0 to 2^22: [Note: magic]."""
    return (c | MAGIC_BITS).to(tl.float32, bitcast=True) - (MAGIC + LESS)


# Min-max codes: one byte for each value. n4 is a row's length in words.


@kernel
def _span(rows, spans, n4, tiles, TILE: tl.constexpr):
    """Write a tile's smallest and largest value."""
    tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    x = rows + (row * n4 + tile * (TILE // 4)) * 4
    at = tl.arange(0, TILE)
    left = (n4 - tile * (TILE // 4)) * 4
    v = tl.load(x + at, mask=at < left, other=float("inf")).to(tl.float32)
    tl.store(spans + row * 2 * tiles + tile, tl.min(v, axis=0))
    tl.store(spans + row * 2 * tiles + tiles + tile, tl.max(tl.where(at < left, v, float("-inf")), axis=0))


@kernel
def _head(spans, head, tiles, n4):
    """Write a row's smallest value and the width of a level."""
    row = tl.program_id(0).to(tl.int64)
    spans += row * 2 * tiles
    low, high = tl.full([1024], float("inf"), tl.float32), tl.full([1024], float("-inf"), tl.float32)
    for start in range(0, tiles, 1024):
        at = start + tl.arange(0, 1024)
        low = tl.minimum(low, tl.load(spans + at, mask=at < tiles, other=float("inf")))
        high = tl.maximum(high, tl.load(spans + tiles + at, mask=at < tiles, other=float("-inf")))
    least, most = tl.min(low, axis=0), tl.max(high, axis=0)
    tl.store(head + row * (n4 + 2), least)
    tl.store(head + row * (n4 + 2) + 1, most * (1 / 255) - least * (1 / 255))


@kernel
def _quantise(rows, head, words, n4, TILE: tl.constexpr):
    tile, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head += row * (n4 + 2)
    low = tl.load(head)
    scale = tl.div_rn(1.0, tl.load(head + 1))
    scale = tl.where(scale < float("inf"), scale, 0.0)  # infinite if all values are equal, or nearly
    first = tile * (TILE // 4)
    word = tl.arange(0, TILE // 4)
    there = word < n4 - first
    byte = tl.arange(0, 4)[None, :]
    x = rows + (row * n4 + first) * 4
    v = tl.load(x + (word[:, None] * 4 + byte), mask=there[:, None], other=0.0).to(tl.float32)
    y = tl.minimum(tl.maximum((v - low) * scale, 0.0), 255.0)
    c = (y + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    tl.store(words + row * (n4 + 2) + 2 + first + word, tl.sum(c << (8 * byte), axis=1), mask=there)


@kernel
def _add_bytes(
    into,
    heads,
    words,
    stride,
    W,
    n4,
    factor,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * (TILE // 4)
    word, byte = tl.arange(0, TILE // 4)[:, None], tl.arange(0, 4)[None, :]
    there = word < n4 - first
    at = into + first * 4 + (word * 4 + byte)
    if KEEP:
        old = tl.load(at, mask=there)  # first, because it takes as long as everything else
    low = tl.full((), 0.0, tl.float32)
    head = heads
    for _ in range(W):
        low += tl.load(head) * factor
        head += stride
    total = tl.full([TILE // 4, 4], low, tl.float32)
    heads += 1
    words += 2 + first
    for _ in range(W):
        c = tl.load(words + word, mask=there) >> (8 * byte)
        width = tl.full([TILE // 4, 4], tl.load(heads) * factor, tl.float32)
        total = tl.fma(_whole(c & 0xFF, 0), width, total)
        heads += stride
        words += stride
    if KEEP:
        total = old + total
    tl.store(at, total, mask=there)


# The entries of largest magnitude.


@kernel
def _over(x, tau, bits, counts, n, TILE: tl.constexpr):
    """Write one bit for each entry, set if it is above tau, in words of 32, and the number of set bits in the tile."""
    tile = tl.program_id(0).to(tl.int64)
    left = n - tile * TILE
    x += tile * TILE
    word, bit = tl.arange(0, TILE // 32), tl.arange(0, 32)[None, :]
    at = word[:, None] * 32 + bit
    v = tl.load(x + at) if left >= TILE else tl.load(x + at, mask=at < left, other=0.0)
    above = (tl.abs(v.to(tl.float32)) > tl.load(tau)).to(tl.int32)
    tl.store(bits + tile * (TILE // 32) + word, tl.sum(above << bit, axis=1))
    tl.store(counts + tile, tl.sum(tl.sum(above, axis=1), axis=0))


@kernel
def _gather(bits, counts, ends, places, n, k, tiles, TILE: tl.constexpr):
    """Write the indices of set bits in order, and after them those of the other bits, up to k in all."""
    tile = tl.program_id(0).to(tl.int64)
    before = tl.load(ends + tile) - tl.load(counts + tile)
    total = tl.load(ends + (tiles - 1))
    word = tl.arange(0, TILE // 32)
    w = tl.load(bits + tile * (TILE // 32) + word)
    ones = w - ((w >> 1) & 0x55555555)
    ones = (ones & 0x33333333) + ((ones >> 2) & 0x33333333)
    ones = (((ones + (ones >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
    start = tl.cumsum(ones, axis=0) - ones  # counted within the tile, so that 32 bits are enough
    room = tl.maximum(tl.minimum(k - before, TILE), 0).to(tl.int32)
    slot, rest = start, w
    for _ in range(tl.max(ones, axis=0)):  # the lowest set bit of each word at a time; there are few
        bit = rest & -rest
        i = ((bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        tl.store(places + before + slot, tile * TILE + (word * 32 + i), mask=(rest != 0) & (slot < room))
        slot += 1
        rest ^= bit
    if tile * TILE - before < k - total:
        first = tile * TILE + word * 32
        behind = total + first - (before + start)
        for i in range(32):
            other = 1 - ((w >> i) & 1)
            tl.store(places + behind, first + i, mask=(other != 0) & (behind < k) & (first + i < n))
            behind += other
