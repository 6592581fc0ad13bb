"""State on disk, at hand only while somebody works on it: ZeRO-Infinity.

[Note: turns] Buckets are stepped in the order of their index, step after step. So it is known which is needed next, and
a few buffers are enough: what is needed last makes room for what is needed soonest. While one bucket is stepped the
next ones are read and the last ones written, and a step finds its first buckets there, read while the model computed.
Who asks out of turn (a guess is undone, the state is saved) is served too, and the turns go on from there.

A buffer that was changed is somebody else's only after its writing has ended: nothing is ever lost on the way. The
first failure ends it all, and whoever takes something from then on is told.

[Note: one at a time] Who changes what is where holds the pool's lock to the end. A transfer's end changes it too, and
is told by a thread of the disk, which waits for the lock like everyone. Told on the spot, by the thread that has just
begun it, it would change things under those hands: a bucket would be read twice at once, into two buffers, and be
taken when one was there while the other was still being filled.
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

from paceline.stores.disk import Disk, Then, Transfer, abandon, late
from paceline.stores.file import padded
from paceline.stores.lanes import Lanes
from paceline.stores.vectors import Triple

BUFFERS = 4  # one is stepped, one written, and one is there while the next is read

_WIDE = torch.float32


class Place(Enum):
    """Where a bucket's vectors are."""

    AWAY = "on disk only"
    COMING = "being read"
    HERE = "in a buffer, as they are on disk"
    TAKEN = "in a buffer, and somebody works on them"
    GOING = "being written"


class OnDisk:
    """Vectors that lie in the pool's file, and now and then in one of its buffers."""

    dtype = _WIDE

    def __init__(self, pool: Pool, index: int, n: int) -> None:
        self.pool, self.index, self.n = pool, index, n
        self.length = padded(n * _WIDE.itemsize)  # of each of the three, so that each begins at a page
        self.at = pool.disk.reserve(self.nbytes)
        self.place, self.buffer = Place.AWAY, _NOTHING
        self.written = False  # ever
        self.asked = 0  # by so many who wait for it
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
    """The tensors that are shown get the memory they stand for, or none."""
    for here, tensors in shown:
        for i, x in enumerate(tensors):
            x.data = over[i][here] if over is not None else torch.empty(0, dtype=x.dtype)


class Pool:
    """A disk and a few buffers, each as large as the largest bucket it has held: [Note: turns]."""

    def __init__(self, disk: Disk, lanes: Lanes, buffers: int = BUFFERS) -> None:
        self.disk, self._lanes = disk, lanes
        self.all: list[OnDisk] = []
        self._free = [_NOTHING] * max(buffers, 2)  # two may wait at a time: who steps, and who undoes or saves
        self._last = -1  # whose turn it was
        self._ahead = False  # until all buckets are known nothing is read ahead
        self._failure: Exception | None = None
        self._news = threading.Condition(threading.Lock())  # which its owner cannot take again: [Note: one at a time]
        weakref.finalize(self, abandon, disk).atexit = False  # the system closes a file by itself

    def add(self, n: int) -> OnDisk:
        with self._news:
            self.all.append(OnDisk(self, len(self.all), n))
            return self.all[-1]

    def start(self) -> None:
        """All buckets are known, and the first is needed next."""
        if not self._ahead:
            with self._change():
                self._ahead, self._last = True, len(self.all) - 1
                self._read_next()

    def close(self) -> None:
        """Nothing is read ahead any more, and the space is given back."""
        with self._news:
            self._ahead = False
        self.disk.close()

    def take(self, x: OnDisk) -> None:
        with self._change():
            x.asked += 1
            self._read_next()
        with self._news:
            came = self._news.wait_for(lambda: self._failure or x.place is Place.HERE, self.disk.deadline_s)
            x.asked -= 1
            if self._failure is not None:
                raise self._failure
            if not came:
                raise late(f"reading {x.nbytes} bytes at {x.at} of {self.disk.path}", self.disk.deadline_s)
            x.place, self._last = Place.TAKEN, x.index

    def give(self, x: OnDisk, *, changed: bool) -> None:
        assert x.place is Place.TAKEN, f"bucket {x.index} is given back while {x.place.value}"
        with self._change():
            if changed:
                x.place, x.written = Place.GOING, True
                self._move(self.disk.write, x)
            else:
                x.place = Place.HERE
            self._read_next()

    def _read_next(self) -> None:
        """What is needed soonest comes, in place of what is needed later than that."""
        away = [x for x in self.all if x.place is Place.AWAY and (x.asked or self._ahead)]
        for x in sorted(away, key=self._turns):
            if self._failure is not None or not self._make_room(x):
                return
            self._read(x)

    def _turns(self, x: OnDisk) -> int:
        """Until it is needed: of others, or now."""
        return -1 if x.asked else (x.index - self._last - 1) % len(self.all)

    def _make_room(self, x: OnDisk) -> bool:
        if self._free:
            x.buffer = self._free.pop()
        else:
            here = [other for other in self.all if other.place is Place.HERE]
            last = max(here, key=self._turns, default=x)
            if self._turns(last) <= self._turns(x):
                return False
            x.buffer, last.buffer, last.place = last.buffer, _NOTHING, Place.AWAY
        if x.buffer.numel() < x.nbytes:
            x.buffer = self._lanes.vector(x.nbytes, torch.uint8)
        return True

    def _read(self, x: OnDisk) -> None:
        assert x.place is Place.AWAY, f"bucket {x.index} is to be read while {x.place.value}"
        if x.written:
            x.place = Place.COMING
            self._move(self.disk.read, x)
        else:
            x.buffer[: x.nbytes].zero_()
            x.place = Place.HERE

    def _move(self, move: Callable[[int, Tensor, Then], Transfer], x: OnDisk) -> None:
        move(x.at, x.buffer[: x.nbytes], lambda done: self._moved(x, done))

    def _moved(self, x: OnDisk, done: Future[None]) -> None:
        with self._change():
            done.result()
            x.place = Place.HERE
            self._read_next()

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """[Note: one at a time]. What goes wrong is told to whoever takes something."""
        with self._news:
            try:
                yield
            except Exception as error:
                self._failure = self._failure or error
            self._news.notify_all()
