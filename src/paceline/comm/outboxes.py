"""Shared memory between the workers of one host: each has an outbox that the others read, and semaphores as bells.

[Note: rounds] An operation is a number of rounds. In a round a worker writes into its outbox, rings the bell of every
other worker, waits until every other worker has rung for it, and reads the others' outboxes. An outbox has two sides,
used in turn. A worker rings for round k + 1 only after it has read what it needs of round k. So once all have rung for
k + 1, the side of round k is free for k + 2, and one ring a round is all the synchronization that is needed.

[Note: bells] A bell is a POSIX semaphore in the mapping, one for each pair of ringer and listener. A waiting worker
sleeps in the kernel and takes no time from a worker that computes, and what was written before a ring is visible after
it on any processor. (A pipe would work too, but its reader is woken on the writer's core, and the two then work one
after the other.) The sleep is short, so that the end of a process that will never ring is noticed soon.
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

from paceline.comm import host_memory as sharing
from paceline.comm.waiting import EndedError

Bytes = NDArray[np.uint8]

SIDE = 1 << 20  # bytes of one side of an outbox
_LABEL = 256  # bytes before each side that name the operation
_BELL = 64  # bytes, of which the semaphore takes half: each bell has a cache line of its own
_SLEEP_S = 0.1


class Meeting(Protocol):
    """The part of a board (StoreBoard in board.py) by which workers find each other before there are bells."""

    rank: int

    def write(self, key: str, value: Any) -> None: ...
    def wait_for_all(self, key: str, what: str) -> dict[int, Any]: ...


class Outboxes:
    """The outboxes of one host's workers: [Note: rounds]. Members count from 0; `workers` are their global ranks."""

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
        """Initialise the bells: called once, before any other worker maps the memory."""
        self._bells.hang()

    def watch(self, pidfd: int, member: int) -> None:
        """Watch a member's process, so that its end is noticed while this worker waits for it."""
        self._processes[pidfd] = member
        self._poll.register(pidfd, select.POLLIN)

    def side(self, member: int) -> Bytes:
        """A member's outbox of this round. Write your own before `meet`; read the others' after it."""
        return self._sides[member, self.round % 2, _LABEL:]

    def label(self, text: str) -> None:
        """Write the name of the operation into this worker's own outbox."""
        self._label(self.me)[:] = np.frombuffer(text.encode()[:_LABEL].ljust(_LABEL), np.uint8)

    def labels(self) -> list[str]:
        return [self._label(member).tobytes().decode(errors="replace").rstrip() for member in range(self.count)]

    def _label(self, member: int) -> Bytes:
        return self._sides[member, self.round % 2, :_LABEL]

    def meet(self, look: Callable[[], None]) -> None:
        """Ring for all others, and wait until all have rung. `look` is called in between, and raises to give up."""
        for r in self.others:
            self._bells.ring(self.me, r)
        for r in self.others:
            while not self._bells.heard(r, self.me):
                self._check_alive(r)
                look()

    def turn(self) -> None:
        """Go on to the next round, once this worker has read what it needs of this one."""
        self.round += 1

    def _check_alive(self, member: int) -> None:
        ended = [self._processes[fd] for fd, _ in self._poll.poll(0)]
        # A process that rang before it ended has done its part of this round.
        if member in ended and not self._bells.heard(member, self.me):
            raise EndedError(self.workers[member])


class Bells:
    """The semaphores of all pairs of workers: [Note: bells]."""

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
        """Wait for a ring for a short time, and return whether it came."""
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(_SLEEP_S * 1e9)
        spec = _Time(*divmod(until, 10**9))
        while _libc.sem_clockwait(self._at[ringer][listener], time.CLOCK_MONOTONIC, ctypes.byref(spec)):
            if ctypes.get_errno() != errno.EINTR:
                return False
        return True


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _semaphores() -> ctypes.CDLL | None:
    """The C library, or None if its semaphores cannot wait by the monotonic clock (before glibc 2.30)."""
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
    """The outboxes of this host's workers, or the reason why one of them cannot map them: all get them or none does.

    All workers of all hosts call it at the same point; each host has a mapping of its own.
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
        os.close(fd)  # every worker has mapped it by now, or has failed to
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
