"""How workers find each other: the store, a word of greeting, and the groups that are made from them."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.board import StoreBoard
from paceline.comm.dist import Transport
from paceline.comm.environment import Environment, board_prefix, check_transport
from paceline.comm.group import Group
from paceline.comm.protocol import Comm
from paceline.comm.route import Route
from paceline.errors import MismatchError, PeerTimeoutError, UsageError, nearest


@dataclass
class Rendezvous:
    """How this process meets the others, in the first epoch and in every later one.

    transport: None in a world of one, where there is nobody to meet.
    wrap: what every lane is wrapped in, for whoever wants to watch it.
    """

    env: Environment
    rank: int
    world_size: int
    backend: str
    transport: Transport | None = None
    wrap: Callable[[Comm], Comm] = lambda lane: lane
    route: Route = field(default_factory=Route)

    @property
    def device(self) -> torch.device:
        """Where this worker's tensors live."""
        return torch.device("cuda", self.env.local_rank) if "nccl" in self.backend else torch.device("cpu")

    @property
    def serves(self) -> bool:
        """Does this process serve the store?"""
        return self.transport is not None and self.env.rank == 0 and not self.env.served

    def group(self, rank: int, world_size: int, *, epoch: int = 0, joined: Collection[int] = ()) -> Group:
        """Meet the members of an epoch, under a prefix of its own in the store. Every member calls it."""
        if self.transport is None or world_size == 1:
            group = Group.single()
            group.epoch = epoch
            return group
        store = dist.PrefixStore(f"epoch {epoch}", self.transport.store) if epoch else self.transport.store
        transport = Transport(store, self.backend, self.transport.timeout_s)
        board = _greet(store, rank, world_size, transport.timeout_s)
        found: list[Route] = []  # at the first lane: by then this process can tell the others if they do not agree

        def make(name: str) -> Comm:
            if not found:
                self.route = Route.find(board, self.env.collectives)
                found.append(self.route)
            return self.wrap(found[0].lane(name, board, transport))

        return Group(rank, world_size, make, board=board, epoch=epoch, joined=joined)


def meet(env: Environment, *, backend: str | None, timeout_s: float, group: Any = None) -> Rendezvous:
    """Find the store where the workers meet, without waiting for anybody yet.

    group: a process group of torch.distributed, or a DeviceMesh of one dimension, in place of all workers.
    """
    backend = _backend(backend, env)
    if group is not None:
        return _of_process_group(env, backend, timeout_s, group)
    if env.world_size == 1:
        return Rendezvous(env, 0, 1, backend)
    check_transport()
    timeout = datetime.timedelta(seconds=timeout_s)
    if dist.is_initialized():  # by the user's script
        if (dist.get_rank(), dist.get_world_size()) != (env.rank, env.world_size):
            raise UsageError(
                f"torch.distributed says worker {dist.get_rank()} of {dist.get_world_size()}, "
                f"the environment says worker {env.rank} of {env.world_size}",
                do="initialise the process group from the environment, or leave it to paceline.prepare",
            )
        theirs = dist.distributed_c10d._get_default_store()
        store = _store(env, timeout) if env.served else dist.PrefixStore("paceline", theirs)
    else:
        store = _store(env, timeout)
    return Rendezvous(env, env.rank, env.world_size, backend, Transport(store, backend, timeout_s))


def _of_process_group(env: Environment, backend: str, timeout_s: float, group: Any) -> Rendezvous:
    """The members of an existing process group, which keeps its own connections: ours are made beside them."""
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise UsageError(
                f"group={group} has {group.ndim} dimensions",
                why="data parallelism goes along one of them",
                do='give one: group=mesh["data"]',
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"group={group!r} is not a process group", do="give a torch.distributed ProcessGroup or a DeviceMesh axis"
        )
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return Rendezvous(env, 0, 1, backend)
    check_transport()
    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    store = dist.PrefixStore(f"paceline/{ranks}", dist.distributed_c10d._get_default_store())
    return Rendezvous(env, rank, world_size, backend, Transport(store, backend, timeout_s))


