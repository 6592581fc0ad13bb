"""Workers as threads of one process: a Comm for tests and for learning, with the same order, checks and byte counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.comm.lane import NARROW, Op, payload, signature
from paceline.errors import PeerError, PeerTimeoutError, differ


class Room:
    """What the threads of one world share. Operation n of each worker is the same operation."""

    def __init__(self, world_size: int, timeout_s: float = 30.0) -> None:
        self.world_size, self.timeout_s = world_size, timeout_s
        self.changed = threading.Condition()
        self.posts: dict[Any, dict[int, tuple[str, Any]]] = {}
        self.error: Exception | None = None
        self.counts: dict[str, int] = {}
        self.words: dict[str, str] = {}

    def post(self, key: Any, rank: int, text: str, value: Any) -> None:
        with self.changed:
            self.posts.setdefault(key, {})[rank] = (text, value)
            self.changed.notify_all()

    def meet(self, key: Any, what: str) -> list[Any]:
        """All workers' values for this key, in rank order; an error if their texts differ or a worker failed."""
        with self.changed:
            here = lambda: self.error or len(self.posts[key]) == self.world_size  # noqa: E731
            if not self.changed.wait_for(here, self.timeout_s):
                missing = sorted(set(range(self.world_size)) - set(self.posts[key]))
                raise PeerTimeoutError(f"{what}: workers {missing} did not come within {self.timeout_s:g} s")
            self.raise_cause()
            posts = self.posts[key]
        differ(what, [posts[r][0] for r in range(self.world_size)])
        return [posts[r][1] for r in range(self.world_size)]

    def fail(self, error: Exception) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    # The same methods as StoreBoard's, for asynchronous workers.

    def raise_cause(self) -> None:
        if self.error:
            raise PeerError("another worker failed", why=str(self.error))

    def count(self, key: str, more: int = 1) -> int:
        with self.changed:
            self.counts[key] = self.counts.get(key, 0) + more
            return self.counts[key]

    def first(self, key: str, text: str) -> None:
        with self.changed:
            self.words.setdefault(key, text)
            self.changed.notify_all()

    def seen(self, key: str, seconds: float) -> str | None:
        with self.changed:
            self.changed.wait_for(lambda: self.error or key in self.words, seconds)
            return self.words.get(key)

    def forget(self, *keys: str) -> None:
        with self.changed:
            for key in keys:
                self.counts.pop(key, None)
                self.words.pop(key, None)


class ThreadComm:
    """The Comm of a worker that is a thread. Sums are made in rank order, so they are bitwise equal on all workers."""

    def __init__(self, room: Room, rank: int, name: str = "") -> None:
        self.room, self.rank, self.world_size, self.name = room, rank, room.world_size, name
        self.board = room
        self.sent = self.ops = self._agreed = 0

    def mean(self, x: Tensor) -> Op:
        return self._op(
            "mean", x, lambda all_: x.copy_(_mean(all_)), 2 * payload(x) * (self.world_size - 1) // self.world_size
        )

    def sum(self, x: Tensor) -> Op:
        return self._op(
            "sum", x, lambda all_: x.copy_(_total(all_)), 2 * payload(x) * (self.world_size - 1) // self.world_size
        )

    def all_gather(self, x: Tensor) -> Op:
        return self._op("all_gather", x, torch.stack, payload(x) * (self.world_size - 1))

    def reduce_scatter_mean(self, x: Tensor) -> Op:
        def mine(all_: list[Tensor]) -> Tensor:
            return _mean(all_).view(self.world_size, -1)[self.rank]

        return self._op("reduce_scatter_mean", x, mine, payload(x) * (self.world_size - 1) // self.world_size)

    def all_to_all(self, x: Tensor) -> Op:
        return self._op(
            "all_to_all",
            x,
            lambda all_: torch.stack([r[self.rank] for r in all_]),
            payload(x) * (self.world_size - 1) // self.world_size,
        )

    def swap(self, x: Tensor, peer: int) -> Op:
        return self._op("swap", x, lambda all_: all_[peer], payload(x))

    def shift(self, x: Tensor, by: int) -> Op:
        source = (self.rank - by) % self.world_size
        return self._op(f"shift by {by}", x, lambda all_: all_[source], payload(x) if by % self.world_size else 0)

    def broadcast(self, x: Tensor, root: int = 0) -> Op:
        return self._op("broadcast", x, lambda all_: x.copy_(all_[root]), payload(x) if self.rank == root else 0)

    def agree(self, what: str, text: str) -> None:
        self._agreed += 1
        key = (self.name, "agree", self._agreed)
        self.room.post(key, self.rank, text, None)
        self.room.meet(key, what)

    def _op(self, op: str, x: Tensor, result: Callable[[list[Tensor]], Tensor], sends: int) -> Op:
        key = (self.name, self.ops)
        self.sent += sends
        self.ops += 1
        self.room.post(key, self.rank, signature(op, x), x.detach().clone())
        return Op(
            lambda: result(self.room.meet(key, f"operation {key[1]} of lane {self.name}")),
            lambda: len(self.room.posts[key]) == self.world_size,
        )


def _total(all_: list[Tensor]) -> Tensor:
    total = all_[0].clone()
    for x in all_[1:]:
        total += x
    return total


def _mean(all_: list[Tensor]) -> Tensor:
    """The mean as DistComm computes it: 16-bit values, whose sum might overflow, are divided before they are added."""
    if all_[0].dtype in NARROW:
        return _total([x / len(all_) for x in all_])
    return _total(all_) / len(all_)
