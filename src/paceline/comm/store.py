"""The store that a job's workers meet in, as a process that uses it has it. Every call has a deadline.

[Note: one connection] A process has one connection, whose own thread reads the answers. Requests of several threads are
under way at a time, and one that waits keeps no other waiting. If the connection ends, or the store does not answer in
time, every call raises StoreLostError, those that wait included.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from paceline.comm.credentials import JOB, NONCE, Credentials, read_secret
from paceline.comm.frames import LONGEST_GREETING, Code, Frame, FrameError, joined, number, pack, parse, split
from paceline.comm.store_address import STORE, StoreAddress, same_user
from paceline.errors import MismatchError, PeerError, PeerTimeoutError, plain

ANSWER_S = 15.0  # within which the store answers whatever need not wait
_GREETING_S = 8.0  # longer than the server gives its clients
_PATIENT_S = 5.0  # after this a process that waits for the store says so
_AT_ONCE = 1 << 20  # bytes


class StoreLostError(PeerError):
    """The process that serves the store is gone, so workers cannot exchange messages any more."""


class Answer:
    """What the store answers to a request, once it does."""

    def __init__(self, connection: StoreConnection, what: str, seconds: float) -> None:
        self._connection, self._what = connection, what
        self._until = time.monotonic() + seconds
        self.frame: Frame | None = None

    @property
    def has_come(self) -> bool:
        """Whether `fields` returns, or raises, at once."""
        return self.frame is not None or self._connection.lost is not None

    def fields(self) -> tuple[bytes, ...] | None:
        """Wait for the answer, and return it; None if what was waited for did not happen in time."""
        if not self._connection.wait_for(self, seconds=self._until - time.monotonic()):
            self._connection.end(f"no answer to {self._what} within {ANSWER_S:g} s")
        if self.frame is None:
            raise self._connection.error()
        if self.frame.code == Code.REFUSED:
            why = b" ".join(self.frame.fields).decode(errors="replace")
            raise StoreLostError(f"the store refuses {self._what}", why=plain(why)[:300])
        return None if self.frame.code == Code.LATE else self.frame.fields

    def partial(self) -> tuple[bytes, ...]:
        """The fields of an answer that came too late for all of them."""
        self.fields()
        return self.frame.fields if self.frame is not None else ()


class StoreConnection:
    """This process's connection to a job's store: [Note: one connection].

    told: what the server tells everybody whom it lets in.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: StoreAddress,
        credentials: Credentials,
        told: dict[str, Any],
        unread: bytes = b"",
    ) -> None:
        self.address, self.credentials, self.told = address, credentials, told
        self.lost: str | None = None
        self.alarm: Answer | None = None  # comes when there is nothing left to wait for: board.py
        self._sock, self._read = sock, bytearray(unread)
        self._numbers = itertools.count(1)
        self._pending: dict[int, Answer] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        sock.setblocking(False)
        _open.add(self)
        self._thread = threading.Thread(target=self._run, name="store answers", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        address: StoreAddress,
        credentials: Credentials,
        who: str,
        seconds: float,
        *,
        given_up: Callable[[], bool] = lambda: False,
    ) -> StoreConnection:
        """Connect, and wait until the store is served if it is not yet. given_up: asked now and then meanwhile."""
        began, told, pause = time.monotonic(), False, 0.01
        while True:
            left = began + seconds - time.monotonic()
            try:
                sock = address.connect(max(0.1, min(left, 5.0)))
                with contextlib.ExitStack() as undo:
                    undo.callback(sock.close)
                    found = _greet(sock, address, credentials, who)
                    undo.pop_all()
                return cls(sock, address, credentials, *found)
            except OSError as error:  # it is not served yet, or its host does not answer
                why = error.strerror or str(error)
            if left <= 0 or given_up():
                raise PeerTimeoutError(
                    f"{who} cannot reach the store at {address}",
                    why=f"{why}, for {time.monotonic() - began:.0f} s",
                    do="see that worker 0 or the launcher of the first host runs, that MASTER_ADDR and MASTER_PORT (or "
                    "--hosts and --port) are its own, and that no firewall is between them",
                    worker=0,
                )
            if not told and time.monotonic() - began > _PATIENT_S:
                told = True
                print(f"paceline: {who} waits for the store at {address}: {why}", file=sys.stderr, flush=True)
            time.sleep(pause := min(2 * pause, 0.2))

    @classmethod
    def invited(cls, who: str, seconds: float) -> StoreConnection:
        """The connection of a process that one of the job's has started, with what `invitation` gave it."""
        credentials = Credentials(os.environ.get(JOB, ""), read_secret())
        return cls.open(StoreAddress.parse(os.environ.get(STORE, "")), credentials, who, seconds)

    def invitation(self) -> dict[str, str]:
        """The environment of a process that is to meet the others in this store."""
        return {STORE: str(self.address), **self.credentials.variables()}

    # ------------------------------------------------------------------------------------------------ requests

    def ask(self, code: Code, *fields: bytes, seconds: float = 0.0) -> Answer:
        """Send a request. seconds: how long the store may wait before it answers."""
        answer = Answer(self, code.name.lower(), seconds + ANSWER_S)
        number_ = next(self._numbers) & 0xFFFFFFFF
        with self._changed:
            if self.lost is not None:
                raise self.error()
            self._pending[number_] = answer
        try:
            self._send(pack(number_, code, fields))
        except OSError as error:
            self.end(error.strerror or str(error))
        except FrameError as error:
            with self._changed:
                del self._pending[number_]
            raise StoreLostError(f"the store cannot take {code.name.lower()}", why=str(error)) from None
        return answer

    def wait_for(self, *answers: Answer, seconds: float) -> bool:
        """Wait until one of the answers has come, but not longer than that; whether one has."""
        with self._changed:
            return self._changed.wait_for(lambda: any(one.has_come for one in answers), max(0.0, seconds))

    def error(self) -> StoreLostError:
        """Why there are no answers any more."""
        server = self.told.get("served_by")
        who = "the launcher of the first host" if server == "launcher" else f"worker {server}"
        return StoreLostError(
            "the store does not answer any more",
            why=f"{self.lost}; {who} serves it, at {self.address}",
            do=f"look at the output of {who}: it ended, was stopped, or its host or the link to it is gone",
            worker=server if isinstance(server, int) else None,
        )

    def end(self, why: str = "this process has closed its connection") -> None:
        """Close the connection: whoever waits for an answer gets an error."""
        with self._changed:
            self.lost = self.lost or why
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def forget_fork(self) -> None:
        """Called in a child of this process: it must neither use the connection nor keep it open."""
        self.lost = "this process was forked from the one that is connected"
        self._sock.close()

    # ------------------------------------------------------------------------------------------------ the wire

    def _send(self, data: bytes) -> None:
        until = time.monotonic() + ANSWER_S
        view = memoryview(data)
        with self._sending:
            while view:
                try:
                    view = view[self._sock.send(view) :]
                except BlockingIOError:
                    _ready(self._sock, select.POLLOUT, until)

    def _run(self) -> None:
        try:
            while True:
                _ready(self._sock, select.POLLIN, None)
                with contextlib.suppress(BlockingIOError):
                    some = self._sock.recv(_AT_ONCE)
                    if not some:
                        raise OSError(0, "its process closed the connection")
                    self._read += some
                    self._take()
        except (OSError, ValueError) as error:  # FrameError is a ValueError
            self.end(getattr(error, "strerror", None) or str(error))
        finally:
            with self._sending:
                self._sock.close()

    def _take(self) -> None:
        """Hand out the answers that have come whole."""
        done = 0
        with memoryview(self._read) as view, self._changed:
            while (found := parse(view[done:])) is not None:
                frame, size = found
                done += size
                if (answer := self._pending.pop(frame.number, None)) is not None:
                    answer.frame = frame
            self._changed.notify_all()
        del self._read[:done]


