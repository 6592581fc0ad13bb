"""State on disk, read and written in the background while the processor computes (ZeRO-Infinity).

[Note: chunks] A stretch is cut into chunks of CHUNK bytes that several threads move at a time. Each has a checksum,
taken when it is written and checked when it is read, so a stretch is read as it was written: from the start of a chunk
to the end of one. The checksum is the crc32 of the sums of the pages, each the sum of its 64-bit words. It sees a
changed word, a page in another's place and an old chunk that was never overwritten, and is taken as fast as memory is
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
from paceline.offload.file import PAGE, StateFile, aligned, broken, padded

__all__ = ["CHUNK", "PAGE", "Disk", "DiskSpeed", "Transfer", "abandon", "aligned", "late", "padded", "speed"]

CHUNK = 4 << 20  # bytes; larger ones are not faster
_PROBE, _PROBE_S = 64 * CHUNK, 0.3  # `speed` stops at the first of these two
_Move = Callable[[int, memoryview], None]
Then = Callable[[Future[None]], None]


def checksum(view: memoryview) -> int:
    """Give the checksum of whole pages: [Note: chunks]. numpy releases Python's lock meanwhile."""
    words = np.frombuffer(view, np.uint64).reshape(-1, PAGE // 8)
    return zlib.crc32(words.sum(axis=1))


class Transfer(Future[None]):
    """A read or a write under way. `result()` waits for it, and not for ever."""

    def __init__(self, what: str, chunks: int, timeout_s: float, then: Then | None) -> None:
        super().__init__()
        self.what, self.left, self._timeout_s = what, chunks, timeout_s
        self.set_running_or_notify_cancel()  # what the kernel has cannot be called back
        if then is not None:
            self.add_done_callback(then)

    def result(self, timeout: float | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout
        try:
            super().result(limit)
        except TimeoutError:
            raise late(self.what, limit) from None


class Disk:
    """A file of `size` bytes in `folder`, read and written in the background by `threads` threads.

    At most `in_flight` transfers are under way: a caller that is faster waits. The first failure ends the disk, and
    every later call raises it again.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        *,
        threads: int = 4,
        in_flight: int = 16,
        timeout_s: float = 120.0,
        name: str = "paceline",
    ) -> None:
        if min(size, threads, in_flight) < 1 or timeout_s <= 0:
            raise UsageError(
                f"a disk store of {size} bytes, {threads} threads, {in_flight} in flight, {timeout_s} s",
                why="each of them must be positive",
            )
        self.timeout_s = timeout_s
        self._file = StateFile(folder, padded(size), name)
        self._reserved = 0
        self._sums: dict[int, tuple[int, int]] = {}  # of the chunk at an offset: its length and checksum
        self._failure: StoreError | None = None
        self._lock = threading.Lock()
        self._in_flight, self._room = in_flight, threading.Semaphore(in_flight)
        self._closed = threading.Lock()  # taken when it is closed, and never released
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
        """Reserve a new stretch, and give its offset. The file grows where it must."""
        at, self._reserved = self._reserved, self._reserved + padded(nbytes)
        if self._reserved > self.size:
            self._file.grow(self._reserved)
        return at

    def read(self, at: int, into: Tensor, then: Then | None = None) -> Transfer:
        """Read what was written at this offset into a CPU tensor, which has it when the result is there.

        `then` is called at the end, by a thread of the disk and never by the caller's, which may hold a lock that
        `then` needs.
        """
        return self._move("reading", at, into, self._read, then)

    def write(self, at: int, x: Tensor, then: Then | None = None) -> Transfer:
        """Write x to this offset. Until the result is there, x must stay as it is, and cannot be read back."""
        return self._move("writing", at, x, self._write, then)

    def close(self) -> None:
        """Wait for what is under way and give the space back. A failure that was not raised yet is raised here."""
        if not self._closed.acquire(blocking=False):
            return
        timeout = time.monotonic() + self.timeout_s
        for _ in range(self._in_flight):
            if not self._room.acquire(timeout=max(0.0, timeout - time.monotonic())):
                raise late(f"closing {self._file.path}", self.timeout_s)
        for _ in self._threads:
            self._jobs.put(None)
        self._file.close()  # no job is left that could meet another file under its number
        self._room.release(self._in_flight)  # callers that have waited meanwhile raise
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
        if not self._room.acquire(timeout=self.timeout_s):
            raise late(what, self.timeout_s)
        if self._closed.locked():  # `close` waits for transfers that were let in before it
            self._room.release()
            raise UsageError(f"{what} after it was closed")
        starts = range(0, n, CHUNK)
        transfer = Transfer(what, len(starts), self.timeout_s, then)
        for start in starts:
            self._jobs.put((transfer, move, at + start, view[start : start + CHUNK]))
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
            del job, transfer, move, view  # an idle thread keeps no buffer alive

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
                f"the {len(view)} bytes at {at} of {self._file.path} were not written as one chunk",
                why=f"a chunk of {length} bytes begins there" if length else "no chunk begins there",
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
        """Read a second time, and say what that shows.

        A good second read does not replace the first: what spoils memory that is checked here spoils other memory too.
        """
        again = aligned(len(view)).numpy().data
        self._file.read(at, again)
        first, second = (np.frombuffer(x, np.uint64).reshape(-1, PAGE // 8) for x in (view, again))
        differ = np.flatnonzero((first != second).any(axis=1))
        if not len(differ):
            zeros = int((~first.any(axis=1)).sum())
            return (
                f"a second read agrees: the disk, its driver or another process changed them (pages of zeros: {zeros})"
            )
        if checksum(again) == total:
            return f"a second read has them: memory was changed, or the first read failed (from page {differ[0]} on)"
        return f"a second read differs from both: the disk or its driver is broken (from page {differ[0]} on)"


def abandon(disk: Disk) -> None:
    """Close a disk whose user is gone."""
    with contextlib.suppress(StoreError):  # there is no caller left to be told
        disk.close()


class DiskSpeed(NamedTuple):
    """The bytes a second that a disk reads and writes."""

    read: float
    write: float


def speed(folder: Path) -> DiskSpeed:
    """Measure the disk under this folder with a small file, in less than a second."""
    with Disk(folder, _PROBE, in_flight=4) as disk:
        x = aligned(CHUNK).random_(generator=torch.Generator())  # some disks are faster with zeros
        write, written = _rate(disk.write, x, _PROBE, disk._file.flush)
        read, _ = _rate(disk.read, x, written, lambda: None)  # all chunks into one place: all are the same
    return DiskSpeed(read=read, write=write)


def _rate(move: Callable[[int, Tensor], Transfer], x: Tensor, size: int, end: Callable[[], None]) -> tuple[float, int]:
    """Move up to `size` bytes, and give the bytes a second and how many they were."""
    began = time.perf_counter()
    under_way: list[Transfer] = []
    for at in range(0, size, CHUNK):
        under_way.append(move(at, x))
        if time.perf_counter() - began > _PROBE_S:
            break
    for transfer in under_way:
        transfer.result()
    end()
    moved = len(under_way) * CHUNK
    return moved / (time.perf_counter() - began), moved


def late(what: str, limit: float) -> StoreError:
    return StoreError(
        f"{what} has not ended after {limit:.0f} s",
        why="the disk does not answer, or is far slower than it was measured",
        do="look at the disk (dmesg, iostat); a larger timeout helps if it is only slow",
    )
