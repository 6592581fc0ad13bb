"""Folders that are no checkpoint: one that is being written, and one that is being removed.

[Note: drafts] A checkpoint is written into a folder `.draft-RUN-MACHINE-STEP-RANDOM`, and that is renamed when it is
whole. A checkpoint that is to go is renamed to such a name before the first of its files is removed. So whatever the
instant of a kill, what is called step-... is whole, and what it leaves behind is called as a draft, and goes before the
next save writes anything.

Which drafts may go? Other jobs may be writing theirs in the same folder. Whoever writes a draft holds a lock on it (on
the folder itself, by flock), and the system drops the lock of a process that is gone, however it went. A lock is seen
on one machine only, where the folder is on a network's disk. So a draft of this machine goes if nobody holds its lock,
and one of another machine if it is of this run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import platform
import re
import secrets
import shutil
import sys
from pathlib import Path

_NAME = re.compile(r"\.draft-(?P<run>[0-9a-f]{16})-(?P<machine>[0-9a-f]{8})-\d+-[0-9a-f]{16}")
_TRIES = 10


def new_run() -> str:
    """Give a name for a run that no other has."""
    return secrets.token_hex(8)


def run_of(draft: Path) -> str:
    """Give the run that a draft is of."""
    found = _NAME.fullmatch(draft.name)
    assert found is not None, draft
    return found["run"]


class Draft:
    """A folder to write a checkpoint into. As long as it is open, nobody takes it for one that was left behind."""

    _lock: int | None = None

    def __init__(self, folder: Path, run: str, step: int) -> None:
        for _ in range(_TRIES):
            self.path = _named(folder, run, step)
            self.path.mkdir()
            try:
                self._lock = _locked(self.path)
            except OSError:  # no locks on this disk: then drafts of other runs are never removed
                return
            if self._lock is not None:
                return
        raise OSError(errno.EAGAIN, "drafts vanish as soon as they are made", str(folder))

    def close(self) -> None:
        """Let go of the folder, which has another name by now, or is to be removed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove(path: Path, run: str, step: int) -> None:
    """Remove a checkpoint: first its name, then its files."""
    try:
        path = path.rename(_named(path.parent, run, step))
    except FileNotFoundError:
        return
    except OSError as error:
        _say(path, error)
        return
    remove_files(path)


def remove_files(path: Path) -> None:
    """Remove a folder and what is in it. Links in it are removed and not followed."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _say(path, error)


def clear(folder: Path, run: str) -> None:
    """Remove the drafts that killed saves have left in a folder: [Note: drafts]."""
    for path in folder.iterdir():
        found = _NAME.fullmatch(path.name)
        if found is None or path.is_symlink():
            continue
        lock, goes = None, found["run"] == run
        if found["machine"] == _machine():
            with contextlib.suppress(OSError):  # there may be no locks on this disk
                lock = _locked(path)
                goes = lock is not None
        try:
            if goes:
                remove_files(path)
        finally:
            if lock is not None:
                os.close(lock)


def _named(folder: Path, run: str, step: int) -> Path:
    return folder / f".draft-{run}-{_machine()}-{step}-{secrets.token_hex(8)}"


def _locked(path: Path) -> int | None:
    """Open a folder and lock it. None: another has locked it, or it is not there any more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(path.lstat(), os.fstat(fd)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


@functools.cache
def _machine() -> str:
    """Give a word for this machine since it was last started: what sees a lock that is held here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = platform.node()
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


def _say(path: Path, error: OSError) -> None:
    print(f"paceline: {path} could not be removed: {error.strerror or error}", file=sys.stderr, flush=True)
