"""State on disk, in memory only while it is worked on: ZeRO-Infinity.

[Note: turns] Buckets are stepped in the order of their index, step after step. So it is known which is needed next, and
a few buffers are enough: what is needed last makes room for what is needed soonest. While one bucket is stepped the
next ones are read and the last ones written, and a step finds its first buckets there, read while the model computed.
A bucket that is taken out of turn (a step is undone, the state is saved) is read too, and the turns go on from there.

A buffer that was changed serves another bucket only after it has been written to disk: nothing is lost on the way. The
first failure ends the pool, and every later `take` raises it.

[Note: one at a time] A thread that changes the state of a buffer holds the pool's lock to the end of the change. The
end of a transfer changes it too, and is told by a thread of the disk, which waits for the lock like all others. If the
thread that has begun a transfer could be told of its end on the spot, it would change the state in the middle of its
own change: a bucket would be read into two buffers, and be taken when one of them was filled and the other not.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from enum import Enum

import torch
from torch import Tensor

from paceline.offload.copies import CopyStreams
from paceline.offload.disk import Disk, Then, Transfer, abandon, late
from paceline.offload.file import padded
from paceline.offload.memory_model import STATE_BUFFERS
from paceline.offload.vectors import Triple

_WIDE = torch.float32


class BufferState(Enum):
    """Where a bucket's vectors are, and what is being done with them."""

    AWAY = "on disk only"
    COMING = "being read"
    HERE = "in a buffer, as they are on disk"
    TAKEN = "in a buffer, and being worked on"
    GOING = "being written"


class OnDisk:
    """Vectors that lie in the pool's file, and now and then in one of its buffers."""

    dtype = _WIDE

    def __init__(self, pool: Pool, index: int, n: int) -> None:
        self.pool, self.index, self.n = pool, index, n
        self.length = padded(n * _WIDE.itemsize)  # of each of the three, so that each begins at a page
        self.at = pool.disk.reserve(self.nbytes)
        self.state, self.buffer = BufferState.AWAY, _NOTHING
        self.written = False  # ever: before that it is zero
        self.asked = 0  # how many threads wait for it
        self._shown: list[tuple[slice, Triple]] = []
        self._open: Triple | None = None  # inside `at_hand`

    @property
    def nbytes(self) -> int:
        return len(Triple._fields) * self.length

    def take(self) -> Triple:
        self.pool.take(self)
        stretches = (self.buffer[k * self.length :][: self.n * _WIDE.itemsize] for k in range(len(Triple._fields)))
        return Triple(*(x.view(_WIDE) for x in stretches))

    def give(self, *, changed: bool) -> None:
        self.pool.give(self, changed=changed)

    def show(self, here: slice) -> Triple:
        shown = Triple(*(torch.empty(0, dtype=_WIDE) for _ in Triple._fields))
        self._shown.append((here, shown))
        _lay([(here, shown)], self._open)
        return shown

    @contextlib.contextmanager
    def at_hand(self, *, changed: bool) -> Iterator[Triple]:
        self._open = self.take()
        _lay(self._shown, self._open)
        try:
            yield self._open
        finally:
            self._open = None
            _lay(self._shown, None)
            self.give(changed=changed)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _lay(shown: list[tuple[slice, Triple]], over: Triple | None) -> None:
    """Give the tensors that are shown the memory they stand for, or none."""
    for here, tensors in shown:
        for i, x in enumerate(tensors):
            x.data = over[i][here] if over is not None else torch.empty(0, dtype=x.dtype)


