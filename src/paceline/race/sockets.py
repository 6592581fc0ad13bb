"""What this process's own TCP connections have carried: a counter that nothing else on the machine adds to.

The loopback interface counts every program's bytes. The kernel also counts each connection's (TCP_INFO), without the
headers, and for torch's peers as well as for us.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from paceline.lab.interface import Counters

_ACKED_AND_RECEIVED = 120  # offset of tcpi_bytes_acked and tcpi_bytes_received, both u64, in <linux/tcp.h>
_SIZE = _ACKED_AND_RECEIVED + 16


def carried() -> Counters:
    """Payload bytes that arrived at the other end, and that came from there, over all connections open now."""
    sent = received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed since it was listed, or a kind of socket Python cannot hold
            continue
        with copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                continue
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            if len(info) == _SIZE:
                acked, came = struct.unpack_from("=QQ", info, _ACKED_AND_RECEIVED)
                sent, received = sent + acked, received + came
    return Counters(sent, received)
