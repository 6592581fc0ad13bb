"""The wire: the only file of the data path that knows torch.distributed.

`DistComm` speaks gloo or NCCL between processes; `Alone` (alone.py) is a world of one, `ThreadComm` (threadcomm.py)
lets workers be threads. All count payload bytes alike, so what is counted in a test is what is sent in a run.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.waiting import Board, until

NARROW = (torch.float16, torch.bfloat16)
# torch 2.13 has new names for these two and warns at the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Op:
    """A Handle: awaiting it hands it to the driver, which resumes the coroutine when it is this one's turn."""

    def __init__(self, wait: Callable[[], Tensor], done: Callable[[], bool] = lambda: True) -> None:
        self._wait, self.done = wait, done

    def wait(self) -> Tensor:
        return self._wait()

    def __await__(self) -> Generator[Op, None, Tensor]:
        yield self
        return self.wait()


def payload(x: Tensor) -> int:
    return x.numel() * x.element_size()


def signature(op: str, x: Tensor) -> str:
    return f"{op} of {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class Lane:
    """What all lanes between processes have. The order of operations on one is independent of all other lanes."""

    def __init__(self, rank: int, world: int, *, name: str, board: Board) -> None:
        self.rank, self.world, self.name, self.board = rank, world, name, board
        self.sent = self.ops = 0
        self._seen: set[str] = set()

    def agree(self, what: str, text: str) -> None:
        self.board.agree(self.name, what, text)

    def _start(self, op: str, x: Tensor, sends: int) -> str:
        """Count it, and before its first use make sure that every worker means the same operation: two sizes that
        meet in gloo end a process by SIGABRT, and not always the one that was wrong."""
        what = signature(op, x)
        if what not in self._seen:
            self.agree(f"operation {self.ops} of lane {self.name}", what)
            self._seen.add(what)
        self.sent += sends
        self.ops += 1
        return f"{op} #{self.ops - 1} of lane {self.name}"

    def _op(self, label: str, out: Tensor, *works: Any) -> Op:
        number = self.ops - 1

        def wait() -> Tensor:
            for work in works:
                until(work, self.board, self.name, number, label, blocking=not out.is_cuda)
            return out

        return Op(wait, lambda: all(work.is_completed() for work in works))


class DistComm(Lane):
    """A lane over a process group of its own: gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup, *, name: str, board: Board) -> None:
        super().__init__(group.rank(), group.size(), name=name, board=board)
        self.group = group

    @classmethod
    def create(cls, name: str, board: Board, deadline_s: float, teams: Sequence[list[int]] = ()) -> DistComm:
        """A new lane over all workers, or over those of one's own team; all create the same lanes in the same order."""
        timeout = datetime.timedelta(seconds=deadline_s)
        group = dist.new_subgroups_by_enumeration(teams, timeout)[0] if teams else dist.new_group(timeout=timeout)
        return cls(group, name=name, board=board)

    def mean(self, x: Tensor) -> Op:
        if x.dtype in NARROW:  # W large values must not overflow while they are summed
            return self._reduce("mean", x.div_(self.world), dist.ReduceOp.SUM)
        return self._reduce("mean", x, dist.ReduceOp.AVG)

    def sum(self, x: Tensor) -> Op:
        return self._reduce("sum", x, dist.ReduceOp.SUM)

    def _reduce(self, op: str, x: Tensor, how: Any) -> Op:
        label = self._start(op, x, 2 * payload(x) * (self.world - 1) // self.world)
        return self._op(label, x, dist.all_reduce(x, how, group=self.group, async_op=True))

    def gather(self, x: Tensor) -> Op:
        label = self._start("gather", x, payload(x) * (self.world - 1))
        out = x.new_empty((self.world, *x.shape))
        work = _all_gather(out.view(-1), x.reshape(-1), group=self.group, async_op=True)
        return self._op(label, out, work)

    def scatter_mean(self, x: Tensor) -> Op:
        label = self._start("scatter_mean", x, payload(x) * (self.world - 1) // self.world)
        if x.is_cuda:
            out = x.new_empty(x.numel() // self.world)
            return self._op(label, out, _reduce_scatter(out, x.div_(self.world), group=self.group, async_op=True))
        rows = torch.empty_like(x).view(self.world, -1)  # gloo's own reduce-scatter sends what an all-reduce does
        op = self._op(label, rows, dist.all_to_all_single(rows.view(-1), x, group=self.group, async_op=True))
        return Op(lambda: _mean(op.wait()), op.done)

    def alltoall(self, x: Tensor) -> Op:
        label = self._start("alltoall", x, payload(x) * (self.world - 1) // self.world)
        out = torch.empty_like(x)
        return self._op(label, out, dist.all_to_all_single(out, x, group=self.group, async_op=True))

    def swap(self, x: Tensor, peer: int) -> Op:
        label = self._start("swap", x, payload(x))
        return self._pass(label, x, peer, peer)

    def shift(self, x: Tensor, by: int) -> Op:
        label = self._start("shift", x, payload(x) if by % self.world else 0)
        to, source = (self.rank + by) % self.world, (self.rank - by) % self.world
        return self._pass(label, x, to, source) if to != self.rank else Op(lambda: x)

    def _pass(self, label: str, x: Tensor, to: int, source: int) -> Op:
        """By a lopsided alltoall: gloo closes the connection of a send or receive whose wait runs out of time."""
        comes, goes = ([x.numel() if r == peer else 0 for r in range(self.world)] for peer in (source, to))
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        work = dist.all_to_all_single(out.view(-1), x.reshape(-1), comes, goes, group=self.group, async_op=True)
        return self._op(label, out, work)

    def broadcast(self, x: Tensor, root: int = 0) -> Op:
        label = self._start("broadcast", x, payload(x) if self.rank == root else 0)
        return self._op(label, x, dist.broadcast(x, group_src=root, group=self.group, async_op=True))


def _mean(rows: Tensor) -> Tensor:
    """Of everyone's, in rank order, in fp32 at least, rounded once."""
    total = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total += row
    return total.div_(len(rows)).to(rows.dtype)
