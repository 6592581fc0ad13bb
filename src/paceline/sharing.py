"""Memory that all workers of one host map: what one writes, all read.

It has no name in any file system (a memfd): worker 0 makes it, the others open it through worker 0's /proc entry,
and the kernel frees it with the last process that maps it, however that ends. Nothing is left in /dev/shm, ever.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import zlib
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import MethodError
from paceline.parts import Comm


def shared(x: Tensor, comm: Comm) -> Tensor:
    """Worker 0's x, in memory that all workers share. Every worker calls it, and all go on or none does."""
    if not hasattr(os, "memfd_create"):
        raise MethodError("workers can share memory on Linux only", do="use a method that sends, such as async_average")
    fd = -1
    if comm.rank == 0:
        fd = os.memfd_create("paceline")
        os.ftruncate(fd, max(x.nbytes, 1))
    where = comm.broadcast(torch.tensor([os.getpid(), fd])).wait().tolist()
    mine: Tensor | None = None
    with contextlib.suppress(OSError):
        own = fd if comm.rank == 0 else os.open(f"/proc/{where[0]}/fd/{where[1]}", os.O_RDWR)
        mine = torch.frombuffer(mmap.mmap(own, max(x.nbytes, 1)), dtype=x.dtype, count=x.numel()).view(x.shape)
        if comm.rank == 0:
            mine.copy_(x)
        else:
            os.close(own)  # the mapping stays
    failed = comm.sum(torch.tensor([float(mine is None)])).wait()  # and worker 0 has filled it
    if comm.rank == 0:
        os.close(fd)
    if mine is None or failed.item():
        raise MethodError(
            f"{int(failed.item())} of {comm.world} workers cannot map worker 0's memory",
            why=f"it is opened as /proc/{where[0]}/fd/{where[1]}, which takes the same user and a readable /proc",
            do="run all workers as one user, in one container",
        )
    return mine


def together(comm: Comm) -> bool:
    """Are all workers on one host? Another network or process namespace is another host, whatever they share."""
    places = comm.gather(torch.tensor([_place()])).wait().flatten().tolist()
    return len(set(places)) == 1


def _place() -> int:
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text() if boot.exists() else socket.gethostname()
    spaces = [Path("/proc/self/ns", kind) for kind in ("net", "pid")]
    inodes = [space.stat().st_ino if space.exists() else 0 for space in spaces]
    return zlib.crc32(f"{kernel} {inodes}".encode())
