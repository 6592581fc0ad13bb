"""Several hosts on one machine: a network namespace for each, a bridge between them, links shaped both ways.

It is real TCP over a real queue: what leaves a namespace passes its link or does not pass at all. It needs
root and iproute2. Nothing is made outside the namespaces, so this machine's own network stays as it is, and
labs of several processes do not see each other.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from paceline.comm.interface import Counters
from paceline.errors import PacelineError, UsageError

T = TypeVar("T")

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SLOWEST, _FASTEST = 64 * 10**3, 100 * 10**9  # bits per second that tc's token bucket can hold
_MOST_HOSTS = 250  # that one /24 network has addresses for
_CLONE_NEWNET = 0x40000000  # <sched.h>
_NAMES = Path("/run/netns")
_NAME = re.compile(r"pl(\d+)\.([0-9a-f]+)-\d+-(?:sw|\d+)")
_count = itertools.count()


# ---------------------------------------------------------------------------------------------------- links


@dataclass(frozen=True)
class Link:
    """The speed of a host's link, the same both ways. None means as fast as the machine."""

    bits_per_second: int | None = None

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.bits_per_second is None else self.bits_per_second / 8

    def __str__(self) -> str:
        if self.bits_per_second is None:
            return "unlimited"
        unit = max((u for u in _UNITS if _UNITS[u] <= self.bits_per_second), key=_UNITS.__getitem__)
        return f"{self.bits_per_second / _UNITS[unit]:g}{unit}"


UNLIMITED = Link()


def parse_link(text: str) -> Link:
    """The link that a text such as `100mbit`, `2.5gbit` or `unlimited` stands for."""
    word = text.strip().lower()
    if word == "unlimited":
        return UNLIMITED
    parsed = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([kmg]bit)", word)
    if parsed is None:
        # A unit such as mbps is refused, not guessed: tc reads it as megabytes, most people as megabits.
        hint = f", such as {word}mbit" if re.fullmatch(r"\d{1,9}(\.\d+)?", word) else ""
        raise UsageError(
            f"{text!r} is not a link speed",
            why=f"a link is a number with kbit, mbit or gbit{hint}, or the word unlimited",
            do="give 10mbit, 100mbit, 1gbit or unlimited",
        )
    bits = round(float(parsed[1]) * _UNITS[parsed[2]])
    if not _SLOWEST <= bits <= _FASTEST:
        raise UsageError(
            f"a link of {text} cannot be made",
            why=f"this machine can hold {Link(_SLOWEST)} to {Link(_FASTEST)}",
            do="give a speed in that range, or unlimited",
        )
    return Link(bits)


# ---------------------------------------------------------------------------------------------------- the lab


