"""The byte counters of a network interface, which show how many bytes a method really sends."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from paceline.comm.environment import interfaces
from paceline.errors import UsageError, nearest


class Counters(NamedTuple):
    """Bytes sent and received. Those of an interface count from when it came up, headers included."""

    sent: int
    received: int


def counters(interface: str) -> Counters:
    """The counters of an interface of this process's own network namespace."""
    if interface not in interfaces():  # also keeps `../` out of the path below
        raise UsageError(f"there is no network interface {interface!r}", do=nearest(interface, interfaces()))
    where = Path("/sys/class/net") / interface / "statistics"
    if not where.is_dir():
        raise UsageError(
            f"the bytes of {interface} cannot be counted",
            why=f"{where} does not exist: only Linux, with /sys mounted, has it",
        )
    return Counters(*(int((where / name).read_text()) for name in ("tx_bytes", "rx_bytes")))
