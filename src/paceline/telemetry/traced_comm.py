"""A lane that keeps a span of every operation: from the moment it leaves until its result has landed.

[Note: landed] When an operation ends, gloo's own thread says so: the time is taken there, and not when the result is
asked for. An operation on a GPU is asked every half millisecond, by a thread that has nothing else to do. An operation
that can do neither ends where it is waited for.

A lane is handed vectors and does not know what they are of. The pipeline tells the tape what the coroutine that it
resumes is about (`Tape.about`); an operation that is about no bucket (a vote, a loader's weights) has none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor

from paceline.comm.protocol import Comm, Handle
from paceline.telemetry.tape import Span, Tape

_POLL_S = 0.0005


class TracedComm:
    """A Comm around another one, whose operations it keeps on a tape. Whatever else the other has is asked of it."""

    def __init__(self, comm: Comm, tape: Tape) -> None:
        self._comm, self.tape = comm, tape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def mean(self, x: Tensor) -> Handle:
        return self._traced("mean", x, lambda: self._comm.mean(x))

    def sum(self, x: Tensor) -> Handle:
        return self._traced("sum", x, lambda: self._comm.sum(x))

    def all_gather(self, x: Tensor) -> Handle:
        return self._traced("all_gather", x, lambda: self._comm.all_gather(x))

    def reduce_scatter_mean(self, x: Tensor) -> Handle:
        return self._traced("reduce_scatter_mean", x, lambda: self._comm.reduce_scatter_mean(x))

    def all_to_all(self, x: Tensor) -> Handle:
        return self._traced("all_to_all", x, lambda: self._comm.all_to_all(x))

    def swap(self, x: Tensor, peer: int) -> Handle:
        return self._traced("swap", x, lambda: self._comm.swap(x, peer))

    def shift(self, x: Tensor, by: int) -> Handle:
        return self._traced("shift", x, lambda: self._comm.shift(x, by))

    def broadcast(self, x: Tensor, root: int = 0) -> Handle:
        return self._traced("broadcast", x, lambda: self._comm.broadcast(x, root))

    def _traced(self, op: str, x: Tensor, start: Callable[[], Handle]) -> Handle:
        if not self.tape.running:
            return start()
        began, before = time.monotonic(), self._comm.sent
        handle = start()
        span = Span(self._comm.name, op, self.tape.step, began, sent=self._comm.sent - before)
        self.tape.label(span)
        self.tape.add(span)
        if handle.notify(lambda: landed(span)):
            return handle
        if x.is_cuda:
            _poller.follow(handle.done, span)
            return handle
        return _Waited(handle, span)


class _Waited:
    """A handle whose span ends where it is waited for."""

    def __init__(self, handle: Handle, span: Span) -> None:
        self._handle, self._span = handle, span
        self.done, self.notify = handle.done, handle.notify

    def wait(self) -> Tensor:
        result = self._handle.wait()
        landed(self._span)
        return result

    def __await__(self) -> Generator[Any, None, Tensor]:
        result = yield from self._handle.__await__()
        landed(self._span)
        return result


def landed(span: Span) -> None:
    """The operation has ended now, if it was not known to have ended before."""
    span.end = span.end or time.monotonic()


class _Poller:
    """Asks whether operations have ended, as long as there are any."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Callable[[], bool], Span]] = []
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, done: Callable[[], bool], span: Span) -> None:
        self._under_way.append((done, span))
        self._some.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._some.wait():
            self._some.clear()
            while self._under_way:
                for done, span in list(self._under_way):
                    if done():
                        landed(span)
                        self._under_way.remove((done, span))
                time.sleep(_POLL_S)


_poller = _Poller()
