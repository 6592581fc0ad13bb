"""Whether a process of this host goes on, as the kernel knows it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

_BUSY = 0.01  # of a core: threads that only look around from time to time use less


def is_stopped(pid: int) -> bool:
    """Whether a process was sent SIGSTOP, or a terminal's Ctrl-Z. One that a debugger holds is not meant."""
    try:
        return _fields(pid)[0] == "T"
    except (OSError, IndexError):
        return False


class _Work(NamedTuple):
    """What a process has done so far, when somebody looked."""

    seconds: float  # of processor time, all its threads together
    moved: int  # bytes read and written, by files and pipes
    at: float


class Idleness:
    """For how long processes of this host have neither computed nor read or written anything."""

    def __init__(self) -> None:
        self._last: dict[int, _Work] = {}

    def seconds(self, pid: int) -> float:
        """Since when a process does nothing, as far as it was looked at; 0 if that cannot be known."""
        try:
            now = _work(pid)
        except (OSError, IndexError, ValueError):
            self._last.pop(pid, None)
            return 0.0
        last = self._last.setdefault(pid, now)
        if now.seconds - last.seconds > _BUSY * max(now.at - last.at, 1.0) or now.moved != last.moved:
            last = self._last[pid] = now
        return now.at - last.at


def _work(pid: int) -> _Work:
    ticks = sum(int(field) for field in _fields(pid)[11:13])
    io = Path(f"/proc/{pid}/io").read_text().split()
    return _Work(ticks / os.sysconf("SC_CLK_TCK"), int(io[1]) + int(io[3]), time.monotonic())


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the program's name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