def _backend(asked: str | None, env: Environment) -> str:
    gpu = torch.cuda.is_available() and env.local_rank < torch.cuda.device_count()
    if asked is None:
        return "cpu:gloo,cuda:nccl" if gpu and dist.is_nccl_available() else "gloo"
    known = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    if asked not in (*known, "cpu:gloo,cuda:nccl"):
        raise UsageError(f"backend={asked!r} is not available", do=nearest(asked, known))
    if "nccl" in asked and not gpu:
        raise UsageError(f"backend={asked!r} needs a GPU for local worker {env.local_rank}", do="use backend='gloo'")
    return "cpu:gloo,cuda:nccl" if asked == "nccl" else asked  # set-up and loader speak of tensors on the CPU


_opened: dict[tuple[str, int], Any] = {}  # stores of this process: one that is served cannot be opened twice
_meetings = 0  # how often this process has met the others: after a shutdown it may do so again


def _store(env: Environment, timeout: datetime.timedelta) -> Any:
    """The c10d store, under a prefix that no earlier meeting of these workers has used."""
    global _meetings
    where = (env.address, env.port)
    if where not in _opened:
        _opened[where] = _open_store(env, timeout)
    prefix = board_prefix() if _meetings == 0 else f"{board_prefix()}/meeting {_meetings}"
    _meetings += 1
    return dist.PrefixStore(prefix, _opened[where])


def _open_store(env: Environment, timeout: datetime.timedelta) -> Any:
    """Connect to the store. Worker 0 serves it, on its own address only, unless the launcher does."""
    serves = env.rank == 0 and not env.served
    extra: dict[str, Any] = {"master_listen_fd": _listen(env).detach()} if serves else {}
    try:
        return dist.TCPStore(env.address, env.port, None, serves, timeout, wait_for_workers=False, **extra)
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        raise PeerTimeoutError(
            f"worker {env.rank} cannot reach the store at {env.address}:{env.port}",
            why=str(error).splitlines()[0],
            do="check MASTER_ADDR and MASTER_PORT, that worker 0 (or the launcher) runs, and the firewall between them",
            worker=0,
        ) from None


def _listen(env: Environment) -> socket.socket:
    family = socket.getaddrinfo(env.address, env.port)[0][0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((env.address, env.port))
    except OSError as error:
        sock.close()
        with socket.socket(family, socket.SOCK_STREAM) as free:
            free.bind((env.address if error.errno == 98 else "", 0))
            other = free.getsockname()[1]
        raise UsageError(
            f"worker 0 cannot listen on {env.address}:{env.port}",
            why=str(error),
            do=f"set MASTER_PORT to a free port on every worker, say {other}; MASTER_ADDR must be worker 0's own",
        ) from None
    sock.listen(1024)
    return sock


def _greet(store: Any, rank: int, world_size: int, timeout_s: float) -> StoreBoard:
    """Claim the rank and wait for all others; say who is missing, and who is there twice."""
    board = StoreBoard(store, rank, world_size, timeout_s)
    me = f'"{socket.gethostname()}:{os.getpid()}"'
    holder = store.compare_set(f"here/{rank}", "", me).decode()
    if holder != me:
        raise MismatchError(
            f"two workers say they are worker {rank}",
            why=f"{holder} came first, this is {me}",
            do="give every worker its own RANK",
            worker=rank,
        )
    end = time.monotonic() + timeout_s
    while len(here := board.others("here")) < world_size - 1:
        board.raise_cause()
        if time.monotonic() > end:
            missing = sorted(set(range(world_size)) - set(here) - {rank})
            raise PeerTimeoutError(
                f"workers {missing} of {world_size} did not come within {timeout_s:g} s",
                why=f"here are {', '.join(f'{r} on {w}' for r, w in sorted((here | {rank: me}).items()))}",
                do="start them, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                worker=missing[0],
            )
        time.sleep(0.01)
    return board
