"""`prepare(memory_gb=...)`: the most memory that this process may use.

On a GPU it is what torch may take of the device for this process, with what it keeps for later. On a CPU it is what may
be resident beside the libraries: the system's limit on mapped memory (RLIMIT_AS) is set to what is mapped and not in
use now, plus the cap. Memory that is only reserved later (the stacks of threads, heaps of malloc) counts too, so a cap
that is nearly used up shows earlier. Processes that are started later, those of a loader too, inherit it.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from paceline.errors import UsageError

_GB = 1 << 30


def cap(gb: float, device: torch.device) -> None:
    """Let this process use no more from now on."""
    most = int(gb * _GB)
    if device.type == "cuda":
        _cap_gpu(most, gb, device)
    else:
        _cap_host(most, gb)


def _cap_gpu(most: int, gb: float, device: torch.device) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    _check(most, torch.cuda.memory_reserved(device), total, gb, f"of {device}")
    torch.cuda.set_per_process_memory_fraction(most / total, device)


def _cap_host(most: int, gb: float) -> None:
    mapped, resident, *_ = (int(pages) * resource.getpagesize() for pages in _statm())
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    total = resource.getpagesize() * os.sysconf("SC_PHYS_PAGES")
    _check(most, resident, total, gb, "of the host")
    limit = mapped - resident + most
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _statm() -> list[str]:
    return Path("/proc/self/statm").read_text(encoding="ascii").split()


def _check(most: int, used: int, total: int, gb: float, where: str) -> None:
    if most < used:
        raise UsageError(
            f"memory_gb={gb:g} is less than this process uses already: {used / _GB:.2f} GB {where}",
            do=f"give memory_gb={used / _GB * 1.5:.1f} or more",
        )
    if most > total:
        raise UsageError(
            f"memory_gb={gb:g} is more than there is: {total / _GB:.1f} GB {where}",
            do="leave memory_gb= out to use all of it",
        )
