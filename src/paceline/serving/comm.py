"""The wire between a worker and a server.

[Note: pairs] A gloo receive whose wait runs into a time-out closes every connection of its group, so it cannot be
waited for in slices. A broadcast can. So each worker and each server are a group of two, in which the one broadcasts
what the other is to receive; and a connection that breaks concerns nobody else.

A message is six whole numbers, and if they say so some JSON and a vector.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

import paceline
from paceline.comm import Lane
from paceline.environment import board_prefix
from paceline.errors import DeadlineError, PeerError, UsageError
from paceline.membership.board import StoreLostError
from paceline.parts import Comm
from paceline.serving.desk import Code, Desk, Message
from paceline.threadcomm import Room, ThreadComm
from paceline.waiting import until

_EVER = datetime.timedelta(days=30)  # between two pushes a worker may do anything: its end is seen by its connection
_GRACE_S = 1.0  # how long a cause is looked for before a loss is called one
_TYPES = (torch.float32, torch.float64)


class Pair:
    """[Note: pairs]. The worker is member 0, the server member 1."""

    def __init__(self, store: Any, me: int, deadline_s: float) -> None:
        self.me = me
        self._group: Any = dist.ProcessGroupGloo(store, me, 2, datetime.timedelta(seconds=deadline_s))
        self._sending: list[tuple[Any, Tensor]] = []  # a vector belongs to its operation until that has ended

    def send(self, m: Message) -> None:
        count = m.x.numel() if m.x is not None else -1
        wide = _TYPES.index(m.x.dtype) if m.x is not None else 0
        self._put(torch.tensor([m.code, m.a, m.b, len(m.note), count, wide]))
        if m.note:
            self._put(torch.frombuffer(bytearray(m.note), dtype=torch.uint8))
        if m.x is not None and count:
            self._put(m.x)

    def _put(self, x: Tensor) -> None:
        self._sending.append((self._broadcast(x, self.me), x))

    def sent(self, wait: Callable[[Any], None]) -> None:
        while self._sending:
            wait(self._sending[0][0])
            self._sending.pop(0)

    def receive(self, wait: Callable[[Any], None]) -> Message:
        def get(count: int, dtype: torch.dtype) -> Tensor:
            x = torch.empty(count, dtype=dtype)
            if count:
                wait(self._broadcast(x, 1 - self.me))
            return x

        code, a, b, length, count, wide = get(6, torch.int64).tolist()
        note = bytes(get(length, torch.uint8).numpy())
        return Message(code, a, b, note, get(count, _TYPES[wide]) if count >= 0 else None)

    def _broadcast(self, x: Tensor, root: int) -> Any:
        how = dist.BroadcastOptions()
        how.rootRank, how.timeout, how.asyncOp = root, _EVER, True
        return self._group.broadcast([x], how)


class Line(Protocol):
    """A worker's connection to one server. All are asked before any is waited for."""

    def ask(self, m: Message) -> None: ...
    def answer(self, what: str) -> Message: ...


class Local:
    """A server in this very process, for workers that are threads."""

    def __init__(self, desk: Desk, comm: Comm) -> None:
        self._desk, self._rank = desk, comm.rank
        self._room: Room | None = getattr(comm, "room", None)
        self._asked: list[Message] = []

    def ask(self, m: Message) -> None:
        if m.code in (Code.BEGIN, Code.PUSH):
            self._desk.ask(self._rank, m, self._look_around())
        else:
            self._asked.append(m)

    def answer(self, what: str) -> Message:
        m = self._desk.ask(self._rank, self._asked.pop(0), self._look_around())
        assert m is not None
        if m.code in (Code.GONE, Code.FAILED):
            raise PeerError(m.note.decode(), worker=m.a if m.code == Code.GONE else None)
        return m

    def _look_around(self) -> Callable[[], None]:
        began = time.monotonic()

        def pulse() -> None:
            if self._room is not None and self._room.error is not None:
                raise PeerError("another worker failed", why=str(self._room.error))
            if self._room is not None and time.monotonic() - began > self._room.deadline_s:
                raise DeadlineError(f"worker {self._rank} waited {self._room.deadline_s:g} s for a server")

        return pulse


