"""Opening files by names that others may have planted: plain files only, never through a link, and no name twice."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from paceline.errors import CheckpointError


def open_regular(path: Path) -> BufferedReader:
    """Open a file of a checkpoint for reading.

    A pipe or a device could keep the reader for ever, and a link could lead anywhere. So what is there is looked at
    before it is opened, and once more when it is open.
    """
    _check(path, os.lstat(path).st_mode)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def _check(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise CheckpointError(
            f"{path} is {kind}",
            why="what a checkpoint is made of are plain files in its folder",
            do="load an earlier checkpoint, or copy this one again",
        )


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
