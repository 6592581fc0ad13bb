"""State on disk, read and written in the background while the processor computes (ZeRO-Infinity).

[Note: pieces] A stretch is cut into pieces of PIECE bytes that several threads move at a time. Each has a checksum,
taken when it is written and checked when it is read, so a stretch is read as it was written: from the start of a piece
to the end of one. The checksum is the crc32 of the sums of the pages, each the sum of its 64-bit words. It sees a
changed word, a page in another's place and an old piece that was never overwritten, and is taken as fast as memory is
read; a crc32 of all bytes takes five times as long and more than halved what a fast disk does.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.errors import StoreError, UsageError
from paceline.stores.file import PAGE, File, aligned, broken, padded

__all__ = ["PAGE", "PIECE", "Disk", "Speed", "Transfer", "abandon", "aligned", "late", "padded", "speed"]

PIECE = 4 << 20  # bytes; larger ones are not faster
_PROBE, _PROBE_S = 64 * PIECE, 0.3  # `speed` stops at the first of these two
_Move = Callable[[int, memoryview], None]
Then = Callable[[Future[None]], None]


def checksum(view: memoryview) -> int:
    """[Note: pieces]. Of whole pages; numpy lets go of Python's lock meanwhile."""
    words = np.frombuffer(view, np.uint64).reshape(-1, PAGE // 8)
    return zlib.crc32(words.sum(axis=1))


class Transfer(Future[None]):
    """A stretch on its way. `result()` waits for it, and not for ever."""

    def __init__(self, what: str, pieces: int, deadline_s: float, then: Then | None) -> None:
        super().__init__()
        self.what, self.left, self._deadline_s = what, pieces, deadline_s
        self.set_running_or_notify_cancel()  # what the kernel has cannot be called back
        if then is not None:
            self.add_done_callback(then)

    def result(self, timeout: float | None = None) -> None:
        limit = self._deadline_s if timeout is None else timeout
        try:
            super().result(limit)
        except TimeoutError:
            raise late(self.what, limit) from None


class Disk:
    """`size` bytes on disk in `folder`. Stretches of it are read and written by `threads` threads, at most `in_flight`
    at a time: a caller that is faster waits. The first failure ends it, and every later call raises it again.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        *,
        threads: int = 4,
        in_flight: int = 16,
        deadline_s: float = 120.0,
        name: str = "paceline",
    ) -> None:
        if min(size, threads, in_flight) < 1 or deadline_s <= 0:
            raise UsageError(
                f"a disk store of {size} bytes, {threads} threads, {in_flight} in flight, {deadline_s} s",
                why="each of them must be positive",
            )
        self.deadline_s = deadline_s
        self._file = File(folder, padded(size), name)
        self._reserved = 0
        self._sums: dict[int, tuple[int, int]] = {}  # of the piece at an offset: its length and checksum
        self._failure: StoreError | None = None
        self._lock = threading.Lock()
        self._in_flight, self._room = in_flight, threading.Semaphore(in_flight)
        self._closed = threading.Lock()  # taken by who closes it, and kept
        self._jobs: queue.SimpleQueue[tuple[Transfer, _Move, int, memoryview] | None] = queue.SimpleQueue()
        # Daemons, not an executor: a disk that hangs must not keep the process from ending.
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def size(self) -> int:
        return self._file.size

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def direct(self) -> bool:
        """Whether it goes past the page cache."""
        return self._file.direct

    def reserve(self, nbytes: int) -> int:
        """The offset of a new stretch. The file grows where it must."""
        at, self._reserved = self._reserved, self._reserved + padded(nbytes)
        if self._reserved > self.size:
            self._file.grow(self._reserved)
        return at

    def read(self, at: int, into: Tensor, then: Then | None = None) -> Transfer:
        """What was written at this offset, into a CPU tensor that is not to be looked at before the result. `then` is
        called at the end, by a thread of the disk and never by the caller's: he may hold a lock that it needs.
        """
        return self._move("reading", at, into, self._read, then)

    def write(self, at: int, x: Tensor, then: Then | None = None) -> Transfer:
        """x to this offset. Until the result it must stay as it is, and nobody can read it back."""
        return self._move("writing", at, x, self._write, then)

    def close(self) -> None:
        """Wait for what is under way and give the space back. A failure nobody has heard of is raised here."""
        if not self._closed.acquire(blocking=False):
            return
        deadline = time.monotonic() + self.deadline_s
        for _ in range(self._in_flight):
            if not self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise late(f"closing {self._file.path}", self.deadline_s)
        for _ in self._threads:
            self._jobs.put(None)
        self._file.close()  # no job is left that could meet another file under its number
        self._room.release(self._in_flight)  # who has waited meanwhile is told
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(StoreError) if kind else contextlib.nullcontext():  # the first error is the cause
            self.close()

    def _move(self, doing: str, at: int, x: Tensor, move: _Move, then: Then | None) -> Transfer:
        n = x.numel() * x.element_size()
        what = f"{doing} {n} bytes at {at} of {self._file.path}"
        if self._failure is not None:
            raise self._failure
        self._check(what, at, x, n)
        view = x.detach().view(-1).view(torch.uint8).numpy().data
        if not self._room.acquire(timeout=self.deadline_s):
            raise late(what, self.deadline_s)
        if self._closed.locked():  # who closes it waits for those who were let in before
            self._room.release()
            raise UsageError(f"{what} after it was closed")
        starts = range(0, n, PIECE)
        transfer = Transfer(what, len(starts), self.deadline_s, then)
        for start in starts:
            self._jobs.put((transfer, move, at + start, view[start : start + PIECE]))
        return transfer

    def _check(self, what: str, at: int, x: Tensor, n: int) -> None:
        if x.device.type != "cpu" or not x.is_contiguous():
            wrong = f"the tensor is on {x.device}, and {'' if x.is_contiguous() else 'not '}contiguous"
        elif n == 0 or n % PAGE or at % PAGE or x.data_ptr() % PAGE:
            wrong = f"length, offset and memory ({x.data_ptr():#x}) must be multiples of {PAGE}"
        elif not 0 <= at <= self.size - n:
            wrong = f"the file has {self.size} bytes"
        else:
            return
        raise UsageError(what, why=wrong, do="take memory from `aligned`, and reserve `padded` bytes for each stretch")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            transfer, move, at, view = job
            try:
                if self._failure is None:
                    move(at, view)
            except Exception as error:
                named = error if isinstance(error, StoreError) else broken(transfer.what, error)
                self._failure = self._failure or named
            self._end(transfer)
            del job, transfer, move, view  # an idle thread keeps no buffer alive, nor who waited for it

    def _end(self, transfer: Transfer) -> None:
        with self._lock:
            transfer.left -= 1
            if transfer.left:
                return
        self._room.release()
        if self._failure is None:
            transfer.set_result(None)
        else:
            transfer.set_exception(self._failure)

    def _write(self, at: int, view: memoryview) -> None:
        self._sums.pop(at, None)  # half written is not written
        total = checksum(view)
        self._file.write(at, view)
        self._sums[at] = len(view), total

    def _read(self, at: int, view: memoryview) -> None:
        length, total = self._sums.get(at, (0, 0))
        if length != len(view):
            raise StoreError(
                f"the {len(view)} bytes at {at} of {self._file.path} were not written as one piece",
                why=f"a piece of {length} bytes begins there" if length else "no piece begins there",
                do="read a stretch as it was written, and after its writing has ended",
            )
        self._file.read(at, view)
        if checksum(view) != total:
            raise StoreError(
                f"the {length} bytes at {at} of {self._file.path} are not those that were written",
                why=f"their checksum differs, and {self._again(at, view, total)}",
                do="go on from the last checkpoint, on another disk if it happens again",
            )

    def _again(self, at: int, view: memoryview, total: int) -> str:
        """What a second read says. It does not stand in for the first: who spoils memory that is checked here spoils
        other memory too.
        """
        again = aligned(len(view)).numpy().data
        self._file.read(at, again)
        first, second = (np.frombuffer(x, np.uint64).reshape(-1, PAGE // 8) for x in (view, again))
        differ = np.flatnonzero((first != second).any(axis=1))
        if not len(differ):
            zeros = int((~first.any(axis=1)).sum())
            return f"a second read agrees: the disk, its driver or somebody else changed them (pages of zeros: {zeros})"
        if checksum(again) == total:
            return f"a second read has them: memory was changed, or the first read failed (from page {differ[0]} on)"
        return f"a second read differs from both: the disk or its driver is broken (from page {differ[0]} on)"


def abandon(disk: Disk) -> None:
    """Close it for somebody who is gone."""
    with contextlib.suppress(StoreError):  # nobody is left to be told
        disk.close()


class Speed(NamedTuple):
    """Bytes a second."""

    read: float
    write: float


def speed(folder: Path) -> Speed:
    """What the disk under this folder does: measured with a small file, in less than a second."""
    with Disk(folder, _PROBE, in_flight=4) as disk:
        x = aligned(PIECE).random_()  # some disks are faster with zeros
        write, written = _rate(disk.write, x, _PROBE, disk._file.flush)
        read, _ = _rate(disk.read, x, written, lambda: None)  # all into one place, where all say the same
    return Speed(read=read, write=write)


def _rate(move: Callable[[int, Tensor], Transfer], x: Tensor, size: int, end: Callable[[], None]) -> tuple[float, int]:
    """Bytes a second, and how many they were."""
    began = time.perf_counter()
    under_way: list[Transfer] = []
    for at in range(0, size, PIECE):
        under_way.append(move(at, x))
        if time.perf_counter() - began > _PROBE_S:
            break
    for transfer in under_way:
        transfer.result()
    end()
    moved = len(under_way) * PIECE
    return moved / (time.perf_counter() - began), moved


def late(what: str, limit: float) -> StoreError:
    return StoreError(
        f"{what} has not ended after {limit:.0f} s",
        why="the disk does not answer, or is far slower than it was measured",
        do="look at the disk (dmesg, iostat); a larger deadline helps if it is only slow",
    )
