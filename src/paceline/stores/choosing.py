"""How much of the optimizer's state goes where: what fits on the device, then in the host's memory, the rest on disk.

[Note: choosing] Parameters are in the order in which they are stepped. The last of them stay on the device, for the
next forward needs them first and nothing is left to hide their step behind; the first go to disk, which then has the
longest time. One worker holds, for n numbers of s bytes, of which a have their state away and d of these on disk:

    device   12·(n − a), and above that the larger of the reserve (activations) and what the end of backward needs:
             gradients s·(n − a), a turn in fp32, and the new parameters that come from the host
    host     12·(a − d), s·a for gradients unless they only pass through, a ring of RING·s and, with anything on disk,
             BUFFERS·12 bytes for each number of the largest parameter there
    disk     12·d

New parameters wait on the device, s·a; where that is too much, only those from disk do, s·d, for they would have to be
read twice; or none. A parameter that is much larger than the others takes more room in the buffers than in memory: it
may be better not to have it on disk.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from paceline.environment import Environment
from paceline.shards.piece import STRETCH
from paceline.shards.turns import AT_ONCE
from paceline.stores.lanes import RING
from paceline.stores.nvme import BUFFERS

STATE, MOMENTS = 12, 8  # bytes a number: the fp32 master and Adam's two moments
USABLE = 0.95  # of what there is: allocators leave gaps
RESERVE = 0.1  # of a device, for activations, where nobody says how much they are
_LARGEST = 4  # sizes that are tried as the largest on disk
_CGROUPS = {  # limit and use: version 2, version 1
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


class Room(NamedTuple):
    """Bytes that one worker may use in each place. total: of the device."""

    device: int
    host: int
    disk: int
    total: int = 0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one worker has to place. sizes: of its parts of the parameters, as they are stepped; s: bytes a number."""

    sizes: Sequence[int]
    s: int = 2
    undo: bool = True
    reserve: int = 0
    bucket: int = 0  # numbers that travel together, though parameters may be smaller
    passing: int = 0  # bytes of whole buckets on their way between workers


class Chosen(NamedTuple):
    """Of how many numbers the state lies in which place; the host has those besides that are too large for the disk."""

    device: int
    host: int
    disk: int
    largest: int  # nothing above that goes to disk
    room: bool = True  # on the device, for all new parameters; else for those from disk first


def place(load: Load, room: Room, *, device: int | None = None, host: int | None = None) -> Chosen | None:
    """[Note: choosing]; None if it does not fit. device, host: how many numbers' state there, where somebody has said
    so.
    """
    largest = sorted(set(load.sizes), reverse=True)[: 1 if host is not None else _LARGEST] if room.disk else [0]
    for waiting in _WAITING:
        tries = (_Try(load, room, waiting, limit, device, host).placed() for limit in largest)
        if found := [chosen for chosen in tries if chosen is not None]:
            return min(found, key=lambda chosen: chosen.disk)
    return None


_WAITING = ("away", "disk", "none")  # whose new parameters wait on the device


class _Try:
    """One way to share it out."""

    def __init__(
        self, load: Load, room: Room, waiting: str, largest: int, device: int | None, host: int | None
    ) -> None:
        self.load, self.room, self.waiting, self.largest = load, room, waiting, largest
        self.device, self.host = device, host
        fit = [n if n <= largest else 0 for n in load.sizes]
        self.until = [0, *itertools.accumulate(load.sizes)]  # numbers before the i-th
        self.fit_until = [0, *itertools.accumulate(fit)]  # ... that may go to disk
        self.most_until = _most(load.sizes, load.bucket)
        self.most_fit_until = _most(fit, load.bucket)

    def placed(self) -> Chosen | None:
        """The first `away` are not on the device, the first `beyond` of these not on the host if they may."""
        count, beyond = len(self.load.sizes), 0
        for away in range(count + 1):
            while not self._on_host(away, beyond):
                beyond += 1
                if beyond > away:
                    return None
            if STATE * self.fit_until[beyond] > self.room.disk:
                return None
            if self._on_device(away, beyond):
                disk = self.fit_until[beyond]
                return Chosen(
                    device=self.until[count] - self.until[away],
                    host=self.until[away] - self.until[beyond],
                    disk=disk,
                    largest=self.largest,
                    room=self.waiting == "away",
                )
        return None

    def _on_host(self, away: int, beyond: int) -> bool:
        if self.host is not None:
            return self.until[away] - self.until[beyond] <= self.host
        s, n = self.load.s, self.until[away]
        need = STATE * (n - self.fit_until[beyond]) + RING * s * self.most_until[away]
        need += s * n if self.load.undo else 0
        return need + BUFFERS * STATE * self.most_fit_until[beyond] <= self.room.host

    def _on_device(self, away: int, beyond: int) -> bool:
        load, n = self.load, self.until[-1] - self.until[away]
        if self.device is not None:
            return n <= self.device
        waiting = {"away": self.until[away], "disk": self.fit_until[beyond], "none": 0}[self.waiting]
        state = STATE if load.s < 4 else STATE - 4
        at_the_end = load.s * (n + waiting) + turn(n, self.most_until[-1], load.s) + load.passing
        return state * n + max(load.reserve, at_the_end) <= self.room.device


def _most(sizes: Sequence[int], bucket: int) -> list[int]:
    """In one bucket, of the first so many."""
    most = itertools.accumulate(sizes, max, initial=0)
    return [min(max(n, bucket), total) for n, total in zip(most, itertools.accumulate(sizes, initial=0), strict=True)]


def turn(n: int, most: int, s: int) -> int:
    """Bytes of the device that [Note: in turns] takes for n numbers of s bytes there, at most so many in one bucket."""
    return min(4 * n, max(AT_ONCE, 4 * most)) + compared(min(most, n), s) if s < 4 else 0


def compared(n: int, s: int) -> int:
    """Bytes that it takes to compare the masters of a bucket with its parameters."""
    return s * n + (5 + 2 * s) * min(n, STRETCH)


def measured(device: torch.device, folder: str) -> Room | None:
    """What one worker of this host may use now. None: there is no accelerator, so the device is the host."""
    if device.type != "cuda":
        return None
    env = Environment.read()
    sharing = -(-env.local_world // torch.cuda.device_count())  # workers of one device
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Room(
        device=int(max(free + cached - (1 - USABLE) * total, 0) / sharing),
        host=int(USABLE * free_memory() / env.local_world),
        disk=int(USABLE * shutil.disk_usage(Path(folder)).free / env.local_world) if folder else 0,
        total=total // sharing,
    )


def free_memory() -> int:
    """Of this host, or of the container this runs in."""
    return min([int(psutil.virtual_memory().available), *_cgroup_rooms()])


def _cgroup_rooms() -> Iterator[int]:
    for folder, (limit, use) in _CGROUPS.items():
        try:
            used = int((folder / use).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            given_back = int(stat.get("inactive_file", 0))  # the page cache's, if somebody needs it
            yield max(int((folder / limit).read_text()) - used + given_back, 0)
        except (OSError, ValueError):  # no such version here, or no limit
            continue