class Remote:
    """A server in a process of its own, perhaps on another host."""

    def __init__(self, pair: Pair, board: Any, index: int, home: dict[str, Any]) -> None:
        self._pair, self._board, self._worker = pair, board, int(home["worker"])
        self.name = f"server {index} (pid {home['pid']} on {home['host']}, started by worker {self._worker})"
        self._lane = f"server {index} of worker {board.rank}"

    def ask(self, m: Message) -> None:
        self._pair.send(m)

    def answer(self, what: str) -> Message:
        label = f"{what} from {self.name}"
        # One's own lane, and an operation that everybody has begun: the board looks for causes, not for a deadlock.
        wait = lambda work: until(work, self, self._lane, -1, label, blocking=True)  # noqa: E731
        m = self._pair.receive(wait)
        self._pair.sent(wait)
        if m.code == Code.GONE:
            raise self._cause() or self._told(
                PeerError(
                    f"{m.note.decode()}, says {self.name}",
                    why="its connection to the server has closed",
                    do="look at that worker's output: killed (out of memory?), crashed, or its host is gone",
                    worker=m.a,
                )
            )
        if m.code == Code.FAILED:
            raise self._told(PeerError(f"{self.name} failed: {m.note.decode()}", worker=self._worker))
        return m

    # What `until` asks of a board.

    def agree(self, key: str, what: str, text: str) -> None:
        self._board.agree(key, what, text)

    def pulse(self, lane: str, op: int, label: str, waited_s: float) -> None:
        with contextlib.suppress(StoreLostError):  # the store is gone with its worker: the connection will tell
            self._board.pulse(lane, op, label, waited_s)

    def clear(self) -> None:
        with contextlib.suppress(StoreLostError):
            self._board.clear()

    def lost(self, label: str, error: Exception) -> PeerError:
        return self._cause() or self._told(
            PeerError(
                f"{self.name} stopped answering in step {self._board.step} ({label})",
                why=str(error).splitlines()[0],
                do=f"it, or worker {self._worker}, was killed (out of memory?) or its host is gone: look there",
                worker=self._worker,
            )
        )

    def _cause(self) -> PeerError | None:
        """What somebody else may already know of it."""
        end = time.monotonic() + _GRACE_S
        cause: PeerError | None = None
        with contextlib.suppress(StoreLostError):
            while not cause and time.monotonic() < end:
                time.sleep(0.05)
                cause = self._board.cause()
        return cause

    def _told(self, error: PeerError) -> PeerError:
        with contextlib.suppress(StoreLostError):
            self._board.post_cause(error)
        return error


_desks: weakref.WeakKeyDictionary[Room, dict[tuple[str, int], Desk]] = weakref.WeakKeyDictionary()
_desks_lock = threading.Lock()


def connect(comm: Comm, servers: int) -> list[Line]:
    """This worker's lines to all servers. Server s is started by worker s mod W, on its host, and ends with it."""
    if isinstance(comm, Lane):
        return _connect(comm, servers)
    with _desks_lock:
        desks = _desks.setdefault(comm.room, {}) if isinstance(comm, ThreadComm) else {}
        name = getattr(comm, "name", "")
        return [Local(desks.setdefault((name, s), Desk()), comm) for s in range(servers)]


def _connect(comm: Lane, servers: int) -> list[Line]:
    board: Any = comm.board
    base = board.store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore):
        raise UsageError(
            f"the workers meet in a {type(base).__name__}, which servers cannot reach",
            do="start the script with `paceline run` or torchrun, or init_process_group with an address",
        )
    places = [
        Place(
            base.host,
            base.port,
            f"{board_prefix()}/servers/{comm.name}",
            server=s,
            worker=s % comm.world,
            world=comm.world,
            deadline_s=board.deadline_s,
            parent=os.getpid(),
        )
        for s in range(servers)
    ]
    mine = [_start(place) for place in places if place.worker == comm.rank]
    homes = [_home(dist.PrefixStore(place.prefix, base), place, board, mine) for place in places]
    make = getattr(comm, "make_pair", Pair)  # a lane that is traced has another one
    pairs = [make(place.pair(base, comm.rank), 0, place.deadline_s) for place in places]
    return [Remote(pair, board, s, home) for s, (pair, home) in enumerate(zip(pairs, homes, strict=True))]


class Place(NamedTuple):
    """Where a server is to meet the workers. As its command line: words and numbers."""

    host: str  # of the store
    port: int
    prefix: str  # in the store
    server: int
    worker: int  # that starts it
    world: int
    deadline_s: float
    parent: int  # that worker's process

    @classmethod
    def parse(cls, words: list[str]) -> Place:
        host, port, prefix, server, worker, world, deadline_s, parent = words
        return cls(host, int(port), prefix, int(server), int(worker), int(world), float(deadline_s), int(parent))

    def store(self) -> Any:
        timeout = datetime.timedelta(seconds=self.deadline_s)
        return dist.TCPStore(self.host, self.port, None, False, timeout, wait_for_workers=False)

    def pair(self, store: Any, worker: int) -> Any:
        """Where in the store these two meet."""
        return dist.PrefixStore(f"{self.prefix}/{self.server}/{worker}", store)

    def here(self, store: Any, pid: int, host: str) -> None:
        """The server is there."""
        home = {"pid": pid, "host": host, "worker": self.worker}
        dist.PrefixStore(self.prefix, store).set(f"here/{self.server}", msgspec.json.encode(home).decode())


_started: list[subprocess.Popen[bytes]] = []  # each ends by itself when its worker does


def _start(place: Place) -> subprocess.Popen[bytes]:
    root = str(Path(paceline.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    _started.append(
        subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.serving", *map(str, place)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )
    )
    return _started[-1]


def _home(store: Any, place: Place, board: Any, mine: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Who the server is, once it is there."""
    end = time.monotonic() + place.deadline_s
    key = f"here/{place.server}"
    while not store.check([key]):
        board.raise_cause()
        dead = next((p for p in mine if p.poll() is not None), None)
        if dead is not None or time.monotonic() > end:
            raise PeerError(
                f"server {place.server} did not start",
                why=f"its process ended with code {dead.poll()}" if dead else f"nothing for {place.deadline_s:g} s",
                do=f"look at the output of worker {place.worker}, which starts it",
                worker=place.worker,
            )
        time.sleep(0.02)
    return dict(msgspec.json.decode(store.get(key)))
