"""What the workers of one host can do with vectors, as rounds over their outboxes ([Note: rounds], outboxes.py).

Vectors are bytes here, except where they are added up. What is larger than a side of an outbox goes in pieces, which
stay in the processor's cache on their way from one worker to the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.comm import NARROW
from paceline.errors import UsageError
from paceline.wire.outboxes import SIDE, Bytes, Outboxes
from paceline.wire.progress import Steps

_SMALL = 1 << 14  # bytes: up to here everybody adds up everything, which saves a round
_CHUNK = 1 << 16  # elements: their sum stays in the second cache
_NARROW_CHUNK = 1 << 14  # torch wakes no other threads for so few


def flat(x: Tensor) -> Bytes:
    """The memory of a contiguous tensor."""
    return x.detach().view(-1).view(torch.uint8).numpy()


def check_mean(x: Tensor) -> None:
    if not (x.is_floating_point() or x.is_complex()):
        raise UsageError(f"{x.dtype} has no mean", do="convert it to a floating-point type, or use sum")


class Moves:
    """One worker's part in each. All workers ask for the same one with vectors of the same sizes."""

    def __init__(self, boxes: Outboxes) -> None:
        self.boxes, self.me, self.world = boxes, boxes.me, boxes.count
        self.others = [r for r in range(self.world) if r != self.me]
        self.slot = SIDE // self.world // 64 * 64  # a side, cut into one slot a worker
        self._scratch = np.empty(_CHUNK * 16, np.uint8)  # enough of the widest type

    def hand_round(self, mine: Tensor | None, into: Mapping[int, Tensor], longest: int) -> Steps:
        """`mine` to whoever wants it; `into[r]` becomes worker r's. `longest`: bytes, of anybody's."""
        out = flat(mine) if mine is not None else np.empty(0, np.uint8)
        targets = {r: flat(x) for r, x in into.items()}

        def put(k: int) -> None:
            piece = out[k * SIDE : (k + 1) * SIDE]
            self.boxes.side(self.me)[: piece.size] = piece

        def take(k: int) -> None:
            for r, target in targets.items():
                piece = target[k * SIDE : (k + 1) * SIDE]
                piece[:] = self.boxes.side(r)[: piece.size]

        return Steps(math.ceil(longest / SIDE), put, take)

    def trade(self, rows: Sequence[Tensor], into: Sequence[Tensor]) -> Steps:
        """Row r to worker r; `into[r]` becomes the row worker r has for me."""
        targets = [flat(x) for x in into]
        targets[self.me][:] = flat(rows[self.me])

        def take(k: int) -> None:
            for r in self.others:
                piece = self._piece(targets[r], k)
                piece[:] = self._for_me(r, piece.size)

        return self._rows([flat(row) for row in rows], take)

    def reduce_rows(self, rows: Sequence[Tensor], into: Tensor, over: int) -> Steps:
        """Row r to worker r; `into`, which may be my own row, becomes the sum of all rows for me, divided by `over`."""
        add, target, own = Sum(into.dtype, over, self._scratch), flat(into), flat(rows[self.me])

        def take(k: int) -> None:
            piece = self._piece(target, k)
            parts = [self._for_me(r, piece.size) if r != self.me else self._piece(own, k) for r in range(self.world)]
            add(parts, piece)

        return self._rows([flat(row) for row in rows], take)

    def _rows(self, rows: Sequence[Bytes], take: Callable[[int], None]) -> Steps:
        def put(k: int) -> None:
            for r in self.others:
                piece = self._piece(rows[r], k)
                self.boxes.side(self.me)[r * self.slot :][: piece.size] = piece

        return Steps(math.ceil(max(row.size for row in rows) / self.slot), put, take)

    def _piece(self, row: Bytes, k: int) -> Bytes:
        return row[k * self.slot : (k + 1) * self.slot]

    def _for_me(self, r: int, size: int) -> Bytes:
        return self.boxes.side(r)[self.me * self.slot :][:size]

    def reduce(self, x: Tensor, over: int) -> Steps:
        """x becomes the sum over the workers, divided by `over`.

        Each worker adds up one slice of every piece. Round k carries the slices of piece k to those who add them up,
        and the sums of piece k - 1 back.
        """
        add, whole = Sum(x.dtype, over, self._scratch), flat(x)
        if whole.size <= _SMALL:
            return self._reduce_small(whole, add)
        pieces = _Pieces(x.numel(), x.element_size(), self.world, self.slot)

        def put(k: int) -> None:
            side = self.boxes.side(self.me)
            for r in self.others:
                part = whole[pieces(k, r)]
                side[r * self.slot :][: part.size] = part
            part = whole[pieces(k - 1, self.me)]
            side[self.me * self.slot :][: part.size] = part

        def take(k: int) -> None:
            mine = whole[pieces(k, self.me)]
            if mine.size:
                add([self._for_me(r, mine.size) if r != self.me else mine for r in range(self.world)], mine)
            for r in self.others:
                part = whole[pieces(k - 1, r)]
                part[:] = self.boxes.side(r)[r * self.slot :][: part.size]

        return Steps(pieces.count + 1, put, take)

    def _reduce_small(self, whole: Bytes, add: Sum) -> Steps:
        def put(k: int) -> None:
            self.boxes.side(self.me)[: whole.size] = whole

        def take(k: int) -> None:
            add([self.boxes.side(r)[: whole.size] for r in range(self.world)], whole)

        return Steps(1 if whole.size else 0, put, take)


