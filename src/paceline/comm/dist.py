"""Lanes over gloo and NCCL. Backends are made from a store and a prefix: no default process group is needed."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.comm.lane import NARROW, Lane, Op, payload
from paceline.comm.protocol import Board

_EVER = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Transport:
    """What lanes between processes are made of: the store where workers meet, and the backends they use."""

    store: Any  # a c10d store; what is written there lies under a prefix of the epoch
    backend: str = "gloo"  # or "cpu:gloo,cuda:nccl"
    timeout_s: float = 300.0

    def connect(self, prefix: str, rank: int, world_size: int) -> dict[str, Any]:
        """One backend for each kind of device, over the workers that connect under this prefix."""
        store, timeout = dist.PrefixStore(prefix, self.store), datetime.timedelta(seconds=self.timeout_s)
        made: dict[str, Any] = {"cpu": dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, world_size, timeout)}
        if "nccl" in self.backend:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            made["cuda"] = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), rank, world_size, options)
        else:
            made["cuda"] = made["cpu"]  # gloo copies through the host
        return made

    def lane(self, name: str, board: Board, rank: int, world_size: int) -> DistComm:
        """A lane over all workers of a group."""
        return DistComm(self.connect(name, rank, world_size), rank, world_size, name=name, board=board)

    def team_lane(self, name: str, board: Board, rank: int, teams: Sequence[Sequence[int]]) -> DistComm:
        """A lane over the workers of this worker's own team, numbered as the team lists them."""
        number, team = next((i, team) for i, team in enumerate(teams) if rank in team)
        me = team.index(rank)
        backends = self.connect(f"{name}/team {number}", me, len(team))
        return DistComm(backends, me, len(team), name=name, board=board)

    def pair_lane(self, name: str, board: Board, rank: int) -> PairComm:
        """A lane between two processes that run different programs, one of rank 0 and one of rank 1."""
        return PairComm(self.connect(name, rank, 2), rank, 2, name=name, board=board)

    @classmethod
    def at(cls, host: str, port: int, timeout_s: float) -> Transport:
        """Gloo between processes that meet in the store served at this address."""
        timeout = datetime.timedelta(seconds=timeout_s)
        return cls(dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False), timeout_s=timeout_s)

    def unprefixed(self) -> Transport:
        """The same without the prefixes of its store, to meet processes that only know where the store is served."""
        store = self.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return replace(self, store=store)

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the store without prefixes; None where it is not served over TCP."""
        return (self.store.host, self.store.port) if isinstance(self.store, dist.TCPStore) else None


class DistComm(Lane):
    """A lane over backends of its own: gloo for CPU tensors, NCCL or gloo for those on a GPU."""

    def __init__(self, backends: Mapping[str, Any], rank: int, world_size: int, *, name: str, board: Board) -> None:
        super().__init__(rank, world_size, name=name, board=board)
        self.backends = backends

    def _backend(self, x: Tensor) -> Any:
        return self.backends[x.device.type]

    def mean(self, x: Tensor) -> Op:
        if x.dtype in NARROW:  # W large values must not overflow while they are summed
            return self._reduce("mean", x.div_(self.world_size), dist.ReduceOp.SUM)
        return self._reduce("mean", x, dist.ReduceOp.AVG)

    def sum(self, x: Tensor) -> Op:
        return self._reduce("sum", x, dist.ReduceOp.SUM)

    def _reduce(self, op: str, x: Tensor, how: Any) -> Op:
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = how, True
        label = self._start(op, x, 2 * payload(x) * (self.world_size - 1) // self.world_size)
        return self._op(label, x, self._backend(x).allreduce([_real(x)], options))

    def all_gather(self, x: Tensor) -> Op:
        label = self._start("all_gather", x, payload(x) * (self.world_size - 1))
        out = x.new_empty((self.world_size, *x.shape))
        options = c10d.AllgatherOptions()
        options.asyncOp = True
        work = self._backend(x)._allgather_base(_real(out).view(-1), _real(x).reshape(-1), options)
        return self._op(label, out, work)

    def reduce_scatter_mean(self, x: Tensor) -> Op:
        label = self._start("reduce_scatter_mean", x, payload(x) * (self.world_size - 1) // self.world_size)
        if x.is_cuda:
            out = x.new_empty(x.numel() // self.world_size)
            options = dist.ReduceScatterOptions()
            options.asyncOp = True  # the sum, which is the default
            work = self._backend(x)._reduce_scatter_base(out, x.div_(self.world_size), options)
            return self._op(label, out, work)
        rows = torch.empty_like(x).view(self.world_size, -1)  # gloo's own reduce-scatter sends what an all-reduce does
        op = self._op(label, rows, self._trade(rows.view(-1), x))
        return Op(lambda: _mean(op.wait()), op.done, op.notify)

    def all_to_all(self, x: Tensor) -> Op:
        label = self._start("all_to_all", x, payload(x) * (self.world_size - 1) // self.world_size)
        out = torch.empty_like(x)
        return self._op(label, out, self._trade(out, x))

    def swap(self, x: Tensor, peer: int) -> Op:
        label = self._start("swap", x, payload(x))
        return self._pass(label, x, peer, peer)

    def shift(self, x: Tensor, by: int) -> Op:
        label = self._start("shift", x, payload(x) if by % self.world_size else 0)
        to, source = (self.rank + by) % self.world_size, (self.rank - by) % self.world_size
        return self._pass(label, x, to, source) if to != self.rank else Op(lambda: x)

    def _pass(self, label: str, x: Tensor, to: int, source: int) -> Op:
        """Send by a lopsided all_to_all: gloo closes a connection on which the wait for a send or receive times out."""
        comes, goes = ([x.numel() if r == peer else 0 for r in range(self.world_size)] for peer in (source, to))
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        work = self._trade(out.view(-1), x.reshape(-1), comes, goes)
        return self._op(label, out, work)

    def broadcast(self, x: Tensor, root: int = 0) -> Op:
        label = self._start("broadcast", x, payload(x) if self.rank == root else 0)
        return self._op(label, x, self._backend(x).broadcast([_real(x)], self._broadcast_options(root)))

    def _broadcast_options(self, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
        return options

    def _trade(self, out: Tensor, x: Tensor, comes: Sequence[int] = (), goes: Sequence[int] = ()) -> Any:
        options = dist.AllToAllOptions()
        options.asyncOp = True
        return self._backend(x).alltoall_base(_real(out), _real(x), list(comes), list(goes), options)


class PairComm(DistComm):
    """A lane between two processes that run different programs: each broadcasts what the other is to receive.

    A broadcast and not a send, because a gloo receive whose wait runs into a time-out closes the connection, so it
    cannot be waited for in slices. Either side may be silent for as long as it likes: a broadcast has no time-out of
    its own, and a wait for one ends with the connection or when the board gives up.
    """

    def agree(self, what: str, text: str) -> None:
        """Do nothing: only the sender knows what comes next, and tells sizes in the messages before."""

    def _broadcast_options(self, root: int) -> Any:
        options = super()._broadcast_options(root)
        options.timeout = _EVER
        return options


def _real(x: Tensor) -> Tensor:
    """Backends do not know complex numbers: they are pairs of real ones."""
    return torch.view_as_real(x) if x.is_complex() else x


def _mean(rows: Tensor) -> Tensor:
    """Mean over the workers' rows, summed in rank order in fp32 or wider, rounded once."""
    total = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total += row
    return total.div_(len(rows)).to(rows.dtype)