class Lab:
    """Hosts 0 to N-1, each a network namespace with one interface `eth0` to a common switch.

    Use it as a context manager: the namespaces are removed when the block is left or the process ends. If the
    process is killed, the next lab that is made removes them. Start a process on host i with `[*lab.exec_prefix(i),
    *argv]`.
    """

    interface = "eth0"

    def __init__(self, hosts: int, link: Link = UNLIMITED) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise UsageError(f"a lab of {hosts} hosts cannot be made", do=f"choose 1..{_MOST_HOSTS} hosts")
        self.hosts, self.link = hosts, link
        # The name has the process's start time too, because process numbers are used again: see leftovers().
        stem = f"pl{os.getpid()}.{_start_time(os.getpid())}-{next(_count)}"
        self._switch = f"{stem}-sw"
        self._names = [f"{stem}-{i}" for i in range(hosts)]
        self._owner = os.getpid()

    def __enter__(self) -> Lab:
        remove_leftovers()
        atexit.register(self.close)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for i, name in enumerate(self._names):
            _ip("netns", "add", name)
            both = ("type", "veth", "peer", "name", self.interface, "netns", name)
            _ip("link", "add", _port(i), "netns", self._switch, *both)
            _ip("-n", self._switch, "link", "set", _port(i), "master", "br0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{self.address(i)}/24", "dev", self.interface)
            _ip("-n", name, "link", "set", self.interface, "up")
            if self.link != UNLIMITED:
                self.shape(i, self.link)

    def close(self) -> None:
        """Remove the namespaces. Processes that still run in one keep it until they end."""
        if os.getpid() != self._owner:  # a fork's exit must not tear down its parent's hosts
            return
        for name in (*self._names, self._switch):
            _remove(name)
        atexit.unregister(self.close)

    def exec_prefix(self, i: int) -> list[str]:
        """The words to put before a command so that it runs on host i, under the pid that was started."""
        return [_tool("ip"), "netns", "exec", self._names[i]]

    def address(self, i: int) -> str:
        """The IP address of host i."""
        return f"10.77.0.{range(self.hosts)[i] + 1}"

    def shape(self, i: int, link: Link) -> None:
        """Give the link of host i another speed. It takes effect at once, whatever traffic there is."""
        for name, device in ((self._names[i], self.interface), (self._switch, _port(i))):
            if link.bits_per_second is None:
                with contextlib.suppress(PacelineError):  # the link had no limit
                    _tc("-n", name, "qdisc", "del", "dev", device, "root")
                continue
            # The bucket holds at least a millisecond of traffic: fast links would else wait for the kernel's timer.
            burst = max(64 * 1024, link.bits_per_second // 8 // 1000)
            tbf = ("tbf", "rate", f"{link.bits_per_second}bit", "burst", f"{burst}b", "latency", "50ms")
            _tc("-n", name, "qdisc", "replace", "dev", device, "root", *tbf)

    def cut(self, i: int) -> None:
        """Disconnect host i at the switch. No FIN and no RST is sent: bytes are simply lost."""
        _ip("-n", self._switch, "link", "set", _port(i), "down")

    def heal(self, i: int) -> None:
        """Connect host i again after `cut`."""
        _ip("-n", self._switch, "link", "set", _port(i), "up")

    def counters(self, i: int) -> Counters:
        """The bytes that the interface of host i has sent and received so far."""
        # Not /sys: it shows the namespace it was mounted in, while /proc shows that of the thread that reads.
        table = self.inside(i, Path("/proc/thread-self/net/dev").read_text)
        for line in table.splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                columns = [int(n) for n in numbers.split()]
                return Counters(sent=columns[8], received=columns[0])
        raise PacelineError(f"host {i} has lost its interface {self.interface}")

    def inside(self, i: int, work: Callable[[], T]) -> T:
        """Call `work` on host i. Sockets that it opens and threads that it starts stay on that host."""
        result: list[T] = []
        failed: list[BaseException] = []

        def go() -> None:
            # Only this thread moves to the other namespace, and it ends here. The process stays where it was.
            try:
                _enter(self._names[i])
                result.append(work())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=go, name=f"on {self._names[i]}")
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return result[0]


def available() -> str | None:
    """None where a lab can be made, else the reason why not. It is found out by making one."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    for tool in ("ip", "tc"):
        if shutil.which(tool, path=_path()) is None:
            return f"the command {tool} is missing (Debian: apt install iproute2)"
    try:
        with Lab(1, parse_link("100mbit")):
            return None
    except PacelineError as error:
        return f"root is needed ({error.why})" if os.geteuid() else f"the kernel refuses ({error.why})"


def leftovers() -> list[str]:
    """Namespaces of labs whose process was killed before it could remove them."""
    if not _NAMES.is_dir():
        return []
    parsed = ((name, _NAME.fullmatch(name)) for name in sorted(entry.name for entry in _NAMES.iterdir()))
    return [name for name, its in parsed if its and _start_time(int(its[1])) != its[2]]


def remove_leftovers() -> list[str]:
    """Remove the leftovers of killed processes, and return their names."""
    found = leftovers()
    for name in found:
        _remove(name)
    return found


# ------------------------------------------------------------------------------------------------- commands


def _start_time(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return f"{int(stat.rpartition(')')[2].split()[19]):x}"  # counted after the name, which may contain anything


def _port(i: int) -> str:
    return f"port{i}"


def _remove(name: str) -> None:
    if (_NAMES / name).exists():
        _ip("netns", "delete", name)


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMES / name).open("rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise PacelineError(f"cannot enter the namespace {name}", why=os.strerror(ctypes.get_errno()))


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # an ordinary user's PATH often lacks them


def _tool(name: str) -> str:
    found = shutil.which(name, path=_path())
    if found is None:
        raise PacelineError(f"the command {name} is missing", do="install iproute2")
    return found


def _ip(*words: str) -> None:
    _command("ip", *words)


def _tc(*words: str) -> None:
    _command("tc", *words)


def _command(tool: str, *words: str) -> None:
    done = subprocess.run([_tool(tool), *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise PacelineError(
            f"the network lab failed at `{tool} {' '.join(words)}`",
            why=done.stderr.strip() or f"exit code {done.returncode}",
            do="run `paceline doctor` to see what this machine allows",
        )
