"""Where a store is served: at a unix socket on one host, at an address and a port between hosts."""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import tempfile
from typing import NamedTuple

from paceline.errors import UsageError

STORE = "PACELINE_STORE"  # set by the launcher, as StoreAddress writes it

_TCP = re.compile(r"tcp:(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]/\s]+)):(\d{1,5})")
_LONGEST_PATH = 107  # bytes that the kernel takes for the name of a unix socket
# A link that is cut without a word is noticed by the kernel: it asks a silent host every 2 s, and gives it 8 s.
_IDLE_S, _EVERY_S, _TIMES, _GONE_MS = 2, 2, 3, 8000


class StoreAddress(NamedTuple):
    """A unix socket's path, or a host and a port. A path that begins with @ is a name in no folder (Linux)."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """The opposite of `str`."""
        if text.startswith(("unix:/", "unix:@")):
            return cls(path=text.removeprefix("unix:"))
        found = _TCP.fullmatch(text)
        if found is None or not 1 <= int(found[3]) <= 65535:
            raise UsageError(
                f"{STORE}={text[:200]!r} is not where a store is served",
                do="unset it: `paceline run` sets it to unix:/path or tcp:host:port",
            )
        return cls(host=found[1] or found[2], port=int(found[3]))

    @property
    def _name(self) -> str:
        return f"\0{self.path[1:]}" if self.path.startswith("@") else self.path

    def listen(self) -> socket.socket:
        """A socket that listens here, and nowhere else. Left to itself, torch's store binds every address."""
        family = socket.AF_UNIX if self.path else socket.getaddrinfo(self.host, self.port)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if not self.path:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(self._name or (self.host, self.port))
            sock.listen(1024)
        except OSError:
            sock.close()
            raise
        return sock

    def connect(self, seconds: float) -> socket.socket:
        """A connection to whoever listens here."""
        if not self.path:
            sock = socket.create_connection((self.host, self.port), timeout=seconds)
            notice_cut_link(sock)
            return sock
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(seconds)
            sock.connect(self._name)
        except OSError:
            sock.close()
            raise
        return sock


def make_folder(name: str = "paceline-") -> str:
    """A new folder for a unix socket, which only this user can enter."""
    usual = tempfile.gettempdir()
    fits = len(os.fsencode(f"{usual}/{name}12345678/store")) <= _LONGEST_PATH
    return tempfile.mkdtemp(prefix=name, dir=usual if fits else "/tmp")


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket is of this process's user; true for any other socket."""
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.geteuid())


def notice_cut_link(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other host has been silent for some seconds, and send without delay."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _TIMES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
