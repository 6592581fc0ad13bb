"""Several hosts on one machine: a network namespace for each, a bridge between them, every link shaped both
ways.

It is real TCP over a real queue: what leaves a namespace passes its link or does not pass at all. Needs
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

from paceline.errors import PacelineError, UsageError
from paceline.lab.interface import Counters

T = TypeVar("T")

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SLOWEST, _FASTEST = 64 * 10**3, 100 * 10**9  # what tbf and a loopback CPU can hold
_MOST_HOSTS = 250  # of one /24
_CLONE_NEWNET = 0x40000000  # <sched.h>
_NAMES = Path("/run/netns")
_NAME = re.compile(r"pl(\d+)\.([0-9a-f]+)-\d+-(?:sw|\d+)")
_count = itertools.count()


# ---------------------------------------------------------------------------------------------------- links


@dataclass(frozen=True)
class Link:
    """How fast a host's link is, the same both ways. None: as fast as the machine."""

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
    """`100mbit`, `2.5gbit`, `unlimited`."""
    word = text.strip().lower()
    if word == "unlimited":
        return UNLIMITED
    parsed = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([kmg]bit)", word)
    if parsed is None:
        # Not guessed: tc reads "mbps" as megabytes, most people as megabits.
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

    Use it as a context manager: the namespaces go when the block is left, when the process ends, and,
    should it be killed, when the next lab starts. Start a process on host i with `[*lab.exec_prefix(i),
    *argv]`.
    """

    interface = "eth0"

    def __init__(self, hosts: int, link: Link = UNLIMITED) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise UsageError(f"a lab of {hosts} hosts cannot be made", do=f"choose 1..{_MOST_HOSTS} hosts")
        self.hosts, self.link = hosts, link
        # With the time of birth, because a process number comes back: see leftovers().
        stem = f"pl{os.getpid()}.{_born(os.getpid())}-{next(_count)}"
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
        """What to put before a command so that it runs on host i. It becomes that command: the pid stays."""
        return [_tool("ip"), "netns", "exec", self._names[i]]

    def address(self, i: int) -> str:
        return f"10.77.0.{range(self.hosts)[i] + 1}"

    def shape(self, i: int, link: Link) -> None:
        """Give host i's link another speed, now, under whatever traffic there is."""
        for name, device in ((self._names[i], self.interface), (self._switch, _port(i))):
            if link.bits_per_second is None:
                with contextlib.suppress(PacelineError):  # it had no limit
                    _tc("-n", name, "qdisc", "del", "dev", device, "root")
                continue
            # A millisecond's worth at least, or fast links wait for the timer more than for the bucket.
            burst = max(64 * 1024, link.bits_per_second // 8 // 1000)
            tbf = ("tbf", "rate", f"{link.bits_per_second}bit", "burst", f"{burst}b", "latency", "50ms")
            _tc("-n", name, "qdisc", "replace", "dev", device, "root", *tbf)

    def cut(self, i: int) -> None:
        """Pull host i's cable at the switch: no FIN, no RST, bytes are simply gone."""
        _ip("-n", self._switch, "link", "set", _port(i), "down")

    def heal(self, i: int) -> None:
        """Put it back."""
        _ip("-n", self._switch, "link", "set", _port(i), "up")

    def counters(self, i: int) -> Counters:
        """What host i's interface sent and received so far."""
        # /sys shows the namespace it was mounted in, /proc the one of the thread that reads.
        table = self.inside(i, Path("/proc/thread-self/net/dev").read_text)
        for line in table.splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                columns = [int(n) for n in numbers.split()]
                return Counters(sent=columns[8], received=columns[0])
        raise PacelineError(f"host {i} has lost its interface {self.interface}")

    def inside(self, i: int, work: Callable[[], T]) -> T:
        """Call `work` on host i: sockets it opens, and threads it starts, belong there for good."""
        result: list[T] = []
        failed: list[BaseException] = []

        def go() -> None:
            # Only this thread moves, and it ends here: the process stays where it was.
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
    """None where a lab can be made, else the reason why not. Found out by making one."""
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
    return [name for name, its in parsed if its and _born(int(its[1])) != its[2]]


def remove_leftovers() -> list[str]:
    """Remove them. What was removed."""
    found = leftovers()
    for name in found:
        _remove(name)
    return found


# ------------------------------------------------------------------------------------------------- commands


def _born(pid: int) -> str | None:
    """When that process began, in the kernel's ticks; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return f"{int(stat.rpartition(')')[2].split()[19]):x}"  # after the name, which may hold anything


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
