"""One file of a known size for state, moved in whole pages.

[Note: the file] It is reserved whole before the first step, so a full disk shows then and not hours later. It loses
its name at once: however the process ends, the space is free again. It is opened past the page cache (O_DIRECT) where
the file system has that, for the cache would only take memory that is needed elsewhere. That wants offsets, lengths
and memory in whole pages. They are asked for on every file system, so that what runs on one runs on all.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import StoreError, UsageError

PAGE = 4096  # bytes: what O_DIRECT wants everything in multiples of, on every disk we know


def padded(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def aligned(nbytes: int) -> Tensor:
    """Take at least nbytes of memory, in whole pages that begin at a page."""
    n = padded(nbytes)
    room = torch.empty(n + PAGE, dtype=torch.uint8)
    return room[-room.data_ptr() % PAGE :][:n]


class StateFile:
    """A file of `size` bytes in `folder`. Any thread may read and write: all bytes are moved, or it raises."""

    def __init__(self, folder: Path, size: int, name: str = "paceline") -> None:
        _check_room(folder, size)
        try:
            self._plain, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".state", dir=folder)
        except OSError as error:
            raise broken(f"making a file in {folder}", error) from error
        self.path, self.size = Path(path), 0
        try:
            self.grow(size)
            self._direct = _open_direct(path)
        except BaseException:
            os.close(self._plain)
            raise
        finally:
            self.path.unlink(missing_ok=True)

    def grow(self, size: int) -> None:
        """Reserve space up to `size` bytes."""
        more, folder = size - self.size, self.path.parent
        try:
            os.posix_fallocate(self._plain, self.size, more)
        except OSError as error:
            _check_room(folder, more, full=error.errno == errno.ENOSPC)
            raise broken(f"reserving {more} bytes in {folder}", error) from error
        self.size = size

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache."""
        return self._direct is not None

    def read(self, at: int, view: memoryview) -> None:
        self._all(os.preadv, at, view)

    def write(self, at: int, view: memoryview) -> None:
        self._all(os.pwritev, at, view)

    def flush(self) -> None:
        """Move all that was written from the page cache to the disk, so that the next read is one of the disk."""
        os.fdatasync(self._plain)
        os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)

    def _all(self, io: Callable[[int, list[memoryview], int], int], at: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            # Where a part ended inside a page, O_DIRECT cannot go on.
            fd = self._plain if self._direct is None or done % PAGE else self._direct
            moved = io(fd, [view[done:]], at + done)
            if moved == 0:
                raise StoreError(
                    f"{self.path} ends at {os.fstat(self._plain).st_size}, before {at + len(view)}",
                    why="it was cut short, or the file system lost a part of it",
                    do="go on from the last checkpoint",
                )
            done += moved


def broken(doing: str, error: Exception) -> StoreError:
    return StoreError(
        f"{doing} failed",
        why=f"{type(error).__name__}: {error}",
        do="look at the disk (dmesg, df), and go on from the last checkpoint",
    )


def _check_room(folder: Path, size: int, *, full: bool = False) -> None:
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", why="state on disk needs one", do="make it, or name another")
    free = shutil.disk_usage(folder).free
    if size > free or full:
        raise StoreError(
            f"{folder} has no room for the state: it needs {size / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free",
            why="the whole file is reserved before the first step",
            do="free some space, name a folder on a larger disk, or share the state out over more workers",
        )


def _open_direct(name: str) -> int | None:
    """Open a file past the page cache. None: some file systems refuse to open it so, others only to use it."""
    try:
        fd = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        return None
    try:
        os.preadv(fd, [aligned(PAGE).numpy().data], 0)
    except OSError:
        os.close(fd)
        return None
    return fd
