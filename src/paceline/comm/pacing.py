"""A slow link emulated without root: the kernel limits the speed of every TCP connection of this process.

SO_MAX_PACING_RATE needs no privilege and works below gloo, so Paceline's methods and torch's own are slowed
alike. It limits each connection by itself, not their sum: for ring traffic, where a worker sends to one
neighbour, that equals a link of this speed for each worker; a worker that sends to k others at once gets up
to k times as much. What is measured like this is labelled "emulated"; `namespaces` has real links.
"""

from __future__ import annotations

import socket
import struct
import sys

from paceline.comm.connections import connections
from paceline.errors import UsageError

_SO_MAX_PACING_RATE = 47  # <asm-generic/socket.h>; the socket module does not name it
_UNLIMITED = 2**64 - 1


def pace(bytes_per_second: float | None) -> int:
    """Limit the speed of every TCP connection of this process, and return how many there are.

    None or 0 lifts the limit. Only connections that exist now are limited: call it after the process groups are made,
    and again after new ones.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"a link cannot be emulated on {sys.platform}",
            why="SO_MAX_PACING_RATE is Linux's",
            do="use an unlimited link, or run on Linux",
        )
    if bytes_per_second is not None and not 0 <= bytes_per_second < _UNLIMITED:
        raise UsageError(f"{bytes_per_second} bytes a second is not a link speed", do="give 0 or more, or None")
    rate = struct.pack("=Q", int(bytes_per_second or _UNLIMITED))
    found = 0
    for connection in connections():
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
        found += 1
    return found
