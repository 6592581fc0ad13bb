"""How much memory there is: on the device, on the host and on the disk, for one worker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from paceline.comm.environment import Environment
from paceline.offload.memory_model import USABLE, FreeMemory

_CGROUPS = {  # the files with limit and use: version 2, version 1
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def measured(device: torch.device, folder: str) -> FreeMemory | None:
    """Give what one worker of this host may use now. None: there is no accelerator, so the device is the host."""
    if device.type != "cuda":
        return None
    env = Environment.read()
    sharing = -(-env.local_world_size // torch.cuda.device_count())  # workers of one device
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(
        device=int(max(free + cached - (1 - USABLE) * total, 0) / sharing),
        host=int(USABLE * free_host_memory() / env.local_world_size),
        disk=int(USABLE * shutil.disk_usage(Path(folder)).free / env.local_world_size) if folder else 0,
        total=total // sharing,
    )


def free_host_memory() -> int:
    """Give the free bytes of this host, or of the container this runs in."""
    return min([int(psutil.virtual_memory().available), *_free_in_cgroups()])


def _free_in_cgroups() -> Iterator[int]:
    for folder, (limit, use) in _CGROUPS.items():
        try:
            used = int((folder / use).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            reclaimable = int(stat.get("inactive_file", 0))  # of the page cache
            yield max(int((folder / limit).read_text()) - used + reclaimable, 0)
        except (OSError, ValueError):  # there is no such version here, or no limit
            continue
