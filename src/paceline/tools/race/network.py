"""Where the workers of a race run: hosts of the network lab, paced sockets, or simply this machine."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.comm.credentials import Credentials
from paceline.comm.environment import COLLECTIVES, PACE
from paceline.errors import PacelineError, UsageError
from paceline.session.gate import OWN_CONNECTIONS, WIRE
from paceline.tools.lab import namespaces
from paceline.tools.lab.namespaces import Lab, parse_link

LinkKind = Literal["lab", "emulated", "none"]
_LOOPBACK = "127.0.0.1"
_LAB_PORT = 29500  # in namespaces of our own every port is free; each contender takes the next one

# Variables by which another launcher, or a race around this one, speaks to its own workers.
_FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "GLOO_",
    "PACELINE_",
)
_KEPT = ("PACELINE_DATA", COLLECTIVES)


@dataclass(frozen=True)
class WorkerPlacement:
    """How one worker is started: words before its command, variables in its environment."""

    prefix: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RaceNetwork:
    """The links between the workers of a contender, the same for every contender."""

    kind: LinkKind
    label: str
    workers: int
    hosts: int
    lab: Lab | None = None
    bytes_per_second: float | None = None
    why_emulated: str = ""

    def placements(self, contender: int) -> list[WorkerPlacement]:
        """The placement of each worker of the contender of that number."""
        port = _LAB_PORT + contender if self.lab else _free_port()
        on_host = [rank * self.hosts // self.workers for rank in range(self.workers)]
        # Worker 0 serves the store at a port that others can reach, too: those of other users, and of other contenders.
        shown = Credentials.new(secrets.token_hex(32).encode()).variables()
        return [self._placement(rank, on_host, port, shown) for rank in range(self.workers)]

    def _placement(self, rank: int, on_host: list[int], port: int, shown: Mapping[str, str]) -> WorkerPlacement:
        host = on_host[rank]
        interface = self.lab.interface if self.lab else "lo"
        # Loopback counts every program's bytes on this machine; a host of the lab has its link to itself.
        own_connections = OWN_CONNECTIONS if sys.platform == "linux" else ""
        env = {
            **clean_environment(),
            **shown,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": str(rank - on_host.index(host)),
            "LOCAL_WORLD_SIZE": str(on_host.count(host)),
            "MASTER_ADDR": self.lab.address(0) if self.lab else _LOOPBACK,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": interface,
            WIRE: self.lab.interface if self.lab else own_connections,
        }
        if self.kind == "emulated" and self.bytes_per_second:
            env[PACE] = str(self.bytes_per_second)
        return WorkerPlacement(self.lab.exec_prefix(host) if self.lab else [], env)


@contextlib.contextmanager
def open_network(link: str, workers: int, hosts: int | None) -> Iterator[RaceNetwork]:
    """Make the link that was asked for, as real as this machine allows, and remove it at the end."""
    speed = parse_link(link)
    if hosts is not None and not 1 <= hosts <= workers:
        raise UsageError(f"--hosts {hosts} is not in 1..{workers}", why="every host has at least one worker")
    if speed.bytes_per_second is None:
        if hosts is not None:
            raise UsageError(
                "--hosts needs a link between the hosts",
                why="an unlimited link is this machine's own loopback, where all workers are on one host",
                do="give --link too, for example --link 1gbit",
            )
        yield RaceNetwork("none", str(speed), workers, 1)
        return
    why_not = namespaces.available()
    if why_not is None:
        with Lab(hosts or workers, speed) as lab:
            yield RaceNetwork("lab", str(speed), workers, lab.hosts, lab, speed.bytes_per_second)
        return
    if hosts is not None:
        raise UsageError(
            f"--hosts needs the network lab, and {why_not}", do="run as root with iproute2, or leave it out"
        )
    yield RaceNetwork(
        "emulated",
        f"{speed} (emulated)",
        workers,
        1,
        bytes_per_second=speed.bytes_per_second,
        why_emulated=why_not,
    )


def single_placement() -> WorkerPlacement:
    """The placement of a single worker: a world of one, without a network."""
    return WorkerPlacement(env=clean_environment())


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables by which another launcher speaks to its workers."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_FOREIGN)}


def _free_port() -> int:
    """A free port, from below the range from which the kernel numbers connections.

    Worker 0 binds it some seconds later. Until then hundreds of connections of other contenders are made, and
    none of them may take this port.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_LOOPBACK, port))
            return port
    raise PacelineError("no free port between 20000 and 30000 was found in 100 tries")
