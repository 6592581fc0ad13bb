"""A worker's connections to the servers: to processes over lanes, or to objects in this process where workers are
threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from paceline.comm.board import StoreBoard
from paceline.comm.dist import Transport
from paceline.comm.protocol import Comm
from paceline.comm.store import StoreLostError
from paceline.comm.threads import Room, ThreadComm
from paceline.errors import PeerError, PeerTimeoutError
from paceline.server.launch import ServerArguments, ServerHome, start, wait_for
from paceline.server.messages import MessageChannel, MessageCode, ServerMessage
from paceline.server.requests import RequestHandler

_GRACE_S = 1.0  # how long the board is searched for a cause before a closed connection is reported as one


class ServerConnection(Protocol):
    """A worker's connection to one server. A worker asks all servers before it waits for the first answer."""

    def ask(self, m: ServerMessage) -> None:
        """Send a request, without waiting for its answer."""

    def answer(self, what: str) -> ServerMessage:
        """Wait for the answer to the oldest request that has none yet; `what` names it in errors."""


class LocalConnection:
    """A connection to a server in this process, for workers that are threads."""

    def __init__(self, handler: RequestHandler, comm: Comm) -> None:
        self._handler, self._rank = handler, comm.rank
        self._room: Room | None = getattr(comm, "room", None)
        self._asked: list[ServerMessage] = []

    def ask(self, m: ServerMessage) -> None:
        if m.code in (MessageCode.BEGIN, MessageCode.PUSH):
            self._handler.ask(self._rank, m, self._look_around())
        else:
            self._asked.append(m)

    def answer(self, what: str) -> ServerMessage:
        m = self._handler.ask(self._rank, self._asked.pop(0), self._look_around())
        assert m is not None
        if m.code in (MessageCode.GONE, MessageCode.FAILED):
            raise PeerError(m.note.decode(), worker=m.a if m.code == MessageCode.GONE else None)
        return m

    def _look_around(self) -> Callable[[], None]:
        began = time.monotonic()

        def pulse() -> None:
            if self._room is not None and self._room.error is not None:
                raise PeerError("another worker failed", why=str(self._room.error))
            if self._room is not None and time.monotonic() - began > self._room.timeout_s:
                raise PeerTimeoutError(f"worker {self._rank} waited {self._room.timeout_s:g} s for a server")

        return pulse


class ServerBoard:
    """The workers' board, as the lane to one server uses it: waits and losses are told in the server's name.

    The store may be gone together with the worker that served it. The lane's own end is seen all the same, so a store
    that does not answer is passed over here.
    """

    def __init__(self, board: StoreBoard, index: int, home: ServerHome, ahead: int | None, of: str) -> None:
        """ahead: how many pushes a worker may be ahead of the slowest before the server lets it wait; None: any
        number. of: the lane beside which the server stands.
        """
        self._board, self._lane = board, f"server {index} of worker {board.rank}"
        self._ahead, self._pushes = ahead, f"pushes to server {index} of {of}"
        self.waits_for_others = False  # what this worker waits for is an answer that others may hold up
        board.begun[self._pushes] = 0
        self.worker = home.worker
        self.name = f"server {index} (pid {home.pid} on {home.host}, started by worker {home.worker})"
        self.label = self.name  # what the worker waits for now

    def agree(self, key: str, what: str, text: str) -> None:
        self._board.agree(key, what, text)

    def pushed(self) -> None:
        """This worker has pushed once more."""
        self._board.begun[self._pushes] += 1

    def pulse(self, lane: str, op: int, label: str, waited_s: float) -> None:
        # As operation -1, which every worker has begun: the board is to look for causes here, not for a deadlock.
        lane, needed, label = self._lane, -1, self.label
        if self.waits_for_others and self._ahead is not None:
            # Which push the slowest must have begun. Workers that all wait, and one of them elsewhere, are stuck.
            begun = self._board.begun[self._pushes] - 1 - self._ahead
            if begun >= 0:
                lane, needed, label = self._pushes, begun, f"an answer from {self.name}"
        with contextlib.suppress(StoreLostError):
            self._board.pulse(lane, needed, label, waited_s)

    def clear(self) -> None:
        with contextlib.suppress(StoreLostError):
            self._board.clear()

    def lost(self, label: str, error: Exception) -> PeerError:
        return self.cause_or(
            PeerError(
                f"{self.name} stopped answering{self._board.in_step} ({self.label})",
                why=str(error).splitlines()[0],
                do=f"it, or worker {self.worker}, was killed (out of memory?) or its host is gone: look there",
                worker=self.worker,
            )
        )

    def cause_or(self, error: PeerError) -> PeerError:
        """The cause that another worker posts within a short time; otherwise this error, which is posted."""
        with contextlib.suppress(StoreLostError):
            if cause := self._board.posted_cause(_GRACE_S):
                return cause
        return self.post(error)

    def post(self, error: PeerError) -> PeerError:
        """Let the other workers know of an error."""
        with contextlib.suppress(StoreLostError):
            self._board.post_cause(error)
        return error


