"""Updates made of the first K gradients to arrive, for workers that do not wait for each other.

[Note: rounds] Update r turns version r of the weights into version r + 1. A worker whose gradient is ready adds itself
to the arrivals of round r (a shared counter); the K-th arrival writes the go signal, with the number of gradients in
the update. A background thread of each worker waits for the signal and then joins the sum of round r: with the
worker's gradient if its place among the arrivals is within that number, else with zeros. So no round waits for a worker
that computes, every worker gets every update, and all apply the same updates in the same order.

A worker counts itself and stores its gradient under a lock that the thread takes too: a worker that was counted in time
is in the sum. Workers that have ended are no longer waited for: K is at most the number that still train.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.errors import PacelineError, PeerError, PeerTimeoutError

_LOOK_S = 0.2  # how often a waiting thread checks whether a worker has failed or ended
_OVER = "over"


class Tally(Protocol):
    """The part of a lane's board that rounds use: StoreBoard in comm/board.py, or Room in comm/threads.py."""

    timeout_s: float

    def count(self, key: str, more: int = 1) -> int: ...
    def first(self, key: str, text: str) -> None: ...
    def seen(self, key: str, seconds: float) -> str | None: ...
    def forget(self, *keys: str) -> None: ...
    def raise_cause(self) -> None: ...


class Update(NamedTuple):
    """The sum of one round."""

    total: Tensor
    mine: bool  # this worker's gradient is in it


class Rounds:
    """One worker's part in all rounds from version 0 to the next consensus: [Note: rounds]."""

    def __init__(self, lane: Comm, stretch: int, k: int, like: Tensor) -> None:
        self.lane, self.k, self.like = lane, k, like
        self.board: Tally = cast(Any, lane).board
        self.key = f"rounds/{cast(Any, lane).name}/{stretch}"
        self.joined = 0  # rounds that this worker's thread has joined
        self._offer: tuple[int, Tensor] | None = None  # place among the arrivals of the open round, gradient
        self._updates: dict[int, Update] = {}  # updates that have arrived and were not taken yet
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=self.key, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ the worker

    def offer(self, r: int, x: Tensor) -> None:
        """Offer a gradient for round r. The update that `take` returns says whether it came in time."""
        with self._changed:
            if self.joined == r:
                self._offer = (self.board.count(f"{self.key}/{r}/arrived"), x)
                self._go_if_enough(r, self._offer[0])

    def take(self, r: int) -> Update:
        """Wait for update r."""
        with self._changed:
            here = lambda: self._error or r in self._updates  # noqa: E731
            if not self._changed.wait_for(here, self.board.timeout_s):
                raise PeerTimeoutError(
                    f"update {r} did not come within {self.board.timeout_s:g} s",
                    why=f"it takes the gradients of {self._enough()} workers, and fewer came",
                    do="look at the others' output, or raise timeout= if a step may really take that long",
                )
            if r not in self._updates:
                assert self._error is not None
                raise self._error
            return self._updates.pop(r)

    def end(self) -> None:
        """Declare that this worker offers no more gradients; its thread still joins every round."""
        with self._changed:
            self.board.count(f"{self.key}/ended")
            self._go_if_enough(self.joined, self.board.count(f"{self.key}/{self.joined}/arrived", 0))

    def close(self, r: int) -> None:
        """Stop the thread once all workers have ended and r is the last version."""
        self.board.first(f"{self.key}/{r}/go", _OVER)
        self._thread.join()

    def _enough(self) -> int:
        return min(self.k, self.lane.world_size - self.board.count(f"{self.key}/ended", 0))

    def _go_if_enough(self, r: int, arrived: int) -> None:
        if arrived and arrived >= self._enough():
            self.board.first(f"{self.key}/{r}/go", str(min(arrived, self.k)))

    # ------------------------------------------------------------------------------------------------ its thread

    def _run(self) -> None:
        try:
            while (go := self._next()) != _OVER:
                self._join(int(go))
        except Exception as error:  # kept for the training thread, which raises it in `take`
            ours = isinstance(error, PacelineError)
            lost = PeerError("the connection to the other workers broke", why=f"{type(error).__name__}: {error}")
            with self._changed:
                self._error = error if ours else lost
                self._changed.notify_all()

    def _next(self) -> str:
        r = self.joined
        while (go := self.board.seen(f"{self.key}/{r}/go", _LOOK_S)) is None:
            self.board.raise_cause()
            self._go_if_enough(r, self.board.count(f"{self.key}/{r}/arrived", 0))
        return go

    def _join(self, go: int) -> None:
        with self._changed:
            r, (place, x) = self.joined, self._offer or (0, self.like)
            self._offer = None
            self.joined += 1
        mine = 0 < place <= go
        total = self.lane.sum(x if mine else torch.zeros_like(self.like)).wait()
        with self._changed:
            self._updates[r] = Update(total, mine)
            self._changed.notify_all()
        if self.lane.rank == 0:  # all have read the signal, and no worker counts itself in a round it has joined
            self.board.forget(f"{self.key}/{r}/arrived", f"{self.key}/{r}/go")