class Pool:
    """A disk and a few buffers, each as large as the largest bucket it has held: [Note: turns]."""

    def __init__(self, disk: Disk, streams: CopyStreams, buffers: int = STATE_BUFFERS) -> None:
        self.disk, self._streams = disk, streams
        self.all: list[OnDisk] = []
        self._free = [_NOTHING] * max(buffers, 2)  # two may wait at a time: a step, and an undo or a save
        self._last = -1  # the bucket that was taken last
        self._ahead = False  # until all buckets are known nothing is read ahead
        self._failure: Exception | None = None
        self._news = threading.Condition(threading.Lock())  # not reentrant: [Note: one at a time]
        weakref.finalize(self, abandon, disk).atexit = False  # the system closes a file by itself

    def add(self, n: int) -> OnDisk:
        """Make room on disk for the state of n numbers."""
        with self._news:
            self.all.append(OnDisk(self, len(self.all), n))
            return self.all[-1]

    def start(self) -> None:
        """Begin to read ahead: all buckets are known, and the first is needed next."""
        if not self._ahead:
            with self._change():
                self._ahead, self._last = True, len(self.all) - 1
                self._read_next()

    def close(self) -> None:
        """Stop reading ahead, and give the space back."""
        with self._news:
            self._ahead = False
        self.disk.close()

    def take(self, x: OnDisk) -> None:
        """Have a bucket in a buffer, and wait for that."""
        with self._change():
            x.asked += 1
            self._read_next()
        with self._news:
            came = self._news.wait_for(lambda: self._failure or x.state is BufferState.HERE, self.disk.timeout_s)
            x.asked -= 1
            if self._failure is not None:
                raise self._failure
            if not came:
                raise late(f"reading {x.nbytes} bytes at {x.at} of {self.disk.path}", self.disk.timeout_s)
            x.state, self._last = BufferState.TAKEN, x.index

    def give(self, x: OnDisk, *, changed: bool) -> None:
        """Give a bucket back that was taken. changed: it is written to disk."""
        assert x.state is BufferState.TAKEN, f"bucket {x.index} is given back while {x.state.value}"
        with self._change():
            if changed:
                x.state, x.written = BufferState.GOING, True
                self._move(self.disk.write, x)
            else:
                x.state = BufferState.HERE
            self._read_next()

    def _read_next(self) -> None:
        """Read what is needed soonest, in place of what is needed later than that."""
        away = [x for x in self.all if x.state is BufferState.AWAY and (x.asked or self._ahead)]
        for x in sorted(away, key=self._turns):
            if self._failure is not None or not self._make_room(x):
                return
            self._read(x)

    def _turns(self, x: OnDisk) -> int:
        """Give the number of other buckets that are needed before this one. -1: it is needed now."""
        return -1 if x.asked else (x.index - self._last - 1) % len(self.all)

    def _make_room(self, x: OnDisk) -> bool:
        if self._free:
            x.buffer = self._free.pop()
        else:
            here = [other for other in self.all if other.state is BufferState.HERE]
            last = max(here, key=self._turns, default=x)
            if self._turns(last) <= self._turns(x):
                return False
            x.buffer, last.buffer, last.state = last.buffer, _NOTHING, BufferState.AWAY
        if x.buffer.numel() < x.nbytes:
            x.buffer = self._streams.host_vector(x.nbytes, torch.uint8)
        return True

    def _read(self, x: OnDisk) -> None:
        assert x.state is BufferState.AWAY, f"bucket {x.index} is to be read while {x.state.value}"
        if x.written:
            x.state = BufferState.COMING
            self._move(self.disk.read, x)
        else:
            x.buffer[: x.nbytes].zero_()
            x.state = BufferState.HERE

    def _move(self, move: Callable[[int, Tensor, Then], Transfer], x: OnDisk) -> None:
        move(x.at, x.buffer[: x.nbytes], lambda done: self._moved(x, done))

    def _moved(self, x: OnDisk, done: Future[None]) -> None:
        with self._change():
            done.result()
            x.state = BufferState.HERE
            self._read_next()

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Hold the lock for a change: [Note: one at a time]. A failure is raised by every `take` from then on."""
        with self._news:
            try:
                yield
            except Exception as error:
                self._failure = self._failure or error
            self._news.notify_all()
