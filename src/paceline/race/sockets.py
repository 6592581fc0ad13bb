"""What this process's own TCP connections have carried: a counter that nothing else on the machine adds to.

The loopback interface counts every program's bytes. The kernel also counts each connection's (TCP_INFO), without the
headers, and for torch's peers as well as for us.
"""

from __future__ import annotations

import socket
import struct

from paceline.lab.connections import connections
from paceline.lab.interface import Counters

_ACKED_AND_RECEIVED = 120  # offset of tcpi_bytes_acked and tcpi_bytes_received, both u64, in <linux/tcp.h>
_SIZE = _ACKED_AND_RECEIVED + 16


def carried() -> Counters:
    """Payload bytes that arrived at the other end, and that came from there, over all connections open now."""
    sent = received = 0
    for connection in connections():
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
        if len(info) == _SIZE:
            acked, came = struct.unpack_from("=QQ", info, _ACKED_AND_RECEIVED)
            sent, received = sent + acked, received + came
    return Counters(sent, received)
