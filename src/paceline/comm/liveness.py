"""Whether a process of this host goes on, as the kernel knows it."""

from __future__ import annotations

from pathlib import Path


def is_stopped(pid: int) -> bool:
    """Whether a process was sent SIGSTOP, or a terminal's Ctrl-Z. One that a debugger holds is not meant."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
