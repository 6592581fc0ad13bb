"""Memory that all workers of one host map: what one writes, all read.

It has no name in any file system (a memfd): one worker makes it, the others open it through that worker's /proc entry,
and the kernel frees it when the last process that maps it has ended, also by a crash. Nothing is left in /dev/shm.
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

from paceline.comm.protocol import Comm
from paceline.errors import MethodError


def make(nbytes: int) -> int:
    """A file descriptor of new memory, to be closed once all workers have mapped it."""
    fd = os.memfd_create("paceline")
    os.ftruncate(fd, nbytes)
    return fd


def attach(pid: int, fd: int, flags: int = os.O_RDWR) -> int:
    """A new file descriptor of this process for the memory that another process has open as fd."""
    return os.open(f"/proc/{pid}/fd/{fd}", flags)


def shared(x: Tensor, comm: Comm) -> Tensor:
    """Worker 0's x, in memory that all workers share. All workers call it, and it succeeds on all or raises on all."""
    if not hasattr(os, "memfd_create"):
        raise MethodError("workers can share memory on Linux only", do="use a method that sends messages")
    nbytes = max(x.nbytes, 1)
    fd = make(nbytes) if comm.rank == 0 else -1
    where = comm.broadcast(torch.tensor([os.getpid(), fd])).wait().tolist()
    mine: Tensor | None = None
    with contextlib.suppress(OSError):
        own = fd if comm.rank == 0 else attach(*where)
        mine = torch.frombuffer(mmap.mmap(own, nbytes), dtype=x.dtype, count=x.numel()).view(x.shape)
        if comm.rank == 0:
            mine.copy_(x)
        else:
            os.close(own)  # the mapping stays
    failed = comm.sum(torch.tensor([float(mine is None)])).wait()  # after this, worker 0 has written x
    if comm.rank == 0:
        os.close(fd)
    if mine is None or failed.item():
        raise MethodError(
            f"{int(failed.item())} of {comm.world_size} workers cannot map worker 0's memory",
            why=f"it is opened as /proc/{where[0]}/fd/{where[1]}, which takes the same user and a readable /proc",
            do="run all workers as one user, in one container",
        )
    return mine


def together(comm: Comm) -> bool:
    """Whether all workers are on one host."""
    places = comm.all_gather(torch.tensor([place()])).wait().flatten().tolist()
    return len(set(places)) == 1


def place() -> int:
    """A number that identifies this worker's host: its kernel, network namespace and process namespace.

    Another namespace counts as another host, also on the same machine.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text() if boot.exists() else socket.gethostname()
    spaces = [Path("/proc/self/ns", kind) for kind in ("net", "pid")]
    inodes = [space.stat().st_ino if space.exists() else 0 for space in spaces]
    return zlib.crc32(f"{kernel} {inodes}".encode())
