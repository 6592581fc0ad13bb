"""How a worker starts a server's process, and how the others learn where it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.comm.board import StoreBoard
from paceline.comm.dist import PairComm, Transport
from paceline.comm.protocol import Board
from paceline.comm.store import Store, StoreConnection
from paceline.errors import PeerError

_LOOK_S = 0.1


class ServerHome(msgspec.Struct, frozen=True):
    """What a server writes into the store when it has started."""

    pid: int
    host: str
    worker: int  # the rank that started it


class ServerArguments(NamedTuple):
    """The command line of a server's process: which server it is. Its environment says where it meets the workers."""

    prefix: str  # of everything that this group's servers write in the store
    server: int
    worker: int  # the rank that starts the server
    world_size: int
    timeout_s: float
    parent: int  # the process of that worker

    @classmethod
    def parse(cls, words: list[str]) -> ServerArguments:
        """The opposite of writing the fields as words."""
        prefix, server, worker, world_size, timeout_s, parent = words
        return cls(prefix, int(server), int(worker), int(world_size), float(timeout_s), int(parent))

    def transport(self) -> Transport:
        """A connection to the store, for the server's process."""
        connection = StoreConnection.invited(f"server {self.server}", self.timeout_s)
        return Transport(Store(connection), timeout_s=self.timeout_s)

    def lane(self, transport: Transport, board: Board, worker: int, *, serves: bool) -> PairComm:
        """The lane between this server, which is rank 1 of it, and a worker, which is rank 0. Both must call it."""
        return transport.pair_lane(f"{self.prefix}/{self.server}/{worker}", board, int(serves))

    @property
    def key(self) -> str:
        """Where in the store the server says that it has started."""
        return f"{self.prefix}/here/{self.server}"

    def announce(self, transport: Transport, pid: int, host: str) -> None:
        """Called by the server: it has started."""
        transport.store.set(self.key, msgspec.json.encode(ServerHome(pid, host, self.worker)).decode())


_started: list[subprocess.Popen[bytes]] = []  # kept, since Python warns of a Popen object that dies before its process


def start(arguments: ServerArguments, transport: Transport) -> subprocess.Popen[bytes]:
    """Start a server's process, which ends by itself when this one does."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    _started.append(
        subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.server", *map(str, arguments)],
            env={**os.environ, **transport.store.connection.invitation(), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )
    )
    return _started[-1]


def wait_for(
    arguments: ServerArguments, transport: Transport, board: StoreBoard, started: Sequence[subprocess.Popen[bytes]]
) -> ServerHome:
    """Wait until a server has started; raise if one of those that this worker started has ended instead."""
    end = time.monotonic() + arguments.timeout_s
    while (home := transport.store.get(arguments.key, _LOOK_S)) is None:
        board.raise_cause()
        dead = next((p for p in started if p.poll() is not None), None)
        if dead is not None or time.monotonic() > end:
            raise PeerError(
                f"server {arguments.server} did not start",
                why=f"its process ended with code {dead.poll()}" if dead else f"nothing for {arguments.timeout_s:g} s",
                do=f"look at the output of worker {arguments.worker}, which starts it",
                worker=arguments.worker,
            )
    return msgspec.json.decode(home, type=ServerHome)
