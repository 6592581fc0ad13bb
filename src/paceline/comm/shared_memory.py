"""The lane between workers of one host, over shared memory instead of the loopback interface."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.lane import Lane, Op, payload, signature
from paceline.comm.moves import Moves, check_mean
from paceline.comm.outboxes import Outboxes
from paceline.comm.progress import Progress, Steps, giving_up
from paceline.comm.protocol import Board


class SharedMemoryComm(Lane):
    """A lane in shared memory, for CPU tensors.

    Sums are made in rank order, so they are bitwise equal on all workers; 16-bit types are added up in fp32 and rounded
    once. `sent` counts the payload that the same operation would send over a network, so that methods can be compared;
    no network interface carries any of it. Operations are compared between workers at the first use of a shape, as in
    every lane, and also each time: [Note: labels] in progress.py.
    """

    def __init__(self, boxes: Outboxes, *, name: str, board: Board, timeout_s: float) -> None:
        super().__init__(boxes.me, boxes.count, name=name, board=board)
        self._moves, self._progress = Moves(boxes), Progress(boxes, name, timeout_s)

    def mean(self, x: Tensor) -> Op:
        check_mean(x)
        return self._reduce("mean", x, self.world_size)

    def sum(self, x: Tensor) -> Op:
        return self._reduce("sum", x, 1)

    def _reduce(self, op: str, x: Tensor, over: int) -> Op:
        label = self._start(op, x, 2 * payload(x) * (self.world_size - 1) // self.world_size)
        return self._go(label, x, self._moves.reduce(x, over))

    def all_gather(self, x: Tensor) -> Op:
        label = self._start("all_gather", x, payload(x) * (self.world_size - 1))
        out = x.new_empty((self.world_size, *x.shape))
        out[self.rank] = x
        others = {r: out[r] for r in range(self.world_size) if r != self.rank}
        return self._go(label, out, self._moves.hand_round(out[self.rank], others, payload(x)))

    def reduce_scatter_mean(self, x: Tensor) -> Op:
        check_mean(x)
        label = self._start("reduce_scatter_mean", x, payload(x) * (self.world_size - 1) // self.world_size)
        out = x.new_empty(x.numel() // self.world_size)
        return self._go(label, out, self._moves.reduce_rows(list(x.reshape(self.world_size, -1)), out, self.world_size))

    def all_to_all(self, x: Tensor) -> Op:
        label = self._start("all_to_all", x, payload(x) * (self.world_size - 1) // self.world_size)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._go(label, out, self._moves.all_to_all(list(x.contiguous()), list(out)))

    def swap(self, x: Tensor, peer: int) -> Op:
        return self._pass(self._start("swap", x, payload(x)), x, peer)

    def shift(self, x: Tensor, by: int) -> Op:
        label = self._start("shift", x, payload(x) if by % self.world_size else 0)
        return self._pass(label, x, (self.rank - by) % self.world_size) if by % self.world_size else Op(lambda: x)

    def _pass(self, label: str, x: Tensor, source: int) -> Op:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._go(label, out, self._moves.hand_round(x.contiguous(), {source: out}, payload(x)))

    def broadcast(self, x: Tensor, root: int = 0) -> Op:
        label = self._start("broadcast", x, payload(x) if self.rank == root else 0)
        mine, into = (x, {}) if self.rank == root else (None, {root: x})
        return self._go(f"{label} from {root}", x, self._moves.hand_round(mine, into, payload(x)))

    def _go(self, label: str, out: Tensor, steps: Steps) -> Op:
        return giving_up(self._op(label, out, self._progress.start(signature(label, out), steps)), self._progress)
