"""What a worker and a server say to each other, and how it travels.

[Note: messages] Each worker and each server share a lane of two (`comm.dist.PairComm`), so that a connection that
breaks concerns no other worker. A message is six whole numbers, then some JSON and a vector if the numbers say that
there are any; each of them is one broadcast by the sender. The numbers tell the receiver how much room to make.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.protocol import Comm, Handle

_TYPES = (torch.float32, torch.float64)

OnVector = Callable[[str, int, Handle], None]  # "push" or "pull", payload bytes sent, the operation


class MessageCode(IntEnum):
    """What a message is: the first row is sent by workers, the second by servers."""

    BEGIN, PUSH, PULL, SETTLE, SAVE = range(5)
    WEIGHTS, SAVED, GONE, FAILED = range(10, 14)


class ServerMessage(NamedTuple):
    """A request or an answer.

    In BEGIN, `a` is how many numbers of the vector are the optimizer's state. In WEIGHTS, `a` is the version and `b`
    the number of missed updates. In GONE, `a` is the worker that is gone.
    """

    code: int
    a: int = 0
    b: int = 0
    note: bytes = b""
    x: Tensor | None = None


class MessageChannel:
    """Messages over a lane of two: [Note: messages].

    on_vector: called for every vector that is sent or received, with the handle that tells its end.
    """

    def __init__(self, lane: Comm, on_vector: OnVector | None = None) -> None:
        self._lane, self._on_vector = lane, on_vector
        self._sending: list[Handle] = []

    def send(self, m: ServerMessage) -> None:
        """Start to send; the message's vector must not be written to until `flush` has returned."""
        count = m.x.numel() if m.x is not None else -1
        wide = _TYPES.index(m.x.dtype) if m.x is not None else 0
        self._put(torch.tensor([m.code, m.a, m.b, len(m.note), count, wide]))
        if m.note:
            self._put(torch.frombuffer(bytearray(m.note), dtype=torch.uint8))
        if m.x is not None and count:
            self._put(m.x)

    def _put(self, x: Tensor) -> None:
        self._sending.append(self._broadcast(x, self._lane.rank))

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self._sending:
            self._sending[0].wait()
            self._sending.pop(0)

    def receive(self) -> ServerMessage:
        """Wait for the next message of the other side."""
        code, a, b, length, count, wide = self._get(6, torch.int64).tolist()
        note = bytes(self._get(length, torch.uint8).numpy())
        return ServerMessage(code, a, b, note, self._get(count, _TYPES[wide]) if count >= 0 else None)

    def _get(self, count: int, dtype: torch.dtype) -> Tensor:
        x = torch.empty(count, dtype=dtype)
        return self._broadcast(x, 1 - self._lane.rank).wait() if count else x

    def _broadcast(self, x: Tensor, root: int) -> Handle:
        before = self._lane.sent
        handle = self._lane.broadcast(x, root)
        if self._on_vector is not None and x.is_floating_point():
            self._on_vector("push" if root == self._lane.rank else "pull", self._lane.sent - before, handle)
        return handle