class RemoteConnection:
    """A connection to a server in a process of its own, perhaps on another host."""

    def __init__(self, channel: MessageChannel, board: ServerBoard) -> None:
        self._channel, self._board = channel, board

    def ask(self, m: ServerMessage) -> None:
        self._board.waits_for_others = m.code == MessageCode.PULL
        self._channel.send(m)
        if m.code == MessageCode.PUSH:
            self._board.pushed()

    def answer(self, what: str) -> ServerMessage:
        board = self._board
        board.label = f"{what} from {board.name}"
        m = self._channel.receive()
        self._channel.flush()
        if m.code == MessageCode.GONE:
            raise board.cause_or(
                PeerError(
                    f"{m.note.decode()}, says {board.name}",
                    why="its connection to the server has closed",
                    do="look at that worker's output: killed (out of memory?), crashed, or its host is gone",
                    worker=m.a,
                )
            )
        if m.code == MessageCode.FAILED:
            raise board.post(PeerError(f"{board.name} failed: {m.note.decode()}", worker=board.worker))
        return m


_handlers: weakref.WeakKeyDictionary[Room, dict[tuple[str, int], RequestHandler]] = weakref.WeakKeyDictionary()
_handlers_lock = threading.Lock()


def connect(comm: Comm, servers: int, *, ahead: int | None) -> list[ServerConnection]:
    """This worker's connections to all servers. Every worker must call it.

    Server s is started by worker s mod W, on the worker's host, and ends with it. ahead: how many pushes a worker may
    be ahead of the slowest before a server lets it wait; None: any number.
    """
    board = getattr(comm, "board", None)
    if isinstance(board, StoreBoard):
        return _connect(comm, board, servers, ahead)
    with _handlers_lock:
        handlers = _handlers.setdefault(comm.room, {}) if isinstance(comm, ThreadComm) else {}
        name = getattr(comm, "name", "")
        return [LocalConnection(handlers.setdefault((name, s), RequestHandler()), comm) for s in range(servers)]


def _connect(comm: Comm, board: StoreBoard, servers: int, ahead: int | None) -> list[ServerConnection]:
    transport = Transport(board.store.root, timeout_s=board.timeout_s)
    each = [
        ServerArguments(
            f"{board.store.prefix}servers/{comm.name}",
            server=s,
            worker=s % comm.world_size,
            world_size=comm.world_size,
            timeout_s=board.timeout_s,
            parent=os.getpid(),
        )
        for s in range(servers)
    ]
    started = [start(arguments, transport) for arguments in each if arguments.worker == comm.rank]
    homes = [wait_for(arguments, transport, board, started) for arguments in each]
    tape = getattr(comm, "tape", None)  # only a lane that is traced has one
    on_vector = tape.servers(comm.name) if tape is not None else None
    connections: list[ServerConnection] = []
    for s, (arguments, home) in enumerate(zip(each, homes, strict=True)):
        named = ServerBoard(board, s, home, ahead, comm.name)  # errors are to name this server
        lane = arguments.lane(transport, named, comm.rank, serves=False)
        connections.append(RemoteConnection(MessageChannel(lane, on_vector), named))
    return connections