class Store:
    """The keys of the store below a prefix, by way of one connection. Values are texts or bytes."""

    def __init__(self, connection: StoreConnection, prefix: str = "") -> None:
        self.connection, self.prefix = connection, prefix

    def under(self, prefix: str) -> Store:
        """The keys below another prefix, inside of this one."""
        return Store(self.connection, f"{self.prefix}{prefix}/")

    @property
    def root(self) -> Store:
        """The store without any prefix."""
        return Store(self.connection)

    def set(self, key: str, value: str | bytes) -> None:
        _answered(self.begin_set(key, value))

    def begin_set(self, key: str, value: str | bytes) -> Answer:
        """Set a key without waiting for the answer; what is asked for later finds it set."""
        return self.connection.ask(Code.SET, self._key(key), _bytes(value))

    def get(self, key: str, seconds: float = 0.0) -> bytes | None:
        """The value of a key, as soon as it is set; None if it is not within that time."""
        values = self.when_all([key], seconds).fields()
        return split(values[0])[0] if values else None

    def check(self, *keys: str) -> bool:
        """Whether all these keys are set."""
        return _answered(self.connection.ask(Code.CHECK, self._keys(keys))) == (b"1",)

    def add(self, key: str, more: int) -> int:
        """Add to a number, and return its new value. What is not set is 0."""
        return int(_answered(self.connection.ask(Code.ADD, self._key(key), number(more)))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key to `desired` if its value is `expected`, or if it is not set and nothing is; its value then."""
        ask = self.connection.ask(Code.COMPARE_SET, self._key(key), _bytes(expected), _bytes(desired))
        return _answered(ask)[0]

    def delete(self, *keys: str) -> int:
        """Delete keys; how many of them there were."""
        return int(_answered(self.connection.ask(Code.DELETE, self._keys(keys)))[0])

    def count_keys(self) -> int:
        """How many keys the store has, under any prefix."""
        return int(_answered(self.connection.ask(Code.COUNT_KEYS))[0])

    def collected(self, prefix: str, count: int) -> dict[int, bytes]:
        """The values of prefix/0 to prefix/(count - 1) that are set by now, by their number."""
        answer = self.collect(prefix, count, 0.0)
        if (fields := answer.fields()) is not None:
            return dict(enumerate(split(fields[0])))
        return {i: value[1:] for i, value in enumerate(split(answer.partial()[0])) if value}

    def collect(self, prefix: str, count: int, seconds: float) -> Answer:
        """Ask for the values of prefix/0 to prefix/(count - 1), all in one field, as soon as all are set."""
        key = self._key(prefix)
        return self.connection.ask(Code.COLLECT, number(int(seconds * 1000)), key, number(count), seconds=seconds)

    def when_all(self, keys: Sequence[str], seconds: float) -> Answer:
        """Ask for the values of all these keys, in one field, as soon as all are set."""
        return self.connection.ask(Code.GET, number(int(seconds * 1000)), self._keys(keys), seconds=seconds)

    def when_any(self, keys: Sequence[str], seconds: float) -> Answer:
        """Ask for the first of these keys that is set, and its value, as soon as one is."""
        return self.connection.ask(Code.FIRST_OF, number(int(seconds * 1000)), self._keys(keys), seconds=seconds)

    def leave_will(self, key: str, value: str | bytes) -> None:
        """Have a key set if this process ends without a word, unless it is set by then."""
        _answered(self.connection.ask(Code.WILL, self._key(key), _bytes(value)))

    def take_back_will(self) -> None:
        """This process ends well, or will not be missed."""
        _answered(self.connection.ask(Code.WILL, b"", b""))

    def _key(self, key: str) -> bytes:
        return f"{self.prefix}{key}".encode()

    def _keys(self, keys: Sequence[str]) -> bytes:
        return joined([self._key(key) for key in keys])


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _answered(answer: Answer) -> tuple[bytes, ...]:
    return answer.fields() or ()


# ---------------------------------------------------------------------------------------------------- the greeting


def _greet(
    sock: socket.socket, address: StoreAddress, credentials: Credentials, who: str
) -> tuple[dict[str, Any], bytes]:
    """Prove to each other that this is the job's store and its client: [Note: greeting] in credentials.py."""
    until = time.monotonic() + _GREETING_S
    if not same_user(sock):
        raise _foreign(address, "it belongs to another user")
    sock.setblocking(False)
    nonce, data = secrets.token_bytes(NONCE), bytearray()
    challenge = _next(sock, data, address, until)
    if challenge.code != Code.HELLO or len(challenge.fields) != 1 or len(challenge.fields[0]) != NONCE:
        raise _foreign(address, "it greets in another way")
    sock.send(credentials.hello(challenge.fields[0], nonce, who))
    try:
        answer = _next(sock, data, address, until)
        told = credentials.check_welcome(answer, challenge.fields[0], nonce, f"the store at {address}")
    except ValueError as error:
        raise _foreign(address, str(error)) from None
    return told, bytes(data)


def _next(sock: socket.socket, data: bytearray, address: StoreAddress, until: float) -> Frame:
    """The next frame of somebody who has proved nothing yet."""
    while True:
        try:
            found = parse(data, LONGEST_GREETING)
        except FrameError:
            raise _foreign(address, f"it sent {bytes(data[:40])!r}") from None
        if found is not None:
            del data[: found[1]]
            return found[0]
        if not _ready(sock, select.POLLIN, until, raises=False):
            raise _foreign(address, f"it says nothing{' more' if data else ''} within {_GREETING_S:g} s")
        with contextlib.suppress(BlockingIOError):
            some = sock.recv(LONGEST_GREETING)
            if not some:
                raise OSError(0, "it closes the connection before it has greeted")
            data += some


def _foreign(address: StoreAddress, why: str) -> MismatchError:
    return MismatchError(
        f"the process that listens at {address} is not the store of a job of Paceline",
        why=plain(why),
        do="choose another port (--port, or MASTER_PORT on every worker), and see what listens there: ss -ltnp",
    )


def _ready(sock: socket.socket, events: int, until: float | None, *, raises: bool = True) -> bool:
    """Wait until the socket can be read or written."""
    poll = select.poll()
    poll.register(sock, events)
    ready = bool(poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000))
    if raises and not ready:
        raise OSError(0, f"it takes no request within {ANSWER_S:g} s")
    return ready


_open: weakref.WeakSet[StoreConnection] = weakref.WeakSet()


def _forget_forks() -> None:
    for connection in list(_open):
        connection.forget_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_forks)
