"""A small process beside the launcher: if the launcher is killed, it ends whatever the launcher's workers have started.

The kernel kills the workers when their launcher dies, but not what they have started themselves: data loaders, a
parameter server, a program of the user's in a session of its own. All of these have inherited the launcher's mark, a
variable of their environment. The guardian reads from a pipe whose other end only the launcher holds, so it learns of
the launcher's end however that comes about, and kills every process that has the mark; then it removes the folders of
the launcher's stores. A launcher that ends by itself dismisses it first.

The process runs this file by its path and imports the standard library only: it starts in some 20 ms.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

MARK = "PACELINE_GUARD"
_SWEEP_S = 10.0  # how long new processes of the job are looked for
_DISMISSED = b"."


class Guardian:
    """This process's guardian, as the process sees it. Its `mark` goes into the environment of every worker."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        own = secrets.token_hex(16)
        self.folder_name = f"paceline-{secrets.token_hex(4)}-"  # how the names of the job's folders begin
        # A launcher may run inside a worker of another one: then its workers belong to both.
        self.mark = "/".join(filter(None, (os.environ.get(MARK), own)))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, own, self.folder_name, tempfile.gettempdir()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what a terminal sends to the launcher is not for it
        )
        atexit.register(self.dismiss)

    @property
    def is_mine(self) -> bool:
        """Whether it guards this process, and not one that this process was forked from."""
        return self._pid == os.getpid()

    def dismiss(self) -> None:
        """This process ends by itself: there is nothing to be cleaned up after it."""
        if self.is_mine and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(_DISMISSED)
                self._process.stdin.close()
            self._process.wait()


_guardian: Guardian | None = None


def mark() -> str:
    """The mark for the workers of this process."""
    return _own().mark


def folder_name() -> str:
    """How the name of a folder must begin that the guardian is to remove after a launcher that was killed."""
    return _own().folder_name


def _own() -> Guardian:
    """The guardian of this process, which is started when it is first asked for."""
    global _guardian
    if _guardian is None or not _guardian.is_mine:
        _guardian = Guardian()
    return _guardian


def sweep(own: bytes) -> int:
    """Kill every process that has the mark in its environment; how many there were."""
    found = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            fd = os.pidfd_open(int(entry.name))  # before the look: the number may be given to another process
            try:
                if own in (entry / "environ").read_bytes():
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    found += 1
            finally:
                os.close(fd)
    return found


def remove_folders(name: str, parents: Collection[str]) -> None:
    """Remove the folders of this name, each of which has a socket in it."""
    for folder in (entry for parent in parents for entry in Path(parent).glob(f"{name}*")):
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                entry.unlink()
            folder.rmdir()


def main() -> None:
    """Wait for the launcher's end."""
    own = sys.argv[1].encode()
    if os.read(0, 1) == _DISMISSED:
        return
    end = time.monotonic() + _SWEEP_S
    while sweep(own) and time.monotonic() < end:
        time.sleep(0.01)
    remove_folders(sys.argv[2], {sys.argv[3], "/tmp"})


if __name__ == "__main__":
    main()
