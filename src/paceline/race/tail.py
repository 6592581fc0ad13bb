"""Events as they are written: each call gives only the new ones, so a long race stays cheap to watch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from paceline.telemetry import AnyEvent

_decoder = msgspec.json.Decoder(AnyEvent)


class Tail:
    """One worker's events. A line that is not whole yet waits for its end; a broken one is passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read()
            whole = whole[: whole.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                    events.append(_decoder.decode(line))
        return events
