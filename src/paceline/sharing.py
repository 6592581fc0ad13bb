"""Memory that all workers of one host map: what one writes, all read.

It has no name in any file system (a memfd): one worker makes it, the others open it through that worker's /proc entry,
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


def make(nbytes: int) -> int:
    """New memory, as a file descriptor that is to be closed once everybody has mapped it."""
    fd = os.memfd_create("paceline")
    os.ftruncate(fd, nbytes)
    return fd


def attach(pid: int, fd: int, flags: int = os.O_RDWR) -> int:
    """A descriptor of one's own for what another process has open."""
    return os.open(f"/proc/{pid}/fd/{fd}", flags)


def shared(x: Tensor, comm: Comm) -> Tensor:
    """Worker 0's x, in memory that all workers share. Every worker calls it, and all go on or none does."""
    if not hasattr(os, "memfd_create"):
        raise MethodError("workers can share memory on Linux only", do="use a method that sends, such as async_average")
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
    """Are all workers on one host?"""
    places = comm.gather(torch.tensor([place()])).wait().flatten().tolist()
    return len(set(places)) == 1


def place() -> int:
    """A number that two workers have in common if they are on one host: same kernel, same network and process
    namespace. Another namespace is another host, whatever else they share.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text() if boot.exists() else socket.gethostname()
    spaces = [Path("/proc/self/ns", kind) for kind in ("net", "pid")]
    inodes = [space.stat().st_ino if space.exists() else 0 for space in spaces]
    return zlib.crc32(f"{kernel} {inodes}".encode())
