"""How a worker waits for others: with a timeout, and with regular checks for failures.

[Note: waiting] A blocked gloo collective ends early only by its own timeout, and its buffer may still be written to
after that. So a wait is cut into time slices. After each slice the worker looks whether another worker has posted a
cause or is gone, of which the store has told it by then, and now and then for workers that wait for different
operations. An operation that ends within its first slice, the fast path, pays nothing for this.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

from paceline.comm.protocol import Board

SLICE_S = 0.1


class EndedError(RuntimeError):
    """Another worker's process is gone."""

    def __init__(self, worker: int) -> None:
        super().__init__(f"the process of worker {worker} has ended")
        self.worker = worker


def until(work: Any, board: Board, lane: str, number: int, label: str, *, blocking: bool) -> None:
    """Wait for an operation as [Note: waiting] says. On a GPU this only orders streams; NCCL has its own timeout."""
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
    """The error of a completed operation; None if it succeeded just after the wait for it had timed out."""
    try:
        work.wait()
    except RuntimeError as real:
        return real
    return None
