"""Workers of one host, over shared memory in place of loopback."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm import Lane, Op, payload, signature
from paceline.waiting import Board
from paceline.wire.moves import Moves, check_mean
from paceline.wire.outboxes import Outboxes
from paceline.wire.progress import Progress, Steps, giving_up


class HostComm(Lane):
    """A lane in shared memory, for CPU tensors. Sums are made in rank order, so they are bitwise equal everywhere;
    narrow types are added up in fp32 and rounded once.

    `sent` is the payload that the same operation puts on a wire, by the same formulas as everywhere, so that methods
    compare; no interface sees any of it. Operations are agreed on before the first use of a shape like everybody's, and
    compared each time besides: [Note: labels], progress.py.
    """

    def __init__(self, boxes: Outboxes, *, name: str, board: Board, deadline_s: float) -> None:
        super().__init__(boxes.me, boxes.count, name=name, board=board)
        self._moves, self._progress = Moves(boxes), Progress(boxes, name, deadline_s)

    def mean(self, x: Tensor) -> Op:
        check_mean(x)
        return self._reduce("mean", x, self.world)

    def sum(self, x: Tensor) -> Op:
        return self._reduce("sum", x, 1)

    def _reduce(self, op: str, x: Tensor, over: int) -> Op:
        label = self._start(op, x, 2 * payload(x) * (self.world - 1) // self.world)
        return self._go(label, x, self._moves.reduce(x, over))

    def gather(self, x: Tensor) -> Op:
        label = self._start("gather", x, payload(x) * (self.world - 1))
        out = x.new_empty((self.world, *x.shape))
        out[self.rank] = x
        others = {r: out[r] for r in range(self.world) if r != self.rank}
        return self._go(label, out, self._moves.hand_round(out[self.rank], others, payload(x)))

    def scatter_mean(self, x: Tensor) -> Op:
        check_mean(x)
        label = self._start("scatter_mean", x, payload(x) * (self.world - 1) // self.world)
        out = x.new_empty(x.numel() // self.world)
        return self._go(label, out, self._moves.reduce_rows(list(x.reshape(self.world, -1)), out, self.world))

    def alltoall(self, x: Tensor) -> Op:
        label = self._start("alltoall", x, payload(x) * (self.world - 1) // self.world)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._go(label, out, self._moves.trade(list(x.contiguous()), list(out)))

    def swap(self, x: Tensor, peer: int) -> Op:
        return self._pass(self._start("swap", x, payload(x)), x, peer)

    def shift(self, x: Tensor, by: int) -> Op:
        label = self._start("shift", x, payload(x) if by % self.world else 0)
        return self._pass(label, x, (self.rank - by) % self.world) if by % self.world else Op(lambda: x)

    def _pass(self, label: str, x: Tensor, source: int) -> Op:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._go(label, out, self._moves.hand_round(x.contiguous(), {source: out}, payload(x)))

    def broadcast(self, x: Tensor, root: int = 0) -> Op:
        label = self._start("broadcast", x, payload(x) if self.rank == root else 0)
        mine, into = (x, {}) if self.rank == root else (None, {root: x})
        return self._go(f"{label} from {root}", x, self._moves.hand_round(mine, into, payload(x)))

    def _go(self, label: str, out: Tensor, steps: Steps) -> Op:
        return giving_up(self._op(label, out, self._progress.start(signature(label, out), steps)), self._progress)
