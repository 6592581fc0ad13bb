"""A lane that keeps a span of every operation: from the moment it leaves until its result has landed.

[Note: landed] When an operation ends, gloo's own thread says so: the time is taken there, and not when somebody asks.
An operation on a GPU is asked every half millisecond, by a thread that has nothing else to do. gloo's reduce-scatter
tells nobody, and ends where it is waited for.

[Note: whose bytes] A lane is handed vectors and does not know what they are of. But by the contracts in parts.py the
bucket in hand is called `b`, in a coroutine that was given it or in a part's own method. So the nearest such caller is
looked for, as a debugger would. An operation that is about no bucket (a vote, a loader's weights) has none.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from torch import Tensor

from paceline.bucket import Bucket
from paceline.comm import Lane, Op, payload
from paceline.membership.board import StoreBoard
from paceline.parts import Part
from paceline.serving.comm import Pair
from paceline.trace.tape import Span, Tape

L = TypeVar("L", bound=Lane)

_POLL_S = 0.0005


class TracedLane(Lane):
    """What `traced` makes of a lane."""

    tape: Tape

    def _start(self, op: str, x: Tensor, sends: int) -> str:
        label = super()._start(op, x, sends)
        b = bucket_in_hand(sys._getframe(1)) if self.tape.running else None
        self._leaving = Span(self.name, op, self.tape.step, time.monotonic(), sent=sends)
        if b is not None:
            slots = b.whole.slots
            self._leaving.bucket, self._leaving.first, self._leaving.last = b.whole.index, slots[0].name, slots[-1].name
        return label

    def _op(self, label: str, out: Tensor, *works: Any) -> Op:
        op = super()._op(label, out, *works)
        return self._followed(op, out, works[-1]) if self.tape.running else op

    def _followed(self, op: Op, out: Tensor, work: Any) -> Op:
        """[Note: landed]"""
        span = self.tape.add(self._leaving)
        if out.is_cuda:
            _poller.follow(work.is_completed, span)
            return op
        try:
            work.get_future().add_done_callback(lambda _: _landed(span))
        except RuntimeError:  # it has none

            def wait() -> Tensor:
                result = op.wait()
                _landed(span)
                return result

            return Op(wait, op.done)
        return op

    def make_pair(self, store: Any, me: int, deadline_s: float) -> Pair:
        pair = TracedPair(store, me, deadline_s)
        pair.tape, pair.lane = self.tape, f"servers of {self.name}"
        return pair


class TracedPair(Pair):
    """What goes to a server and comes back. Numbers and notes are too short to show."""

    tape: Tape
    lane: str

    def _broadcast(self, x: Tensor, root: int) -> Any:
        mine, began = root == self.me, time.monotonic()
        work = super()._broadcast(x, root)
        if x.is_floating_point():
            sent = payload(x) if mine else 0
            span = self.tape.add(Span(self.lane, "push" if mine else "pull", self.tape.step, began, sent=sent))
            work.get_future().add_done_callback(lambda _: _landed(span))
        return work


def _landed(span: Span) -> None:
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
                        _landed(span)
                        self._under_way.remove((done, span))
                time.sleep(_POLL_S)


_poller = _Poller()


def traced(tape: Tape, make: Callable[[str, StoreBoard, float], L]) -> Callable[[str, StoreBoard, float], L]:
    """What makes the same lanes, with their spans kept on this tape."""

    def create(name: str, board: StoreBoard, deadline_s: float) -> L:
        lane = make(name, board, deadline_s)
        lane.__class__ = type(f"Traced{type(lane).__name__}", (TracedLane, type(lane)), {"tape": tape})
        return lane

    return create


def bucket_in_hand(frame: FrameType | None) -> Bucket | None:
    """[Note: whose bytes]"""
    while frame is not None:
        code = frame.f_code
        if "b" in code.co_varnames:
            given = code.co_flags & inspect.CO_COROUTINE and "b" in code.co_varnames[: code.co_argcount]
            b = frame.f_locals.get("b")
            if isinstance(b, Bucket) and (given or isinstance(frame.f_locals.get("self"), Part)):
                return b
        frame = frame.f_back
    return None
