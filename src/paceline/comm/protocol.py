"""What a worker may ask of the others: the operations, their handles, and the board beside them.

Everything above the wire is written against these three protocols, so the same part runs between processes
(`DistComm`, `SharedMemoryComm`, `HierarchicalComm`), between threads (`ThreadComm`) and alone (`SingleComm`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

from torch import Tensor

from paceline.errors import PeerError


class Handle(Protocol):
    """An operation under way. Inside a part, `await` it; `wait` blocks (on a GPU it only orders streams)."""

    def wait(self) -> Tensor: ...

    def done(self) -> bool:
        """Has it ended? That depends on the clock, so only decisions that may differ between workers may ask."""

    def notify(self, call: Callable[[], None]) -> bool:
        """Have `call` called by the thread that ends the operation. False: this operation cannot tell."""

    def __await__(self) -> Generator[Any, None, Tensor]: ...


class Comm(Protocol):
    """A lane: a worker's view of its group. Every operation starts at once and gives a Handle.

    The operand belongs to the operation until its handle has ended; after a failure it is abandoned, never reused.
    All workers must issue the same operations in the same order.
    """

    rank: int
    world_size: int
    name: str
    sent: int  # payload bytes this worker put on the wire, counted here and nowhere else
    ops: int  # operations begun

    def mean(self, x: Tensor) -> Handle:
        """x becomes the mean over the workers, in place, bitwise equal everywhere."""

    def sum(self, x: Tensor) -> Handle:
        """x becomes the sum over the workers, in place. For counters and votes."""

    def all_gather(self, x: Tensor) -> Handle:
        """The result is every worker's x, stacked: [world_size, *x.shape]."""

    def reduce_scatter_mean(self, x: Tensor) -> Handle:
        """x consists of world_size equal shards; the result is the mean of shard `rank`."""

    def all_to_all(self, x: Tensor) -> Handle:
        """x is [world_size, n]; row r goes to worker r; the result's row r came from worker r."""

    def swap(self, x: Tensor, peer: int) -> Handle:
        """Exchange x with one peer, which calls swap with this rank; the result is the peer's x."""

    def shift(self, x: Tensor, by: int) -> Handle:
        """Every worker passes x on to worker rank + by, around the circle; the result is worker rank - by's x."""

    def broadcast(self, x: Tensor, root: int = 0) -> Handle:
        """x becomes the root's x, in place."""

    def agree(self, what: str, text: str) -> None:
        """Raise MismatchError on every worker unless all of them say the same text."""


class Board(Protocol):
    """Where workers leave short messages for each other beside the data: see board.py."""

    def agree(self, key: str, what: str, text: str) -> None:
        """Raise MismatchError on every worker unless all of them say the same text."""

    def pulse(self, lane: str, op: int, label: str, waited_s: float) -> None:
        """Called now and then by a blocked worker: raise if there is nothing left to wait for."""

    def clear(self) -> None:
        """The wait that `pulse` has told of is over."""

    def lost(self, label: str, error: Exception) -> PeerError:
        """A connection broke: find out who is gone."""
