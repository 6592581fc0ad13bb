"""The TCP connections of this process: those that torch opened as well as Paceline's."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path


def connections() -> Iterator[socket.socket]:
    """A duplicate of each connected TCP socket, to read or set its options; closed when the next one is yielded."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed since it was listed, or a kind of socket Python cannot hold
            continue
        with copy:
            if _is_connection(copy):
                yield copy


def _is_connection(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    try:
        sock.getpeername()
    except OSError:  # it listens, or was never connected
        return False
    return True
