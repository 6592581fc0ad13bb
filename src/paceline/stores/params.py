"""Slices of the parameters that are not on the device: in the host's memory, or on its disk (ZeRO-Infinity).

[Note: homes] With zero3 a worker's slice of a bucket's parameters has a home, the device or one of these. Who computes
with the parameters has them brought to the device first, by a lane beside the computing; shards/loans.py asks ahead.
From disk a few pinned buffers are filled in the order in which buckets are borrowed.

Parameters change in `optimizer.step()` and nowhere else, but the host steps on a guess ([Note: away]). What it makes is
a draft until the user asks for it. On disk a slice has two places: a draft is written to the one that does not count,
and the step makes it count. In memory there is no second place: a slice is its master rounded, so it is rounded again
after the step, by the crew, while the next forward begins. That costs time the host has, and no memory. Only where the
master is on disk and would have to be read once more is a draft kept in memory: 2 bytes a parameter.

Nobody can write into parameters that are not there, except through a loan, and that is told (`touched`). So these are
not looked through for changes before a step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm import Op
from paceline.kernels import adam
from paceline.stores.crew import Crew, result
from paceline.stores.disk import Disk, Transfer, abandon
from paceline.stores.file import padded
from paceline.stores.lanes import Lanes, Ring, at_once

BUFFERS = 4  # two on their way to the device, and two being read
_DRAFTS = 3  # one is made while others are written
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Home(Protocol):
    """Of one slice: [Note: homes]."""

    touched: bool  # written from outside: the master is to follow
    drafted: bool  # what was stepped waits to be asked for

    def near(self) -> None:
        """It will be brought soon."""

    def bring(self, there: Tensor) -> Op:
        """Into this memory on the device."""

    def put(self, x: Tensor) -> None:
        """It becomes x, from wherever."""

    def read(self, here: slice) -> Tensor:
        """A stretch of it: itself inside `at_hand`, elsewhere perhaps a copy."""

    def at_hand(self, *, changed: bool) -> AbstractContextManager[Tensor]: ...

    def wait(self) -> None:
        """What became of it has become so."""

    def draft(self) -> Tensor | None:
        """Memory for a draft. None: there is no need of one."""

    def keep(self, draft: Tensor) -> None:
        """It is made."""

    def kept(self) -> None:
        """Wait until it is in its place."""

    def drop(self) -> None:
        """Nobody has asked for it."""

    def accept(self, crew: Crew) -> None:
        """It becomes the draft."""

    def follow(self, p: Tensor, crew: Crew) -> None:
        """It becomes the master, rounded. p stays as it is until `wait`."""


class InHost:
    """A home in pinned memory. drafts: [Note: homes]."""

    def __init__(self, lanes: Lanes, n: int, dtype: torch.dtype, *, drafts: bool) -> None:
        self.touched = self.drafted = False
        self._lanes, self._x = lanes, lanes.vector(n, dtype, pin=True)
        self._draft = lanes.vector(n, dtype) if drafts else None
        self._rounded: Future[None] | None = None
        self._left: Callable[[], None] = at_once  # wait until no copy to the device reads it

    def near(self) -> None:
        pass

    def bring(self, there: Tensor) -> Op:
        self.wait()
        arrive, self._left = self._lanes.bring(self._x, there)
        return Op(arrive)

    def put(self, x: Tensor) -> None:
        with self.at_hand(changed=True) as mine:
            mine.copy_(x)

    def read(self, here: slice) -> Tensor:
        self.wait()
        return self._x[here]

    @contextlib.contextmanager
    def at_hand(self, *, changed: bool) -> Iterator[Tensor]:
        self.wait()
        if changed:
            self._left()
        yield self._x

    def wait(self) -> None:
        if self._rounded is not None:
            result(self._rounded, "rounding parameters")
            self._rounded = None

    def draft(self) -> Tensor | None:
        return self._draft

    def keep(self, draft: Tensor) -> None:
        self.drafted = True

    def kept(self) -> None:
        pass

    def drop(self) -> None:
        self.drafted = False

    def accept(self, crew: Crew) -> None:
        assert self._draft is not None
        self.drafted = False
        self.follow(self._draft, crew)

    def follow(self, p: Tensor, crew: Crew) -> None:
        self.wait()
        self._left()
        self._rounded = crew.start(len(p), adam.rounding(p, self._x))


class InFile:
    """A home on disk. drafts: it has two places there."""

    def __init__(self, shelf: Shelf, n: int, dtype: torch.dtype, *, drafts: bool) -> None:
        self.touched = self.drafted = False
        self.shelf, self.n, self.dtype = shelf, n, dtype
        self.nbytes = padded(n * dtype.itemsize)
        self._places = [shelf.disk.reserve(self.nbytes) for _ in range(1 + drafts)]
        self._open: Tensor | None = None  # inside `at_hand`
        self._draft: tuple[Tensor, Callable[[Callable[[], None]], None]] | None = None  # as the ring has it
        self._writing: Transfer | None = None  # ... to its place

    @property
    def at(self) -> int:
        return self._places[0]

    def view(self, memory: Tensor) -> Tensor:
        return memory[: self.n * self.dtype.itemsize].view(self.dtype)

    def near(self) -> None:
        self.shelf.near(self)

    def bring(self, there: Tensor) -> Op:
        return Op(self.shelf.bring(self, there))

    def put(self, x: Tensor) -> None:
        with self._opened(changed=True, blank=True) as mine:
            mine.copy_(x)

    def read(self, here: slice) -> Tensor:
        if self._open is not None:
            return self._open[here]
        with self.at_hand(changed=False) as mine:
            return mine[here].clone()

    def at_hand(self, *, changed: bool) -> AbstractContextManager[Tensor]:
        return self._opened(changed=changed)

    @contextlib.contextmanager
    def _opened(self, *, changed: bool, blank: bool = False) -> Iterator[Tensor]:
        memory = self.shelf.get(self, blank=blank)
        self._open = self.view(memory)
        try:
            yield self._open
            if changed:
                self.shelf.disk.write(self.at, memory).result()
        finally:
            self._open = None

    def wait(self) -> None:
        pass

    def draft(self) -> Tensor | None:
        self._draft = self.shelf.ring.take(self.nbytes, torch.uint8)
        return self.view(self._draft[0])

    def keep(self, draft: Tensor) -> None:
        assert self._draft is not None
        (memory, give), self._draft = self._draft, None
        self.kept()  # one that was dropped
        self._writing = self.shelf.disk.write(self._places[1], memory)
        give(self._writing.result)
        self.drafted = True

    def kept(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def drop(self) -> None:
        self.drafted = False

    def accept(self, crew: Crew) -> None:
        self.kept()
        self.drafted, self._places = False, self._places[::-1]
        self.shelf.forget(self)

    def follow(self, p: Tensor, crew: Crew) -> None:
        draft = self.draft()
        assert draft is not None
        crew.all(len(p), adam.rounding(p, draft))
        self.keep(draft)
        self.accept(crew)


class _Buffer:
    """Pinned memory for one slice at a time."""

    memory = _NOTHING
    of: InFile | None = None
    coming: Transfer | None = None
    wanted = False  # asked for, and not brought yet
    left: Callable[[], None] = staticmethod(at_once)  # wait until no copy to the device reads it


class Shelf:
    """A disk for slices, and a few buffers to read them into. For one thread at a time; drafts come from others."""

    def __init__(self, disk: Disk, lanes: Lanes) -> None:
        self.disk, self._lanes = disk, lanes
        self.ring = Ring(lanes, _DRAFTS)
        self._buffers = [_Buffer() for _ in range(BUFFERS)]  # those used longest ago first
        weakref.finalize(self, abandon, disk).atexit = False  # the system closes a file by itself

    def near(self, x: InFile) -> None:
        if self._of(x) is None and (free := [b for b in self._buffers if not b.wanted]):
            self._fill(free[0], x)
            free[0].wanted = True

    def bring(self, x: InFile, there: Tensor) -> Callable[[], Tensor]:
        buffer = self._here(x)
        arrive, buffer.left = self._lanes.bring(x.view(buffer.memory), there)
        return arrive

    def get(self, x: InFile, *, blank: bool) -> Tensor:
        """Its memory, to be read and written until somebody asks for another. blank: whatever is in it."""
        buffer = self._here(x, blank=blank)
        buffer.left()
        return buffer.memory[: x.nbytes]

    def forget(self, x: InFile) -> None:
        """What is in the buffers is old."""
        if (buffer := self._of(x)) is not None:
            buffer.of, buffer.wanted = None, False

    def close(self) -> None:
        self.disk.close()

    def _of(self, x: InFile) -> _Buffer | None:
        return next((b for b in self._buffers if b.of is x), None)

    def _here(self, x: InFile, *, blank: bool = False) -> _Buffer:
        buffer = self._of(x)
        if buffer is None:
            buffer = min(self._buffers, key=lambda b: b.wanted)  # the first of them, if it can be
            self._fill(buffer, x, blank=blank)
        if buffer.coming is not None:
            buffer.coming.result()
            buffer.coming = None
        buffer.wanted = False
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer

    def _fill(self, buffer: _Buffer, x: InFile, *, blank: bool = False) -> None:
        buffer.left()
        if buffer.coming is not None:
            buffer.coming.result()
        if buffer.memory.numel() < x.nbytes:
            buffer.memory = self._lanes.vector(x.nbytes, torch.uint8, pin=True)
        buffer.of = x
        buffer.coming = None if blank else self.disk.read(x.at, buffer.memory[: x.nbytes])


class Homes:
    """All of one layout. folder: on disk. Those that are trained and those that are not are apart: the first go when
    buckets are cut anew.
    """

    def __init__(self, folder: Path | None, rank: int, sizes: Mapping[bool, int]) -> None:
        """sizes: about how many bytes of them are trained, and are not."""
        self._folder, self._rank, self._sizes = folder, rank, sizes
        self._lanes: Lanes | None = None
        self._shelves: dict[bool, Shelf] = {}  # trained or not

    def add(self, n: int, dtype: torch.dtype, device: torch.device, *, trained: bool, drafts: bool) -> Home:
        """A new one, of n elements. drafts: in memory too."""
        self._lanes = self._lanes or Lanes(device)
        if self._folder is None:
            return InHost(self._lanes, n, dtype, drafts=drafts)
        if trained not in self._shelves:
            size = max(self._sizes[trained] * (1 + trained), 1)
            disk = Disk(self._folder, size, name=f"paceline-{self._rank}-parameters")
            self._shelves[trained] = Shelf(disk, self._lanes)
        return InFile(self._shelves[trained], n, dtype, drafts=trained)

    def close_trained(self) -> None:
        if (shelf := self._shelves.pop(True, None)) is not None:
            shelf.close()
