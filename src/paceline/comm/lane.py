"""The base of every lane between processes: counted bytes, compared operations, and waits that notice failures.

A lane is a Comm whose operations are ordered among themselves and independent of all other lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from paceline.comm.protocol import Board
from paceline.comm.waiting import until

NARROW = (torch.float16, torch.bfloat16)


def _cannot_tell(call: Callable[[], None]) -> bool:
    return False


class Op:
    """A Handle. Awaiting it yields it to the driver, which resumes the coroutines in a fixed order."""

    def __init__(
        self,
        wait: Callable[[], Tensor],
        done: Callable[[], bool] = lambda: True,
        notify: Callable[[Callable[[], None]], bool] = _cannot_tell,
    ) -> None:
        self._wait, self.done, self.notify = wait, done, notify

    def wait(self) -> Tensor:
        return self._wait()

    def __await__(self) -> Generator[Op, None, Tensor]:
        yield self
        return self.wait()


def payload(x: Tensor) -> int:
    """The bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def signature(op: str, x: Tensor) -> str:
    """An operation with its operand's type and shape as text, to be compared between workers."""
    return f"{op} of {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class Lane:
    """The base of all lanes between processes. Operations are ordered within a lane, and independent between lanes."""

    def __init__(self, rank: int, world_size: int, *, name: str, board: Board) -> None:
        self.rank, self.world_size, self.name, self.board = rank, world_size, name, board
        self.sent = self.ops = 0
        self._seen: set[str] = set()

    def agree(self, what: str, text: str) -> None:
        self.board.agree(self.name, what, text)

    def _start(self, op: str, x: Tensor, sends: int) -> str:
        """Count an operation; before the first of its kind, check that all workers start the same one.

        Without this check, two different sizes in one operation of gloo end a process by SIGABRT, and not always the
        worker that was wrong.
        """
        what = signature(op, x)
        if what not in self._seen:
            self.agree(f"operation {self.ops} of lane {self.name}", what)
            self._seen.add(what)
        self.sent += sends
        self.ops += 1
        return f"{op} #{self.ops - 1} of lane {self.name}"

    def _op(self, label: str, out: Tensor, *works: Any) -> Op:
        number = self.ops - 1

        def wait() -> Tensor:
            for work in works:
                until(work, self.board, self.name, number, label, blocking=not out.is_cuda)
            return out

        def notify(call: Callable[[], None]) -> bool:
            if out.is_cuda:
                return False
            try:
                works[-1].get_future().add_done_callback(lambda _: call())
            except RuntimeError:  # this kind of work has no future
                return False
            return True

        return Op(wait, lambda: all(work.is_completed() for work in works), notify)
