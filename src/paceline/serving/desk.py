"""What a worker may ask of a server, and how it waits for the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import msgspec
from torch import Tensor

from paceline.serving.server import Gone, Reading, Remembered, Server, Spec, Terms
from paceline.waiting import SLICE_S


class Code(IntEnum):
    """What a message is: of a worker, then of a server."""

    BEGIN, PUSH, PULL, SETTLE, SAVE = range(5)
    WEIGHTS, SAVED, GONE, FAILED = range(10, 14)


class Message(NamedTuple):
    """a, b: WEIGHTS: the version, and how many updates were missed. GONE: the worker."""

    code: int
    a: int = 0
    b: int = 0
    note: bytes = b""
    x: Tensor | None = None


class Beginning(msgspec.Struct):
    """The note of BEGIN; its vector is the weights, then what is remembered."""

    spec: Spec
    remembered: Remembered | None = None


class Desk:
    """A server, and the workers that wait at it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.server: Server | None = None
        self.failure = ""
        self._terms: dict[int, Terms] = {}
        self._early: set[int] = set()  # left before it began

    def ask(self, worker: int, m: Message, pulse: Callable[[], None] = lambda: None) -> Message | None:
        """The answer, if it is a question, as soon as there is one."""
        with self.changed:
            while True:
                try:
                    done, answer = self._answer(worker, m)
                except Exception as error:  # whatever it is, the workers are told
                    self.failure = self.failure or f"{type(error).__name__}: {error}"
                    done, answer = True, self._failed()
                if done:
                    self.changed.notify_all()
                    return answer if m.code >= Code.PULL else None
                self.changed.wait(SLICE_S)
                pulse()

    def _failed(self) -> Message:
        return Message(Code.FAILED, note=self.failure.encode())

    def _answer(self, worker: int, m: Message) -> tuple[bool, Message | None]:
        if self.failure:
            return True, self._failed()
        if m.code == Code.BEGIN:
            self._begin(m)
            return True, None
        if self.server is None:
            return False, None
        if m.code == Code.PUSH:
            if m.note:
                self._terms[worker] = msgspec.json.decode(m.note, type=Terms)
            self.server.push(worker, m.x, self._terms[worker])
            return True, None
        if m.code == Code.SAVE:
            remembered, vectors = self.server.save()
            return True, Message(Code.SAVED, note=msgspec.json.encode(remembered), x=vectors)
        answer = self.server.pull(worker, settles=m.code == Code.SETTLE)
        if isinstance(answer, Reading):
            return True, Message(Code.WEIGHTS, answer.version, answer.missed, x=answer.weights)
        return isinstance(answer, Gone), answer and Message(Code.GONE, answer.worker, note=answer.what.encode())

    def _begin(self, m: Message) -> None:
        beginning = msgspec.json.decode(m.note, type=Beginning)
        assert m.x is not None
        n = m.x.numel() - m.a
        self.server = Server(beginning.spec, m.x[:n].clone())
        if beginning.remembered is not None:
            self.server.load(beginning.remembered, m.x[n:])
        for worker in self._early:
            self.server.leave(worker)

    def leave(self, worker: int) -> None:
        with self.changed:
            self._early.add(worker)
            if self.server is not None:
                self.server.leave(worker)
            self.changed.notify_all()
