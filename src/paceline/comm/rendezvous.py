"""How workers find each other: a word of greeting in the store, and the groups that are made from it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm import meeting_place
from paceline.comm.board import DEAD, StoreBoard
from paceline.comm.dist import Transport
from paceline.comm.environment import Environment, check_transport
from paceline.comm.group import Group
from paceline.comm.host_memory import place
from paceline.comm.meeting_place import MeetingPlace
from paceline.comm.protocol import Comm
from paceline.comm.route import Route
from paceline.comm.store import Store
from paceline.comm.store_server import StoreServer
from paceline.errors import MismatchError, PeerTimeoutError, UsageError, nearest, plain

_PATIENT_S = 10.0  # after this a worker says for whom it waits


@dataclass
class Rendezvous:
    """How this process meets the others, in the first epoch and in every later one.

    transport: None in a world of one, where there is nobody to meet.
    wrap: what every lane is wrapped in, for whoever wants to watch it.
    server: the store, where this process serves it.
    """

    env: Environment
    rank: int
    world_size: int
    backend: str
    transport: Transport | None = None
    wrap: Callable[[Comm], Comm] = lambda lane: lane
    route: Route = field(default_factory=Route)
    server: StoreServer | None = None

    @property
    def device(self) -> torch.device:
        """Where this worker's tensors live."""
        return torch.device("cuda", self.env.local_rank) if "nccl" in self.backend else torch.device("cpu")

    def group(self, rank: int, world_size: int, *, epoch: int = 0, joined: Collection[int] = ()) -> Group:
        """Meet the members of an epoch, under a prefix of its own in the store. Every member calls it."""
        if self.transport is None or world_size == 1:
            group = Group.single()
            group.epoch = epoch
            return group
        store = self.transport.store.under(f"epoch {epoch}") if epoch else self.transport.store
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
    theirs = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (env.rank, env.world_size)
    if theirs != (env.rank, env.world_size):
        raise UsageError(
            f"torch.distributed says worker {theirs[0]} of {theirs[1]}, "
            f"the environment says worker {env.rank} of {env.world_size}",
            do="initialise the process group from the environment, or leave it to paceline.prepare",
        )
    return _at(meeting_place.find(env, timeout_s), env, env.rank, env.world_size, backend, timeout_s)


def _at(
    there: MeetingPlace, env: Environment, rank: int, world_size: int, backend: str, timeout_s: float
) -> Rendezvous:
    return Rendezvous(env, rank, world_size, backend, Transport(there.store(), backend, timeout_s), server=there.server)


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
    return _at(meeting_place.find(env, timeout_s, group), env, rank, world_size, backend, timeout_s)


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


def _greet(store: Store, rank: int, world_size: int, timeout_s: float) -> StoreBoard:
    """Claim the rank and wait for all others; say who is missing, and who is there twice."""
    board = StoreBoard(store, rank, world_size, timeout_s)
    me = json.dumps({"where": f"{socket.gethostname()}:{os.getpid()}", "pid": os.getpid(), "place": place()})
    holder = store.compare_set(f"here/{rank}", "", me).decode(errors="replace")
    if holder != me:
        raise MismatchError(
            f"two workers say they are worker {rank}",
            why=f"{_where(json.loads(holder))} came first, this is {_where(json.loads(me))}",
            do="give every worker its own RANK",
            worker=rank,
        )
    store.leave_will(DEAD, str(rank))
    began = time.monotonic()
    answer, told = store.collect("here", world_size, timeout_s), False
    while not answer.has_come:
        store.connection.wait_for(answer, board.news(), seconds=0.5)
        if answer.has_come:
            break
        board.raise_cause()
        if not told and time.monotonic() - began > _PATIENT_S:
            told = True
            here = board.others("here")
            if min(here, default=rank) >= rank:  # one says it for all
                missing = sorted(set(range(world_size)) - set(here) - {rank})
                print(f"paceline: worker {rank} waits for workers {missing} to come", file=sys.stderr, flush=True)
    if answer.fields() is None:
        here = board.others("here") | {rank: json.loads(me)}
        missing = sorted(set(range(world_size)) - set(here))
        raise PeerTimeoutError(
            f"workers {missing} of {world_size} did not come within {timeout_s:g} s",
            why=f"here are {', '.join(f'{r} on {_where(one)}' for r, one in sorted(here.items()))}",
            do="start them, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            worker=missing[0] if missing else None,
        )
    others = board.others("here")
    board.processes = {r: int(one["pid"]) for r, one in others.items() if one["place"] == place()}
    return board


def _where(one: Any) -> str:
    return plain(str(one["where"]))[:200]
