"""Collectives between the workers of one host, as rounds over their outboxes ([Note: rounds] in outboxes.py).

Vectors are bytes here, except where they are added up. A vector larger than a side of an outbox is sent in pieces,
which stay in the processor's cache on their way from one worker to the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.comm.lane import NARROW
from paceline.comm.outboxes import SIDE, Bytes, Outboxes
from paceline.comm.progress import Steps
from paceline.errors import UsageError

_SMALL = 1 << 14  # bytes: up to here every worker adds up the whole vector, which saves a round
_CHUNK = 1 << 16  # elements: their sum stays in the second-level cache
_NARROW_CHUNK = 1 << 14  # elements: few enough that torch starts no other threads


def flat(x: Tensor) -> Bytes:
    """The memory of a contiguous tensor as bytes."""
    return x.detach().view(-1).view(torch.uint8).numpy()


def check_mean(x: Tensor) -> None:
    """Raise unless the tensor's type has a mean."""
    if not (x.is_floating_point() or x.is_complex()):
        raise UsageError(f"{x.dtype} has no mean", do="convert it to a floating-point type, or use sum")


class Moves:
    """One worker's part in each collective. All workers call the same one with vectors of the same sizes."""

    def __init__(self, boxes: Outboxes) -> None:
        self.boxes, self.me, self.world_size = boxes, boxes.me, boxes.count
        self.others = [r for r in range(self.world_size) if r != self.me]
        self.slot = SIDE // self.world_size // 64 * 64  # a side, cut into one slot a worker
        self._scratch = np.empty(_CHUNK * 16, np.uint8)  # enough for a chunk of the widest type

    def hand_round(self, mine: Tensor | None, into: Mapping[int, Tensor], longest: int) -> Steps:
        """Offer `mine` to all workers, and set `into[r]` to worker r's. `longest`: bytes of the longest vector."""
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

    def all_to_all(self, rows: Sequence[Tensor], into: Sequence[Tensor]) -> Steps:
        """Send row r to worker r, and set `into[r]` to the row that worker r has for this worker."""
        targets = [flat(x) for x in into]
        targets[self.me][:] = flat(rows[self.me])

        def take(k: int) -> None:
            for r in self.others:
                piece = self._piece(targets[r], k)
                piece[:] = self._for_me(r, piece.size)

        return self._rows([flat(row) for row in rows], take)

    def reduce_rows(self, rows: Sequence[Tensor], into: Tensor, over: int) -> Steps:
        """Send row r to worker r, and set `into` to the sum of all rows for this worker, divided by `over`.

        `into` may be this worker's own row.
        """
        add, target, own = Sum(into.dtype, over, self._scratch), flat(into), flat(rows[self.me])

        def take(k: int) -> None:
            piece = self._piece(target, k)
            parts = [
                self._for_me(r, piece.size) if r != self.me else self._piece(own, k) for r in range(self.world_size)
            ]
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
        """Set x to the sum over the workers, divided by `over`.

        Each worker adds up one shard of every piece. Round k sends the shards of piece k to the workers that add them
        up, and the sums of piece k - 1 back to all.
        """
        add, whole = Sum(x.dtype, over, self._scratch), flat(x)
        if whole.size <= _SMALL:
            return self._reduce_small(whole, add)
        pieces = _Pieces(x.numel(), x.element_size(), self.world_size, self.slot)

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
                add([self._for_me(r, mine.size) if r != self.me else mine for r in range(self.world_size)], mine)
            for r in self.others:
                part = whole[pieces(k - 1, r)]
                part[:] = self.boxes.side(r)[r * self.slot :][: part.size]

        return Steps(pieces.count + 1, put, take)

    def _reduce_small(self, whole: Bytes, add: Sum) -> Steps:
        def put(k: int) -> None:
            self.boxes.side(self.me)[: whole.size] = whole

        def take(k: int) -> None:
            add([self.boxes.side(r)[: whole.size] for r in range(self.world_size)], whole)

        return Steps(1 if whole.size else 0, put, take)


class _Pieces:
    """The bytes of shard r of piece k in a vector; an empty slice if there is no piece k."""

    def __init__(self, n: int, element: int, world_size: int, slot: int) -> None:
        self.n, self.element, self.world_size = n, element, world_size
        self.length = slot // element * world_size
        self.count = math.ceil(n / self.length)

    def __call__(self, k: int, r: int) -> slice:
        if not 0 <= k < self.count:
            return slice(0, 0)
        first = k * self.length
        here = min(self.length, self.n - first)
        each = math.ceil(here / self.world_size)
        low, high = (first + min(here, i * each) for i in (r, r + 1))
        return slice(low * self.element, high * self.element)


class Sum:
    """Adds up vectors of one type in rank order, and divides. 16-bit types are added up in fp32 and rounded once."""

    def __init__(self, dtype: torch.dtype, over: int, scratch: Bytes) -> None:
        self.dtype, self.over = dtype, over
        self._narrow = dtype in NARROW
        self._kind = _kind(torch.float32 if self._narrow else dtype)
        self._total = scratch.view(self._kind)[: _NARROW_CHUNK if self._narrow else _CHUNK]

    def __call__(self, parts: Sequence[Bytes], into: Bytes) -> None:
        """Write the sum of the parts, divided, into `into`, which may be one of the parts."""
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