class _Pieces:
    """Where slice r of piece k lies in a vector, in bytes; nowhere for a piece that is not."""

    def __init__(self, n: int, element: int, world: int, slot: int) -> None:
        self.n, self.element, self.world = n, element, world
        self.length = slot // element * world
        self.count = math.ceil(n / self.length)

    def __call__(self, k: int, r: int) -> slice:
        if not 0 <= k < self.count:
            return slice(0, 0)
        first = k * self.length
        here = min(self.length, self.n - first)
        each = math.ceil(here / self.world)
        low, high = (first + min(here, i * each) for i in (r, r + 1))
        return slice(low * self.element, high * self.element)


class Sum:
    """Add up vectors of one type, in their order, and divide. Narrow types are added up in fp32 and rounded once."""

    def __init__(self, dtype: torch.dtype, over: int, scratch: Bytes) -> None:
        self.dtype, self.over = dtype, over
        self._narrow = dtype in NARROW
        self._kind = _kind(torch.float32 if self._narrow else dtype)
        self._total = scratch.view(self._kind)[: _NARROW_CHUNK if self._narrow else _CHUNK]

    def __call__(self, parts: Sequence[Bytes], into: Bytes) -> None:
        """`into` may be one of the parts."""
        step = self._total.size * self.dtype.itemsize
        add = self._add_narrow if self._narrow else self._add
        for at in range(0, into.size, step):
            add([part[at : at + step] for part in parts], into[at : at + step])

    def _add(self, parts: Sequence[Bytes], into: Bytes) -> None:
        first, second, *rest = (part.view(self._kind) for part in parts)
        result = into.view(self._kind)
        total = self._total[: first.size] if rest else result
        np.add(first, second, out=total)
        for part in rest:
            total += part
        if self.over != 1:
            total /= self.over
        if rest:
            result[:] = total

    def _add_narrow(self, parts: Sequence[Bytes], into: Bytes) -> None:
        first, *rest = (torch.from_numpy(part).view(self.dtype) for part in parts)
        total = torch.from_numpy(self._total)[: first.numel()].copy_(first)
        for part in rest:
            total += part
        if self.over != 1:
            total /= self.over
        torch.from_numpy(into).view(self.dtype).copy_(total)


@functools.cache
def _kind(dtype: torch.dtype) -> np.dtype:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        raise UsageError(f"vectors of {dtype} cannot be added up", do="convert them to a wider type first") from None
