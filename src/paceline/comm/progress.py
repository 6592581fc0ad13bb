"""Operations that make progress in the background: each lane has a thread that runs its operations one by one.

[Note: abandoned] Once a worker has given an operation up, nothing may write into its tensors any more. Every write is
made under a lock. A worker that gives up marks the lane as dead and then takes the lock: the write under way ends, and
no other begins. The lane then fails on this worker at once, and on the others because this worker no longer rings.

[Note: labels] An outbox holds plain bytes, and the bytes of another operation would be used without notice. So in its
first round each operation writes its name, type and shape, and every worker compares those of all workers.
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

from paceline.comm.lane import Op
from paceline.comm.outboxes import Outboxes
from paceline.errors import PeerError, differ

_GRACE_S = 5.0  # lets the worker that waits for the result time out first, with a better message


def nothing() -> None:
    pass


class Steps(NamedTuple):
    """One operation: `first` is called before its rounds, `put` and `take` in each of them, `last` after them."""

    rounds: int
    put: Callable[[int], None]
    take: Callable[[int], None]
    first: Callable[[], object] = nothing
    last: Callable[[], object] = nothing


class Work:
    """An operation under way, with the interface of torch.distributed's Work that waiting.py uses."""

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
        """Have `call` called in the thread that ends the operation; its argument is of no use."""
        self._calls.append(call)
        if self.is_completed():
            call(self)

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._over.set()
        for call in self._calls:
            call(self)


class Progress:
    """The thread of one lane, which runs its operations over a set of outboxes."""

    def __init__(self, boxes: Outboxes, name: str, timeout_s: float) -> None:
        self.boxes, self.name, self.timeout_s = boxes, name, timeout_s
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
        """Give the lane up, and return when nothing is written any more: [Note: abandoned]."""
        self._dead = self._dead or error
        with self._writing:
            pass

    def check(self) -> None:
        """Raise if the lane was given up or has failed."""
        if self._dead is not None:
            raise self._dead

    def _run(self) -> None:
        with torch.no_grad(), np.errstate(all="ignore"):  # the engine checks for infinities and NaN
            while True:
                label, steps, work = self._tasks.get()
                try:
                    self._operate(label, steps)
                    work.end()
                except Exception as error:
                    self._dead = self._dead or error
                    work.end(error)
                del steps, work  # they would keep the tensors alive until the next operation

    def _operate(self, label: str, steps: Steps) -> None:
        end = time.monotonic() + self.timeout_s + _GRACE_S

        def look() -> None:
            self.check()
            if time.monotonic() > end:
                raise RuntimeError(f"no end within {self.timeout_s:g} s")

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
        """Raise if the workers are in different operations: [Note: labels]."""
        labels = self.boxes.labels()
        if len(set(labels)) > 1:
            differ(f"lane {self.name}", labels, self.boxes.workers)

    def _write(self, what: Callable[..., object], *args: int) -> None:
        with self._writing:
            self.check()
            what(*args)


def giving_up(op: Op, *lanes: Progress) -> Op:
    """The same operation, which abandons these lanes if waiting for it fails: [Note: abandoned]."""

    def wait() -> Tensor:
        try:
            return op.wait()
        except PeerError as error:
            for lane in lanes:
                lane.abandon(error)
            raise

    return Op(wait, op.done, op.notify)
