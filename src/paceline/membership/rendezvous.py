"""How workers find each other: the store, the process group, a word of greeting, and a word of farewell."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from paceline.alone import Alone
from paceline.comm import DistComm
from paceline.environment import Environment, board_prefix, check_transport
from paceline.errors import DeadlineError, MismatchError, UsageError, nearest
from paceline.membership.board import StoreBoard
from paceline.parts import Comm
from paceline.wire.host import HostComm
from paceline.wire.route import Route

_FAREWELL_S = 60.0  # how long a finished worker stays for those still in their last operation
_AFTERMATH_S = 5.0  # ... and worker 0, if it serves the store, after a failure


class World:
    """This process's place among the workers: makes lanes, tells others of failures, leaves properly."""

    def __init__(self, env: Environment, backend: str, board: StoreBoard | None, deadline_s: float) -> None:
        self.env, self.backend, self.board, self.deadline_s = env, backend, board, deadline_s
        self.rank, self.world = env.rank, env.world
        self.device = torch.device("cuda", env.local_rank) if "nccl" in backend else torch.device("cpu")
        self.lanes: list[DistComm | HostComm] = []
        self.route = Route()
        self.make_lane: Callable[[str, StoreBoard, float], DistComm | HostComm] = self._lane  # trace/ has another
        if board is not None:
            board.counts = lambda: {lane.name: lane.ops for lane in self.lanes}
        self.closing: list[Callable[[], None]] = []  # called when this worker leaves, whatever the reason
        self._pid = os.getpid()
        self.failed = self._over = False
        self._code = 1  # the exit code after a failure

    def lane(self, name: str) -> Comm:
        """A Comm of its own order. All workers ask for the same lanes in the same order."""
        self.check_process()
        if self.board is None:
            return Alone()
        if not self.lanes:
            self.route = Route.find(self.board, self.env.collectives)
        self.lanes.append(self.make_lane(name, self.board, self.deadline_s))
        return self.lanes[-1]

    def _lane(self, name: str, board: StoreBoard, deadline_s: float) -> DistComm | HostComm:
        return self.route.lane(name, board, deadline_s)

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked from a worker and is not one itself",
                why="connections to the other workers cannot be shared by two processes",
                do="start child processes with the spawn method, or before paceline.prepare",
            )

    # ------------------------------------------------------------------------------------------------ the end

    def watch_exit(self) -> None:
        """Tell the others of an uncaught exception before they wonder, and say good-bye at the end."""
        hook = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() == self._pid:
                self._code = getattr(error, "exit_code", 1)
                self.fail(error)
            hook(kind, error, trace)

        sys.excepthook = tell
        atexit.register(self.leave)

    def fail(self, error: BaseException) -> None:
        self.failed = True
        if self.board is not None:
            with contextlib.suppress(Exception):  # the store may be what failed
                self.board.post_cause(error)

    def leave(self) -> None:
        """Stay until everybody is through with the last operation, then close."""
        if self._over or os.getpid() != self._pid:
            return
        self._over = True
        for close in self.closing:
            close()
        if self.board is not None:
            with contextlib.suppress(Exception):  # the store may be gone: then there is nobody to wait for
                self._farewell(self.board)
            if self.failed:
                # An operation may be under way, and taking down its group would block until its deadline.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(self._code)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    def _farewell(self, board: StoreBoard) -> None:
        """After a failure only the server of the store stays, until the others have read the cause."""
        if not self.failed:
            board.write(f"left/{self.rank}", {"steps": board.step, "ops": board.counts()})
        board.write(f"gone/{self.rank}", True)
        serves = self.rank == 0 and not self.env.served
        failed = self.failed or board.read("cause") is not None
        end = time.monotonic() + (_AFTERMATH_S if failed else min(_FAREWELL_S, self.deadline_s))
        while time.monotonic() < end and (serves or not failed):
            if len(board.others("gone")) == self.world - 1:
                time.sleep(0.1 if serves else 0)  # the last reader may still be reading
                return
            failed = failed or board.read("cause") is not None
            time.sleep(0.02)


def join(env: Environment, *, backend: str | None, deadline_s: float) -> World:
    """Meet the other workers, or be a world of one."""
    backend = _backend(backend, env)
    if env.world == 1:
        return World(env, backend, None, deadline_s)
    check_transport()
    timeout = datetime.timedelta(seconds=deadline_s)
    if dist.is_initialized():  # by the user's script: its group, our lanes
        if (dist.get_rank(), dist.get_world_size()) != (env.rank, env.world):
            raise UsageError(
                f"torch.distributed says worker {dist.get_rank()} of {dist.get_world_size()}, "
                f"the environment says worker {env.rank} of {env.world}",
                do="initialise the process group from the environment, or leave it to paceline.prepare",
            )
        theirs = dist.distributed_c10d._get_default_store()
        store = _store(env, timeout) if env.served else dist.PrefixStore("paceline", theirs)
        return World(env, backend, _greet(store, env, deadline_s), deadline_s)
    store = _store(env, timeout)
    board = _greet(store, env, deadline_s)
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=env.rank, world_size=env.world, timeout=timeout
    )
    return World(env, backend, board, deadline_s)


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


def _store(env: Environment, timeout: datetime.timedelta) -> Any:
    """The c10d store. Worker 0 serves it, on its own address only, unless the launcher does."""
    serves = env.rank == 0 and not env.served
    extra: dict[str, Any] = {"master_listen_fd": _listen(env).detach()} if serves else {}
    try:
        store = dist.TCPStore(env.address, env.port, None, serves, timeout, wait_for_workers=False, **extra)
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        raise DeadlineError(
            f"worker {env.rank} cannot reach the store at {env.address}:{env.port}",
            why=str(error).splitlines()[0],
            do="check MASTER_ADDR and MASTER_PORT, that worker 0 (or the launcher) runs, and the firewall between them",
            worker=0,
        ) from None
    return dist.PrefixStore(board_prefix(), store)


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


def _greet(store: Any, env: Environment, deadline_s: float) -> StoreBoard:
    """Claim the rank, wait for all others; say who is missing, and who is there twice."""
    board = StoreBoard(store, env.rank, env.world, deadline_s)
    me = f'"{socket.gethostname()}:{os.getpid()}"'
    holder = store.compare_set(f"here/{env.rank}", "", me).decode()
    if holder != me:
        raise MismatchError(
            f"two workers say they are worker {env.rank}",
            why=f"{holder} came first, this is {me}",
            do="give every worker its own RANK",
            worker=env.rank,
        )
    end = time.monotonic() + deadline_s
    while len(here := board.others("here")) < env.world - 1:
        board.raise_cause()
        if time.monotonic() > end:
            missing = sorted(set(range(env.world)) - set(here) - {env.rank})
            raise DeadlineError(
                f"workers {missing} of {env.world} did not come within {deadline_s:g} s",
                why=f"here are {', '.join(f'{r} on {w}' for r, w in sorted((here | {env.rank: me}).items()))}",
                do="start them, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                worker=missing[0],
            )
        time.sleep(0.01)
    return board
