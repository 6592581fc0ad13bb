"""How a worker waits for others: never for ever, and never without looking around.

[Note: waiting] A blocked gloo collective can be woken by nothing but its own deadline, and its buffer may still be
written to after that. So a wait is cut into slices: after each the board is looked at for the cause another worker
left there, for a worker that is gone, and for workers that wait for different things. The fast path, an operation
that ends within its first slice, costs nothing for this.
"""

from __future__ import annotations

import datetime
import time
from typing import Any, Protocol

from paceline.errors import PeerError

SLICE_S = 0.5


class EndedError(RuntimeError):
    """Another worker's process is gone."""

    def __init__(self, worker: int) -> None:
        super().__init__(f"the process of worker {worker} has ended")
        self.worker = worker


class Board(Protocol):
    """Where workers leave short messages for each other beside the data: see membership/board.py."""

    def agree(self, key: str, what: str, text: str) -> None: ...
    def pulse(self, lane: str, op: int, label: str, waited_s: float) -> None: ...
    def clear(self) -> None: ...
    def lost(self, label: str, error: Exception) -> PeerError: ...


def until(work: Any, board: Board, lane: str, number: int, label: str, *, blocking: bool) -> None:
    """[Note: waiting]. On a GPU waiting only orders streams, and NCCL's own watchdog keeps the deadline."""
    if not blocking:
        work.wait()
        return
    began, slow = time.monotonic(), False
    while True:
        try:
            work.wait(datetime.timedelta(seconds=SLICE_S))
            break
        except RuntimeError:
            if work.is_completed():
                failure = _failure(work)
                if failure is None:
                    break
                raise board.lost(label, failure) from None
        slow = True
        board.pulse(lane, number, label, time.monotonic() - began)
    if slow:
        board.clear()


def _failure(work: Any) -> Exception | None:
    """Why a completed operation failed; None if it ended well between the time-out and the look at it."""
    try:
        work.wait()
    except RuntimeError as real:
        return real
    return None
