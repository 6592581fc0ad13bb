"""The bytes that this process's own TCP connections have carried, without those of other programs.

The loopback interface counts the bytes of every program. The kernel also counts those of each connection (TCP_INFO),
without headers, for the connections that torch opened as well as for Paceline's.
"""

from __future__ import annotations

import socket
import struct

from paceline.comm.connections import connections
from paceline.comm.interface import Counters

_ACKED_AND_RECEIVED = 120  # offset of tcpi_bytes_acked and tcpi_bytes_received, both u64, in <linux/tcp.h>
_SIZE = _ACKED_AND_RECEIVED + 16


def carried() -> Counters:
    """Payload bytes sent (and acknowledged by the other end) and received, over all connections open now."""
    sent = received = 0
    for connection in connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        if len(info) == _SIZE:
            acked, came = struct.unpack_from("=QQ", info, _ACKED_AND_RECEIVED)
            sent, received = sent + acked, received + came
    return Counters(sent, received)
