"""Read a worker's events while it writes them. Only what is new is read, so a long race stays cheap to watch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from paceline.telemetry.event_file import older
from paceline.telemetry.events import AnyEvent

_decoder = msgspec.json.Decoder(AnyEvent)


class EventTail:
    """The growing end of one worker's event file.

    A line that is not complete yet is read by a later call. A line that is no event is skipped. When the worker begins
    a new file, the rest of the one before is read first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode = 0  # of the file that the offset is in

    def new(self) -> list[AnyEvent]:
        """The events that were written since the last call."""
        lines: list[bytes] = []
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._inode not in (0, inode):
                with contextlib.suppress(FileNotFoundError), older(self.path).open("rb") as before:
                    if os.fstat(before.fileno()).st_ino == self._inode:
                        lines += self._rest(before)
                self._offset = 0
            self._inode = inode
            lines += self._rest(file)
        events: list[AnyEvent] = []
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                events.append(_decoder.decode(line))
        return events

    def _rest(self, file: BinaryIO) -> list[bytes]:
        file.seek(self._offset)
        text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()
