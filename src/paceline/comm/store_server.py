"""The store that a job's workers meet in, as the process that serves it has it: one thread, and bounds on everything.

[Note: bounds] A stranger may connect, and a worker may have a mistake. So a connection has a short time to greet
(credentials.py), and may send only a greeting until it has; the ones that wait to do so are few, and the oldest makes
room for the next. Frames, keys, values, all of them together, requests that wait and answers that nobody reads are
bounded, too. Whoever breaks a rule is closed, and said once for each address.

[Note: waits] A request that waits is kept under one key that is missing, and looked at again when that key is set. Its
answer leaves at that moment, or at its deadline. No request keeps another from being answered.

[Note: wills] A process that uses the store may leave a will, a key and a value. They are set, if the key is not set
yet, when its connection ends: when it was killed, or its host is gone. A process that ends well takes its will back.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from paceline.comm.credentials import NONCE, Credentials
from paceline.comm.frames import (
    LONGEST,
    LONGEST_GREETING,
    Code,
    Frame,
    FrameError,
    joined,
    number_of,
    pack,
    parse,
    split,
)
from paceline.comm.store_address import notice_cut_link, same_user
from paceline.errors import plain

GREETING_S = 5.0
MOST_STRANGERS = 128  # connections that have not greeted yet
_MOST_CONNECTIONS = 4096  # that have greeted, and keys that one request waits for
_LONGEST_REQUEST = 16 << 20  # bytes
_MOST_BYTES = 256 << 20  # keys and values
_MOST_KEYS = 1 << 20
_LONGEST_KEY = 1 << 10
_MOST_WAITS = 1 << 10  # of one connection
_MOST_UNREAD = 2 * LONGEST  # bytes of answers that one connection has not read
_AT_ONCE = 1 << 18  # bytes read from one connection before the others have their turn
_ACCEPTED_AT_ONCE = 16
_PAUSE_S = 0.02
_LONGEST_WAIT_S = 86400.0
_MOST_TOLD = 1000  # addresses of which something was said


class _FullError(Exception):
    """A bound of the store is reached: [Note: bounds]."""


class _Connection:
    """One process that is connected, or wants to be."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock, self.address = sock, address
        self.challenge = secrets.token_bytes(NONCE)
        self.greeted = self.closed = False
        self.until = time.monotonic() + GREETING_S
        self.read = bytearray()
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.waits: set[_Wait] = set()
        self.will: tuple[bytes, bytes] | None = None


class _Wait:
    """A request that waits for keys: for all of them, or for the first one."""

    def __init__(self, connection: _Connection, frame: Frame, keys: tuple[bytes, ...], until: float) -> None:
        self.connection, self.frame, self.keys, self.until = connection, frame, keys, until
        self.next = 0  # the keys before this one have been seen
        self.under: tuple[bytes, ...] = ()  # the keys under which it is kept


