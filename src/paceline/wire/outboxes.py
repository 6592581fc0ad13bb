"""What the workers of one host write for each other: an outbox each, in one shared mapping, and bells between them.

[Note: rounds] Whatever they do together is a number of rounds. In a round a worker writes into its outbox, rings for
everybody, waits until everybody has rung for it, and reads the others' outboxes. An outbox has two sides, used in
turn. Who rings for round k + 1 has read all it wanted of round k; so once all have rung for k + 1, the side of round k
is free for k + 2, and ringing once a round is all the agreement there is.

[Note: bells] A bell is a POSIX semaphore in the mapping, one for each ringer and listener. Who waits sleeps in the
kernel and takes no time from a worker that computes, and what was written before a ring is seen after it on any
processor. (A pipe would do too, but its reader is woken on the writer's core: the two then work one after the other.)
The sleep is short, so that the end of a process that will never ring is seen soon.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline import sharing
from paceline.waiting import EndedError

Bytes = NDArray[np.uint8]

SIDE = 1 << 20  # bytes of one side of an outbox
_LABEL = 256  # bytes before each side, which say what is in it
_BELL = 64  # bytes, of which the semaphore takes half: each has a cache line of its own
_SLEEP_S = 0.1


class Meeting(Protocol):
    """What is asked of a board (membership/board.py): where workers find each other before there are bells."""

    rank: int

    def write(self, key: str, value: Any) -> None: ...
    def wait_for_all(self, key: str, what: str) -> dict[int, Any]: ...


class Outboxes:
    """[Note: rounds]. Members are numbered from 0 on this host; `workers` are their ranks in the world."""

    def __init__(self, memory: mmap.mmap, workers: Sequence[int], me: int) -> None:
        self.workers, self.me, self.count = workers, me, len(workers)
        self.others = [r for r in range(self.count) if r != me]
        self.round = 0
        whole: Bytes = np.frombuffer(memory, np.uint8)
        bells = _BELL * self.count**2
        self._bells = Bells(whole[:bells], self.count)
        self._sides = whole[bells:].reshape(self.count, 2, _LABEL + SIDE)
        self._poll = select.poll()
        self._processes: dict[int, int] = {}  # pidfd -> member

    @staticmethod
    def size(count: int) -> int:
        return _BELL * count**2 + count * 2 * (_LABEL + SIDE)

    def hang_bells(self) -> None:
        """Once, before anybody else maps the memory."""
        self._bells.hang()

    def watch(self, pidfd: int, member: int) -> None:
        self._processes[pidfd] = member
        self._poll.register(pidfd, select.POLLIN)

    def side(self, member: int) -> Bytes:
        """A member's outbox of this round. One's own may be written until `meet`, the others' read after it."""
        return self._sides[member, self.round % 2, _LABEL:]

    def label(self, text: str) -> None:
        """Say in one's own outbox what it is for."""
        self._label(self.me)[:] = np.frombuffer(text.encode()[:_LABEL].ljust(_LABEL), np.uint8)

    def labels(self) -> list[str]:
        return [self._label(member).tobytes().decode(errors="replace").rstrip() for member in range(self.count)]

    def _label(self, member: int) -> Bytes:
        return self._sides[member, self.round % 2, :_LABEL]

    def meet(self, look: Callable[[], None]) -> None:
        """Ring, and wait until all have rung. `look` raises where there is nothing to wait for any more."""
        for r in self.others:
            self._bells.ring(self.me, r)
        for r in self.others:
            while not self._bells.heard(r, self.me):
                self._check_alive(r)
                look()

    def turn(self) -> None:
        """All that was wanted of this round is read."""
        self.round += 1

    def _check_alive(self, member: int) -> None:
        ended = [self._processes[fd] for fd, _ in self._poll.poll(0)]
        # One that rang and then ended has done its part.
        if member in ended and not self._bells.heard(member, self.me):
            raise EndedError(self.workers[member])


class Bells:
    """[Note: bells]"""

    def __init__(self, memory: Bytes, count: int) -> None:
        self._memory, self._count = memory, count
        base = memory.ctypes.data
        self._at = [[base + _BELL * (ringer * count + r) for r in range(count)] for ringer in range(count)]

    def hang(self) -> None:
        for row in self._at:
            for bell in row:
                _libc.sem_init(bell, 1, 0)

    def ring(self, ringer: int, listener: int) -> None:
        _libc.sem_post(self._at[ringer][listener])

    def heard(self, ringer: int, listener: int) -> bool:
        """Within a short sleep."""
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(_SLEEP_S * 1e9)
        spec = _Time(*divmod(until, 10**9))
        while _libc.sem_clockwait(self._at[ringer][listener], time.CLOCK_MONOTONIC, ctypes.byref(spec)):
            if ctypes.get_errno() != errno.EINTR:
                return False
        return True


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _semaphores() -> ctypes.CDLL | None:
    """The C library's, where it has those that wait by the monotonic clock (glibc 2.30)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        libc.sem_post.argtypes = (ctypes.c_void_p,)
        libc.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time))
    except (OSError, AttributeError):
        return None
    return libc


_libc: Any = _semaphores()


def open_outboxes(board: Meeting, key: str, workers: Sequence[int]) -> Outboxes | str:
    """The outboxes of these workers, me among them, or the reason why somebody cannot have them: all get them or none
    does. Every worker of the world calls it at the same point; other hosts' are other mappings.
    """
    first, fd, nbytes = workers[0] == board.rank, -1, Outboxes.size(len(workers))
    made, why = None, "" if _able() else "it takes Linux 5.3 and glibc 2.30"
    if first and not why:
        fd = sharing.make(nbytes)
        Outboxes(mmap.mmap(fd, nbytes), workers, 0).hang_bells()
    board.write(f"{key}/seat/{board.rank}", [os.getpid(), fd])
    seats = board.wait_for_all(f"{key}/seat", "a seat in shared memory") | {board.rank: [os.getpid(), fd]}
    try:
        if not why:
            made = _sit(workers, workers.index(board.rank), [seats[r] for r in workers], nbytes)
    except OSError as error:
        why = f"worker {board.rank}: {error}"
    board.write(f"{key}/able/{board.rank}", why)
    reasons = board.wait_for_all(f"{key}/able", "shared memory")
    if fd >= 0:
        os.close(fd)  # by now all have mapped it who could
    return next(filter(None, [why, *reasons.values()]), made or "")


def _able() -> bool:
    return _libc is not None and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")


def _sit(workers: Sequence[int], me: int, seats: Sequence[Any], nbytes: int) -> Outboxes:
    fd = sharing.attach(*seats[0])
    try:
        boxes = Outboxes(mmap.mmap(fd, nbytes), workers, me)
    finally:
        os.close(fd)
    for r in boxes.others:
        boxes.watch(os.pidfd_open(seats[r][0]), r)
    return boxes
