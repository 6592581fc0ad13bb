"""Where the workers of a job meet: the address of its store, and this host's position among the others."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from paceline.comm.store_address import StoreAddress
from paceline.errors import PeerError, UsageError

if TYPE_CHECKING:
    from paceline.tools.lab.namespaces import Lab

PORT = 29511  # where the store of several hosts listens unless told otherwise
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|[0-9A-Fa-f:]{2,39}")


@dataclass(frozen=True)
class LaunchSite:
    """Where the workers of a job meet, and the position of this host among the job's hosts."""

    address: str = "127.0.0.1"  # of the first host, as every worker can reach it
    own_address: str = "127.0.0.1"  # of this host
    index: int = 0  # of this host
    hosts: int = 1
    port: int = 0  # of the store; 0: any free one
    names: tuple[str, ...] = ()  # of the hosts, as they were given
    lab: Lab | None = None  # where this machine is several hosts, each in a network namespace

    @classmethod
    def among(cls, hosts: Sequence[str], port: int = PORT) -> LaunchSite:
        """The rendezvous of several hosts. Each is given the same list, and finds itself in it by its addresses."""
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
        return cls(address=first, own_address=address, index=index, hosts=len(hosts), port=port, names=tuple(hosts))

    @classmethod
    def in_lab(cls, lab: Lab) -> LaunchSite:
        """The rendezvous on host 0 of a lab, behind its link. The workers are spread evenly over the lab's hosts."""
        return cls(address=lab.address(0), own_address=lab.address(0), lab=lab)

    @property
    def interface(self) -> str:
        """The name of the network interface that reaches the other workers; empty where it is not known."""
        return self.lab.interface if self.lab else own_addresses().get(self.own_address, "")

    def prefix(self, local_rank: int, workers: int) -> list[str]:
        """The words to put before a worker's command so that it runs on its host of the lab."""
        return self.lab.exec_prefix(local_rank * self.lab.hosts // workers) if self.lab else []

    def inside(self, work: Callable[[], Any]) -> Any:
        """Call `work` on the host that has the store."""
        return self.lab.inside(0, work) if self.lab else work()

    def listen(self) -> socket.socket:
        """Open the store's socket, bound to one address."""
        try:
            return StoreAddress(host=self.own_address, port=self.port).listen()
        except OSError as error:
            other = (
                f"give all hosts another one: --port {_free_port(self.own_address)} is free here" if self.port else ""
            )
            raise UsageError(
                f"cannot listen on {self.own_address} port {self.port}",
                why=str(error),
                do=other or "bring the loopback interface up: ip link set lo up",
            ) from None


def own_addresses() -> dict[str, str]:
    """The addresses of this host, each with the name of its interface."""
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
    """The address under which `host` is this host; empty if it is another host."""
    known = _resolve(host)
    loopback = [address for address in known if ipaddress.ip_address(address).is_loopback]
    reachable = [address for address in known if address in own and address not in loopback]
    return next(iter([*reachable, *loopback]), "")


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
