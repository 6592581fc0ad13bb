"""Where a host's workers stand among all of the job's, and where all of them meet."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from paceline.errors import PeerError, UsageError

if TYPE_CHECKING:
    from paceline.lab.namespaces import Lab

PORT = 29511  # where the store of several hosts listens unless told otherwise
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|[0-9A-Fa-f:]{2,39}")


@dataclass(frozen=True)
class Site:
    """Where this host's workers stand among all of the job's, and where all of them meet."""

    address: str = "127.0.0.1"  # the first host's, as every worker can reach it
    own: str = "127.0.0.1"  # this host's
    index: int = 0  # of this host
    hosts: int = 1
    port: int = 0  # of the store; 0: any free one
    lab: Lab | None = None  # this machine is several hosts, each in a namespace

    @classmethod
    def among(cls, hosts: Sequence[str], port: int = PORT) -> Site:
        """This host's place in a list that is the same on all of them, found by its addresses."""
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise UsageError(f"{host!r} is not a host name or an address", do="give names, separated by commas")
        if len(set(hosts)) < len(hosts):
            raise UsageError("a host is listed twice", why=f"hosts: {', '.join(hosts)}")
        if not 1 <= port <= 65535:
            raise UsageError(f"port {port} is not in 1..65535")
        own = own_addresses()
        mine = {i: address for i, host in enumerate(hosts) if (address := _own_address(host, own))}
        if len(mine) != 1:
            names = ", ".join(hosts[i] for i in mine)
            raise UsageError(
                f"{names} are all this host" if mine else f"this host is none of {', '.join(hosts)}",
                why=f"it is {socket.gethostname()}, with the addresses {', '.join(sorted(own))}",
                do="run the same command on every host, with one name or address for each",
            )
        ((index, address),) = mine.items()
        if len(hosts) == 1:
            return cls()
        if ipaddress.ip_address(address).is_loopback:
            raise UsageError(
                f"{hosts[index]} is {address} here, which the other hosts cannot reach",
                do="list the hosts by the addresses they know each other by",
            )
        if not _resolve(hosts[0]):
            raise PeerError(f"cannot resolve {hosts[0]!r}", do="list the first host by its address")
        first = address if index == 0 else hosts[0]
        return cls(address=first, own=address, index=index, hosts=len(hosts), port=port)

    @classmethod
    def in_lab(cls, lab: Lab) -> Site:
        """The workers spread evenly over the lab's hosts; the store on host 0, behind its link."""
        return cls(address=lab.address(0), own=lab.address(0), lab=lab)

    @property
    def interface(self) -> str:
        return self.lab.interface if self.lab else own_addresses().get(self.own, "")

    def prefix(self, local: int, workers: int) -> list[str]:
        return self.lab.exec_prefix(local * self.lab.hosts // workers) if self.lab else []

    def inside(self, work: Callable[[], Any]) -> Any:
        """Call `work` where the store is to be."""
        return self.lab.inside(0, work) if self.lab else work()

    def listen(self) -> socket.socket:
        """The store's socket, on this one address. Bound by us, because the store would bind them all."""
        listener = socket.socket(socket.AF_INET6 if ":" in self.own else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.own, self.port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            other = f"give all hosts another one: --port {_free_port(self.own)} is free here" if self.port else ""
            raise UsageError(
                f"cannot listen on {self.own} port {self.port}",
                why=str(error),
                do=other or "bring the loopback interface up: ip link set lo up",
            ) from None
        return listener


def own_addresses() -> dict[str, str]:
    """This host's addresses, each with its interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def _resolve(host: str) -> list[str]:
    try:
        return [str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _own_address(host: str, own: Mapping[str, str]) -> str:
    """The address by which `host` is this host; empty if it is another one."""
    known = _resolve(host)
    loopback = [a for a in known if ipaddress.ip_address(a).is_loopback]
    return next((a for a in known if a in own and a not in loopback), loopback[0] if loopback else "")


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def cores() -> int:
    """How many this process may use, which a container or a batch system makes fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
