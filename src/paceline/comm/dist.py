"""Lanes over gloo and NCCL. Backends are made from a store and a prefix: no default process group is needed."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.comm.frames import split
from paceline.comm.lane import NARROW, Lane, Op, payload
from paceline.comm.protocol import Board
from paceline.comm.store import Store, StoreConnection

_EVER = datetime.timedelta(days=30)
_LONGEST_S = 86400.0
_SPARE_S = 30.0


L = TypeVar("L", bound="DistComm")


class TorchStore(dist.Store):
    """The store as torch's backends know one. They keep no reference to the Python object, so it must be kept."""

    def __init__(self, store: Store, seconds: float) -> None:
        super().__init__()
        self._store, self._seconds = store, seconds

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._wait([key], self._seconds)[0]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._wait(keys, self._seconds if timeout is None else timeout.total_seconds())

    def _wait(self, keys: Sequence[str], seconds: float) -> Sequence[bytes]:
        answer, connection = self._store.when_all(keys, min(seconds, _LONGEST_S)), self._store.connection
        alarms = [connection.alarm] if connection.alarm is not None else []
        while not answer.has_come and not any(alarm.has_come for alarm in alarms):
            connection.wait_for(answer, *alarms, seconds=1.0)
        if not answer.has_come:  # whoever made the backend knows what has happened
            raise dist.DistStoreError("a worker that is waited for is gone")
        values = answer.fields()
        if values is None:
            raise dist.DistStoreError(f"{', '.join(keys)} not set within {seconds:g} s")
        return split(values[0])

    def check(self, keys: list[str]) -> bool:
        return self._store.check(*keys)

    def add(self, key: str, more: int) -> int:
        return self._store.add(key, more)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._store.delete(key) > 0

    def num_keys(self) -> int:
        return self._store.count_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 (torch calls them so from C++)

    def clone(self) -> TorchStore:
        return self


@dataclass(frozen=True)
class Transport:
    """What lanes between processes are made of: the store where workers meet, and the backends they use."""

    store: Store  # what is written there lies under a prefix of the epoch
    backend: str = "gloo"  # or "cpu:gloo,cuda:nccl"
    timeout_s: float = 300.0

    def connect(self, prefix: str, rank: int, world_size: int) -> dict[str, Any]:
        """One backend for each kind of device, over the workers that connect under this prefix."""
        # Longer than what a worker waits by itself: it then ends a wait with a better message than a backend does.
        timeout = datetime.timedelta(seconds=self.timeout_s + _SPARE_S)
        store = self.torch_store(prefix)
        made: dict[str, Any] = {"cpu": dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, world_size, timeout)}
        if "nccl" in self.backend:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            made["cuda"] = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), rank, world_size, options)
        else:
            made["cuda"] = made["cpu"]  # gloo copies through the host
        return made

    def torch_store(self, prefix: str) -> Any:
        """The store below a prefix, for torch's own classes."""
        connection = self.store.connection
        if connection not in _torch_stores:
            _torch_stores[connection] = TorchStore(self.store.root, self.timeout_s)
        return dist.PrefixStore(f"{self.store.prefix}{prefix}", _torch_stores[connection])

    def lane(self, name: str, board: Board, rank: int, world_size: int) -> DistComm:
        """A lane over all workers of a group."""
        return self._made(DistComm, name, name, board, rank, world_size)

    def team_lane(self, name: str, board: Board, rank: int, teams: Sequence[Sequence[int]]) -> DistComm:
        """A lane over the workers of this worker's own team, numbered as the team lists them."""
        number, team = next((i, team) for i, team in enumerate(teams) if rank in team)
        me = team.index(rank)
        return self._made(DistComm, f"{name}/team {number}", name, board, me, len(team))

    def pair_lane(self, name: str, board: Board, rank: int) -> PairComm:
        """A lane between two processes that run different programs, one of rank 0 and one of rank 1."""
        return self._made(PairComm, name, name, board, rank, 2)

    def _made(self, kind: type[L], prefix: str, name: str, board: Board, rank: int, world_size: int) -> L:
        try:
            backends = self.connect(prefix, rank, world_size)
        except RuntimeError as error:
            raise board.lost(f"the connections of lane {name}", error) from None
        return kind(backends, rank, world_size, name=name, board=board)


_torch_stores: dict[StoreConnection, TorchStore] = {}  # kept as long as the process: see TorchStore


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
