"""Requests to a server from several threads: each waits until the server can answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from paceline.comm.waiting import SLICE_S
from paceline.server.messages import MessageCode, ServerMessage
from paceline.server.server import OptimizerSnapshot, PullResult, PushTerms, Server, ServerSpec, WorkerGone


class BeginNote(msgspec.Struct):
    """The JSON of a BEGIN message, whose vector is the weights followed by the vectors of the optimizer's state."""

    spec: ServerSpec
    remembered: OptimizerSnapshot | None = None


class RequestHandler:
    """A server that several threads may ask at once, one for each worker."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.server: Server | None = None
        self.failure = ""
        self._terms: dict[int, PushTerms] = {}
        self._early: set[int] = set()  # workers that left before BEGIN came

    def ask(self, worker: int, m: ServerMessage, pulse: Callable[[], None] = lambda: None) -> ServerMessage | None:
        """Handle a request, waiting until it can be; the answer of PULL, SETTLE and SAVE, None for the others.

        pulse: called twice a second while it waits; what it raises ends the wait.
        """
        with self.changed:
            while True:
                try:
                    done, answer = self._answer(worker, m)
                except (
                    Exception
                ) as error:  # any error is reported to the workers, since this process has no user to see it
                    self.failure = self.failure or f"{type(error).__name__}: {error}"
                    done, answer = True, self._failed()
                if done:
                    self.changed.notify_all()
                    return answer if m.code >= MessageCode.PULL else None
                self.changed.wait(SLICE_S)
                pulse()

    def _failed(self) -> ServerMessage:
        return ServerMessage(MessageCode.FAILED, note=self.failure.encode())

    def _answer(self, worker: int, m: ServerMessage) -> tuple[bool, ServerMessage | None]:
        """Whether the request could be handled now, and its answer."""
        if self.failure:
            return True, self._failed()
        if m.code == MessageCode.BEGIN:
            self._begin(m)
            return True, None
        if self.server is None:
            return False, None
        if m.code == MessageCode.PUSH:
            if m.note:
                self._terms[worker] = msgspec.json.decode(m.note, type=PushTerms)
            self.server.push(worker, m.x, self._terms[worker])
            return True, None
        if m.code == MessageCode.SAVE:
            remembered, vectors = self.server.save()
            return True, ServerMessage(MessageCode.SAVED, note=msgspec.json.encode(remembered), x=vectors)
        answer = self.server.pull(worker, settles=m.code == MessageCode.SETTLE)
        if isinstance(answer, PullResult):
            return True, ServerMessage(MessageCode.WEIGHTS, answer.version, answer.missed, x=answer.weights)
        if isinstance(answer, WorkerGone):
            return True, ServerMessage(MessageCode.GONE, answer.worker, note=answer.what.encode())
        return False, None

    def _begin(self, m: ServerMessage) -> None:
        beginning = msgspec.json.decode(m.note, type=BeginNote)
        assert m.x is not None
        n = m.x.numel() - m.a
        self.server = Server(beginning.spec, m.x[:n].clone())
        if beginning.remembered is not None:
            self.server.load(beginning.remembered, m.x[n:])
        for worker in self._early:
            self.server.leave(worker)

    def leave(self, worker: int) -> None:
        """The worker's connection has closed."""
        with self.changed:
            self._early.add(worker)
            if self.server is not None:
                self.server.leave(worker)
            self.changed.notify_all()