class StoreServer:
    """Serves a store on a listening socket until it is closed. It may be used from any thread.

    say: called with a line about a connection that was refused. note: told to everybody who is let in.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        *,
        say: Callable[[str], None] = lambda line: None,
        note: Mapping[str, Any] | None = None,
    ) -> None:
        self.credentials, self._say, self._note = credentials, say, dict(note or {})
        self._listener = listener
        self._data: dict[bytes, bytes] = {}
        self._bytes = 0
        self._waiting: dict[bytes, set[_Wait]] = {}
        self._deadlines: list[tuple[float, int, _Wait]] = []
        self._count = itertools.count()
        self._strangers: dict[_Connection, None] = {}  # in the order of their arrival
        self._known: set[_Connection] = set()
        self._told: set[str] = set()
        self._over = False
        self._failed = False  # something unforeseen has been told
        self._asleep, self._wake = os.pipe()
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._asleep, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and close every connection."""
        if not self._over:
            self._over = True
            with contextlib.suppress(OSError):
                os.write(self._wake, b".")
            self._thread.join()
            os.close(self._wake)

    def wait_until_left(self, seconds: float) -> None:
        """Wait until nobody but the process that serves the store uses it, but not longer than that."""
        end = time.monotonic() + seconds
        while len(self._known) > 1 and time.monotonic() < end:
            time.sleep(0.01)

    # ------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._over:
                try:
                    self._turn()
                except Exception as error:  # whatever it is, the others' store goes on
                    self._tell_of_failure(error)
                    time.sleep(_PAUSE_S)
        finally:
            for connection in (*self._strangers, *self._known):
                connection.sock.close()
            self._listener.close()
            self._selector.close()
            os.close(self._asleep)

    def _turn(self) -> None:
        """Do what is to be done now, or wait for it."""
        for key, events in self._selector.select(self._pause()):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Connection) and not key.data.closed:
                self._serve(key.data, events)
        self._end_waits()
        self._end_greetings()

    def _tell_of_failure(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            with contextlib.suppress(Exception):
                self._say(f"the store goes on after {type(error).__name__}: {plain(str(error))[:400]}")

    def _pause(self) -> float | None:
        """The seconds until the next deadline."""
        ends = [self._deadlines[0][0]] if self._deadlines else []
        ends += [next(iter(self._strangers)).until] if self._strangers else []
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # The limit of descriptors is reached, say: without a pause this thread would only try again.
                self._close(next(iter(self._strangers), None), "it did not say who it is")
                time.sleep(_PAUSE_S)
                return
            sock.setblocking(False)  # it is not by itself: who does not read its answers would stop this thread
            connection = _Connection(sock, str(address[0]) if isinstance(address, tuple) else "this host")
            if len(self._known) >= _MOST_CONNECTIONS or not same_user(sock):
                self._tell(connection, "it is another user's process" if len(self._known) < _MOST_CONNECTIONS else "")
                sock.close()
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                self._close(next(iter(self._strangers)), "it did not say who it is")
            notice_cut_link(sock)
            self._strangers[connection] = None
            self._selector.register(sock, selectors.EVENT_READ, connection)
            self._send(connection, pack(0, Code.HELLO, [connection.challenge]))

    def _serve(self, connection: _Connection, events: int) -> None:
        """Send what can be sent, read what has come, and do what it asks for."""
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)
        except FrameError as error:
            self._close(connection, f"it sent something else than the store understands ({error})")
        except OSError:
            self._close(connection)
        except Exception as error:  # whatever one connection brings about, the others go on
            self._close(connection, f"the store failed: {type(error).__name__}: {error}")

    def _receive(self, connection: _Connection) -> None:
        try:
            some = connection.sock.recv(_AT_ONCE if connection.greeted else LONGEST_GREETING)
        except (BlockingIOError, InterruptedError):
            return
        if not some:
            self._close(connection)
            return
        connection.read += some
        done = 0
        view = memoryview(connection.read)
        longest = _LONGEST_REQUEST if connection.greeted else LONGEST_GREETING
        while not connection.closed and (found := parse(view[done:], longest)) is not None:
            frame, size = found
            done += size
            if connection.greeted:
                self._answer(connection, frame)
            else:
                self._greet(connection, frame)
        view.release()
        del connection.read[:done]

    def _greet(self, connection: _Connection, frame: Frame) -> None:
        """Let a connection in, or refuse it: [Note: greeting] in credentials.py."""
        why = self.credentials.refusal(frame, connection.challenge)
        if why:
            with contextlib.suppress(OSError):
                connection.sock.send(pack(0, Code.REFUSED, [why.encode()[: LONGEST_GREETING // 2]]))
            self._close(connection, why.replace("\n", "; "))
            return
        connection.greeted = True
        del self._strangers[connection]
        self._known.add(connection)
        self._send(connection, self.credentials.welcome(frame, connection.challenge, self._note))

    def _close(self, connection: _Connection | None, why: str = "") -> None:
        if connection is None or connection.closed:
            return
        connection.closed = True
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._known.discard(connection)
        self._strangers.pop(connection, None)
        for wait in list(connection.waits):
            self._forget(wait)
        if why:
            self._tell(connection, why)
        if connection.will is not None and connection.will[0] not in self._data:
            with contextlib.suppress(_FullError):
                self._set(*connection.will)

    def _tell(self, connection: _Connection, why: str) -> None:
        if why and connection.address not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(connection.address)
            self._say(f"closed a connection from {plain(connection.address)}: {plain(why)[:400]}")

    def _end_greetings(self) -> None:
        while self._strangers and (first := next(iter(self._strangers))).until <= time.monotonic():
            self._close(first, f"it did not say who it is within {GREETING_S:g} s")

    # ------------------------------------------------------------------------------------------------ answers

    def _send(self, connection: _Connection, data: bytes) -> None:
        if connection.closed:
            return
        connection.unsent.append(memoryview(data))
        connection.unsent_bytes += len(data)
        if connection.unsent_bytes > _MOST_UNREAD:
            self._close(connection, "it does not read its answers")
            return
        try:
            self._flush(connection)
        except OSError:
            self._close(connection)

    def _flush(self, connection: _Connection) -> None:
        while connection.unsent:
            first = connection.unsent.popleft()
            try:
                sent = connection.sock.send(first)
            except (BlockingIOError, InterruptedError):
                sent = 0
            connection.unsent_bytes -= sent
            if sent < len(first):
                connection.unsent.appendleft(first[sent:])
                break
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _answer(self, connection: _Connection, frame: Frame) -> None:
        """Do what a request asks for."""
        try:
            answer = _REQUESTS[frame.code](self, connection, frame)
        except KeyError:
            raise FrameError(f"{frame.code.name} is no request") from None
        except ValueError as error:  # of the number or the size of its fields, or of a number
            raise FrameError(f"{frame.code.name} with wrong fields") from error
        except _FullError as error:
            self._send(connection, pack(frame.number, Code.REFUSED, [str(error).encode()]))
            return
        if answer is not None:
            self._send(connection, pack(frame.number, Code.DONE, answer))

    def _put(self, connection: _Connection, frame: Frame) -> list[bytes]:
        key, value = frame.fields
        self._set(key, value)
        return []

    def _get(self, connection: _Connection, frame: Frame) -> None:
        wait, keys = frame.fields
        self._wait(connection, frame, split(keys), _seconds(wait))

    def _collect(self, connection: _Connection, frame: Frame) -> None:
        wait, prefix, count = frame.fields
        n = number_of(count)
        if not 0 <= n <= _MOST_CONNECTIONS:
            raise FrameError(f"{n} values cannot be collected")
        self._wait(connection, frame, tuple(b"%s/%d" % (prefix, i) for i in range(n)), _seconds(wait))

    def _check(self, connection: _Connection, frame: Frame) -> list[bytes]:
        (keys,) = frame.fields
        return [b"1" if all(key in self._data for key in split(keys)) else b"0"]

    def _add(self, connection: _Connection, frame: Frame) -> list[bytes]:
        key, more = frame.fields
        value = str(int(self._data.get(key, b"0")) + number_of(more)).encode()
        self._set(key, value)
        return [value]

    def _compare_set(self, connection: _Connection, frame: Frame) -> list[bytes]:
        key, expected, desired = frame.fields
        held = self._data.get(key)
        if held == expected or (held is None and not expected):
            self._set(key, desired)
            return [desired]
        return [expected if held is None else held]

    def _delete(self, connection: _Connection, frame: Frame) -> list[bytes]:
        (keys,) = frame.fields
        gone = [(key, self._data.pop(key)) for key in split(keys) if key in self._data]
        self._bytes -= sum(len(key) + len(value) for key, value in gone)
        return [b"%d" % len(gone)]

    def _leave_will(self, connection: _Connection, frame: Frame) -> list[bytes]:
        key, value = frame.fields
        connection.will = (key[:_LONGEST_KEY], value[:LONGEST_GREETING]) if key else None
        return []

    def _count_keys(self, connection: _Connection, frame: Frame) -> list[bytes]:
        return [b"%d" % len(self._data)]

    def _set(self, key: bytes, value: bytes) -> None:
        more = len(value) - len(self._data[key]) if key in self._data else len(value) + len(key)
        if self._bytes + more > _MOST_BYTES or len(key) > _LONGEST_KEY or len(self._data) >= _MOST_KEYS:
            raise _FullError(f"the store has no room: it holds {self._bytes} bytes in {len(self._data)} keys")
        self._bytes += more
        self._data[key] = value
        for wait in list(self._waiting.get(key, ())):
            self._look(wait)

    # ------------------------------------------------------------------------------------------------ waits

    def _wait(self, connection: _Connection, frame: Frame, keys: tuple[bytes, ...], seconds: float) -> None:
        if len(keys) > _MOST_CONNECTIONS:
            raise FrameError(f"{len(keys)} keys cannot be waited for")
        wait = _Wait(connection, frame, keys, time.monotonic() + min(seconds, _LONGEST_WAIT_S))
        if len(connection.waits) >= _MOST_WAITS:
            raise _FullError(f"{len(connection.waits)} requests of this process wait already")
        connection.waits.add(wait)
        self._look(wait)
        if wait in connection.waits:
            heapq.heappush(self._deadlines, (wait.until, next(self._count), wait))

    def _look(self, wait: _Wait) -> None:
        """Answer a request if what it waits for is there, or keep it under a key that is missing: [Note: waits]."""
        if wait.frame.code == Code.FIRST_OF:
            there = next((key for key in wait.keys if key in self._data), None)
            if there is None:
                self._keep(wait, wait.keys)
            else:
                self._finish(wait, Code.DONE, [there, self._data[there]])
            return
        while wait.next < len(wait.keys) and wait.keys[wait.next] in self._data:
            wait.next += 1
        if wait.next < len(wait.keys):
            self._keep(wait, (wait.keys[wait.next],))
        elif all(key in self._data for key in wait.keys):
            self._finish(wait, Code.DONE, [joined([self._data[key] for key in wait.keys])])
        else:  # one that was there has been deleted
            wait.next = 0
            self._look(wait)

    def _keep(self, wait: _Wait, under: tuple[bytes, ...]) -> None:
        if wait.under != under:
            self._drop(wait)
            wait.under = under
            for key in under:
                self._waiting.setdefault(key, set()).add(wait)

    def _drop(self, wait: _Wait) -> None:
        for key in wait.under:
            self._waiting[key].discard(wait)
            if not self._waiting[key]:
                del self._waiting[key]
        wait.under = ()

    def _forget(self, wait: _Wait) -> None:
        self._drop(wait)
        wait.connection.waits.discard(wait)

    def _finish(self, wait: _Wait, code: Code, fields: list[bytes]) -> None:
        self._forget(wait)
        try:
            answer = pack(wait.frame.number, code, fields)
        except FrameError as error:
            answer = pack(wait.frame.number, Code.REFUSED, [str(error).encode()])
        self._send(wait.connection, answer)

    def _end_waits(self) -> None:
        """Answer what has waited long enough. A collection is told what is there."""
        while self._deadlines and (self._deadlines[0][0] <= time.monotonic() or self._is_over(self._deadlines[0][2])):
            _, _, wait = heapq.heappop(self._deadlines)
            if not self._is_over(wait):
                there = [b"1" + self._data[key] if key in self._data else b"" for key in wait.keys]
                self._finish(wait, Code.LATE, [joined(there)] if wait.frame.code == Code.COLLECT else [])

    @staticmethod
    def _is_over(wait: _Wait) -> bool:
        return wait not in wait.connection.waits


def _seconds(wait: bytes) -> float:
    return max(0, number_of(wait)) / 1000


_REQUESTS: dict[Code, Callable[[StoreServer, _Connection, Frame], list[bytes] | None]] = {
    Code.SET: StoreServer._put,
    Code.GET: StoreServer._get,
    Code.CHECK: StoreServer._check,
    Code.ADD: StoreServer._add,
    Code.COMPARE_SET: StoreServer._compare_set,
    Code.DELETE: StoreServer._delete,
    Code.COLLECT: StoreServer._collect,
    Code.FIRST_OF: StoreServer._get,
    Code.WILL: StoreServer._leave_will,
    Code.COUNT_KEYS: StoreServer._count_keys,
}
