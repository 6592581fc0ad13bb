"""Operations that go on by themselves: a thread of its own runs a lane's operations, one after the other.

[Note: abandoned] Once a worker has given an operation up, nothing may write into its tensors any more. Every write is
made under a lock, and who gives up says so and then takes the lock: the piece that is being written ends, and no other
is begun. The lane is dead then, on this worker by its word and on the others because it stays silent.

[Note: labels] Outboxes know nothing of what is in them, and another operation's bytes would be taken for one's own. So
each says in its first round which operation it is, of what type and shape, and all read what all have said.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.comm import Op
from paceline.errors import PeerError, differ
from paceline.wire.outboxes import Outboxes

_GRACE_S = 5.0  # who waits for the result knows more, and says it at the deadline


def nothing() -> None:
    pass


class Steps(NamedTuple):
    """One operation: what is waited for before, so many rounds of writing and reading, what is started after."""

    rounds: int
    put: Callable[[int], None]
    take: Callable[[int], None]
    first: Callable[[], object] = nothing
    last: Callable[[], object] = nothing


class Work:
    """An operation under way, to be waited for as for one of gloo's: see waiting.py."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: Exception | None = None
        self._calls: list[Callable[[Any], None]] = []

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the operation is under way")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._over.is_set()

    def get_future(self) -> Work:
        return self

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        """Called with nothing of use, in the thread that ends it."""
        self._calls.append(call)
        if self.is_completed():
            call(self)

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._over.set()
        for call in self._calls:
            call(self)


class Progress:
    """The thread of one lane, and the outboxes it works with."""

    def __init__(self, boxes: Outboxes, name: str, deadline_s: float) -> None:
        self.boxes, self.name, self.deadline_s = boxes, name, deadline_s
        self._tasks: queue.SimpleQueue[tuple[str, Steps, Work]] = queue.SimpleQueue()
        self._dead: Exception | None = None
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"lane {name}", daemon=True)
        self._thread.start()

    def start(self, label: str, steps: Steps) -> Work:
        work = Work()
        self._tasks.put((label, steps, work))
        return work

    def abandon(self, error: Exception) -> None:
        """[Note: abandoned]"""
        self._dead = self._dead or error
        with self._writing:
            pass

    def check(self) -> None:
        """Raise if there is nothing to go on with."""
        if self._dead is not None:
            raise self._dead

    def _run(self) -> None:
        with torch.no_grad(), np.errstate(all="ignore"):  # infinities and NaN are the engine's business
            while True:
                label, steps, work = self._tasks.get()
                try:
                    self._operate(label, steps)
                    work.end()
                except Exception as error:
                    self._dead = self._dead or error
                    work.end(error)
                del steps, work  # and with them the tensors, until the next operation comes

    def _operate(self, label: str, steps: Steps) -> None:
        end = time.monotonic() + self.deadline_s + _GRACE_S

        def look() -> None:
            self.check()
            if time.monotonic() > end:
                raise RuntimeError(f"no end within {self.deadline_s:g} s")

        self.check()
        steps.first()
        for k in range(steps.rounds):
            if k == 0:
                self.boxes.label(label)
            steps.put(k)
            self.boxes.meet(look)
            if k == 0:
                self._compare()
            self._write(steps.take, k)
            self.boxes.turn()
        self._write(steps.last)

    def _compare(self) -> None:
        """[Note: labels]"""
        labels = self.boxes.labels()
        if len(set(labels)) > 1:
            differ(f"lane {self.name}", labels, self.boxes.workers)

    def _write(self, what: Callable[..., object], *args: int) -> None:
        with self._writing:
            self.check()
            what(*args)


def giving_up(op: Op, *lanes: Progress) -> Op:
    """The same operation, with [Note: abandoned]."""

    def wait() -> Tensor:
        try:
            return op.wait()
        except PeerError as error:
            for lane in lanes:
                lane.abandon(error)
            raise

    return Op(wait, op.done)
