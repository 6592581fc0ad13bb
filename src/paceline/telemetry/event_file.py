"""One worker's events on disk: a file that does not grow without end, and whose disk may be full.

`worker-0.jsonl` is written until it has half of what a worker may have; then it becomes `worker-0.1.jsonl`, in place of
an older one of that name, and a new one begins, with the worker's first line. So the last events are always there.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

MOST_BYTES = 64 * 2**20  # of one worker, both files together: some 350 000 steps


def older(path: Path) -> Path:
    """Where the events before those in this file are, if there are any left."""
    return path.with_suffix(f".1{path.suffix}")


class EventFile:
    """Lines go to `path`. A disk that takes none costs events, which is said once, and not the training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._first = b""  # the line that every file begins with
        self._torn = False  # the last line is not whole
        self._said = False
        self._open()

    def write(self, lines: bytes, *, first: bytes = b"") -> None:
        """Append whole lines. first: the line to begin later files with, if it is known by now."""
        self._first = first or self._first
        try:
            if self._size and self._size + len(lines) > MOST_BYTES // 2:
                self._file.close()
                self.path.replace(older(self.path))
                self._open()
                self._append(self._first)
            self._append(b"\n" + lines if self._torn else lines)
            self._torn = False
        except (OSError, ValueError) as error:  # ValueError: the file could not be opened again
            self._torn = True
            if not self._said:
                self._said = True
                print(f"paceline: events are lost, training goes on: {self.path}: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _open(self) -> None:
        self._file: io.FileIO = self.path.open("ab", buffering=0)
        self._size = self._file.tell()

    def _append(self, lines: bytes) -> None:
        left = memoryview(lines)
        while left:
            written = self._file.write(left) or 0
            self._size += written
            left = left[written:]
