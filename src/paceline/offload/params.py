"""Shards of parameters that are not on the device: in the host's memory, or on its disk (ZeRO-Infinity).

[Note: parameter stores] With zero3 a worker's shard of a bucket's parameters lies on the device or in one of the stores
here. Before a module computes, its parameters are copied to the device, on a stream beside the computing;
sharding/unshard.py asks for them ahead. From disk a few pinned buffers are filled in the order in which buckets are
unsharded.

Parameters change in `optimizer.step()` and nowhere else, but the host steps ahead of it ([Note: offloaded]). The
parameters it makes are a draft until the user's step. On disk a shard has two places: a draft is written to the one
that does not count, and the step makes it count. In memory there is no second place: a shard is its master rounded, so
it is rounded again after the step, by the host's threads, while the next forward begins. That costs time the host has,
and no memory. Only where the master is on disk and would have to be read once more is a draft kept in memory, which
takes 2 bytes a parameter.

Parameters that are not on the device can be written only through `ShardedBucket.update_shard`, which sets `touched`.
So they are not looked through for changes before a step.
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

from paceline.comm.lane import Op
from paceline.kernels import adam
from paceline.offload.copies import CopyStreams, Ring, at_once
from paceline.offload.disk import Disk, Transfer, abandon
from paceline.offload.file import padded
from paceline.offload.host_threads import HostThreads, result
from paceline.offload.memory_model import DRAFTS, PARAMETER_BUFFERS

_NOTHING = torch.empty(0, dtype=torch.uint8)


class ParameterStore(Protocol):
    """Where one shard of parameters lies: [Note: parameter stores]."""

    touched: bool  # it was written from outside, and the master has to follow
    drafted: bool  # a draft is waiting for the user's step

    def announce(self) -> None:
        """Prepare for a `copy_to` that comes soon."""

    def copy_to(self, there: Tensor) -> Op:
        """Copy the shard into memory of the device."""

    def write(self, x: Tensor) -> None:
        """Overwrite the shard with x, which may be on any device."""

    def read(self, here: slice) -> Tensor:
        """Give a stretch of the shard: its own memory inside `at_hand`, perhaps a copy elsewhere."""

    def at_hand(self, *, changed: bool) -> AbstractContextManager[Tensor]:
        """Have the shard in memory inside the context. changed: it is written there."""

    def wait(self) -> None:
        """Wait until the last `round_from` is over."""

    def draft_memory(self) -> Tensor | None:
        """Give memory for a draft. None: a draft is not needed."""

    def keep_draft(self, draft: Tensor) -> None:
        """Keep the draft, which is complete, until it is accepted or dropped."""

    def wait_for_draft(self) -> None:
        """Wait until the draft lies in its place."""

    def drop_draft(self) -> None:
        """Forget the draft, because its step is not made."""

    def accept_draft(self, threads: HostThreads) -> None:
        """Replace the shard by the draft, because its step is made."""

    def round_from(self, master: Tensor, threads: HostThreads) -> None:
        """Replace the shard by its master, rounded. The master must not change until `wait`."""


class HostParameters:
    """A shard of parameters in pinned memory of the host: [Note: parameter stores]."""

    def __init__(self, streams: CopyStreams, n: int, dtype: torch.dtype, *, drafts: bool) -> None:
        """Take memory for n elements, and with `drafts` as much again for a draft."""
        self.touched = self.drafted = False
        self._streams, self._x = streams, streams.host_vector(n, dtype, pin=True)
        self._draft = streams.host_vector(n, dtype) if drafts else None
        self._rounded: Future[None] | None = None
        self._wait_for_readers: Callable[[], None] = at_once  # until no copy to the device reads it

    def announce(self) -> None:
        pass

    def copy_to(self, there: Tensor) -> Op:
        self.wait()
        arrive, self._wait_for_readers = self._streams.copy_to_device(self._x, there)
        return Op(arrive)

    def write(self, x: Tensor) -> None:
        with self.at_hand(changed=True) as mine:
            mine.copy_(x)

    def read(self, here: slice) -> Tensor:
        self.wait()
        return self._x[here]

    @contextlib.contextmanager
    def at_hand(self, *, changed: bool) -> Iterator[Tensor]:
        self.wait()
        if changed:
            self._wait_for_readers()
        yield self._x

    def wait(self) -> None:
        if self._rounded is not None:
            result(self._rounded, "rounding parameters")
            self._rounded = None

    def draft_memory(self) -> Tensor | None:
        return self._draft

    def keep_draft(self, draft: Tensor) -> None:
        self.drafted = True

    def wait_for_draft(self) -> None:
        pass

    def drop_draft(self) -> None:
        self.drafted = False

    def accept_draft(self, threads: HostThreads) -> None:
        assert self._draft is not None
        self.drafted = False
        self.round_from(self._draft, threads)

    def round_from(self, master: Tensor, threads: HostThreads) -> None:
        self.wait()
        self._wait_for_readers()
        self._rounded = threads.start(len(master), adam.rounding(master, self._x))


class DiskParameters:
    """A shard of parameters on disk: [Note: parameter stores]."""

    def __init__(self, buffers: ParameterBuffers, n: int, dtype: torch.dtype, *, drafts: bool) -> None:
        """Reserve room for n elements, and with `drafts` a second place for a draft."""
        self.touched = self.drafted = False
        self.buffers, self.n, self.dtype = buffers, n, dtype
        self.nbytes = padded(n * dtype.itemsize)
        self._places = [buffers.disk.reserve(self.nbytes) for _ in range(1 + drafts)]  # the first one counts
        self._open: Tensor | None = None  # inside `at_hand`
        self._draft: tuple[Tensor, Callable[[Callable[[], None]], None]] | None = None  # as the ring gave it
        self._writing: Transfer | None = None  # of a draft to its place

    @property
    def at(self) -> int:
        """The offset in the file of the place that counts."""
        return self._places[0]

    def view(self, memory: Tensor) -> Tensor:
        """Give the elements that lie at the beginning of these bytes."""
        return memory[: self.n * self.dtype.itemsize].view(self.dtype)

    def announce(self) -> None:
        self.buffers.announce(self)

    def copy_to(self, there: Tensor) -> Op:
        return Op(self.buffers.copy_to(self, there))

    def write(self, x: Tensor) -> None:
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
        memory = self.buffers.get(self, blank=blank)
        self._open = self.view(memory)
        try:
            yield self._open
            if changed:
                self.buffers.disk.write(self.at, memory).result()
        finally:
            self._open = None

    def wait(self) -> None:
        pass

    def draft_memory(self) -> Tensor | None:
        self._draft = self.buffers.ring.take(self.nbytes, torch.uint8)
        return self.view(self._draft[0])

    def keep_draft(self, draft: Tensor) -> None:
        assert self._draft is not None
        (memory, give), self._draft = self._draft, None
        self.wait_for_draft()  # an earlier draft that was dropped may still be on its way to the same place
        self._writing = self.buffers.disk.write(self._places[1], memory)
        give(self._writing.result)
        self.drafted = True

    def wait_for_draft(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def drop_draft(self) -> None:
        self.drafted = False

    def accept_draft(self, threads: HostThreads) -> None:
        self.wait_for_draft()
        self.drafted, self._places = False, self._places[::-1]
        self.buffers.forget(self)

    def round_from(self, master: Tensor, threads: HostThreads) -> None:
        draft = self.draft_memory()
        assert draft is not None
        threads.all(len(master), adam.rounding(master, draft))
        self.keep_draft(draft)
        self.accept_draft(threads)


class _Buffer:
    """Pinned memory for one shard at a time."""

    memory = _NOTHING
    of: DiskParameters | None = None
    reading: Transfer | None = None
    announced = False  # it will be copied to the device, and must not serve another shard before
    wait_for_readers: Callable[[], None] = staticmethod(at_once)  # until no copy to the device reads it


class ParameterBuffers:
    """A disk with shards of parameters, and a few buffers to read them into.

    One thread at a time may use it. Drafts are written by other threads, from memory of their own.
    """

    def __init__(self, disk: Disk, streams: CopyStreams) -> None:
        self.disk, self._streams = disk, streams
        self.ring = Ring(streams, DRAFTS)
        self._buffers = [_Buffer() for _ in range(PARAMETER_BUFFERS)]  # those used longest ago first
        weakref.finalize(self, abandon, disk).atexit = False  # the system closes a file by itself

    def announce(self, x: DiskParameters) -> None:
        """Begin to read a shard that will be needed soon, if a buffer is free."""
        if self._buffer_of(x) is None and (free := [b for b in self._buffers if not b.announced]):
            self._fill(free[0], x)
            free[0].announced = True

    def copy_to(self, x: DiskParameters, there: Tensor) -> Callable[[], Tensor]:
        """Copy a shard to the device. The result waits until it is there."""
        buffer = self._filled(x)
        arrive, buffer.wait_for_readers = self._streams.copy_to_device(x.view(buffer.memory), there)
        return arrive

    def get(self, x: DiskParameters, *, blank: bool) -> Tensor:
        """Give a shard's memory, to be read and written until another shard is asked for.

        blank: all of it will be written, so what is on disk is not read.
        """
        buffer = self._filled(x, blank=blank)
        buffer.wait_for_readers()
        return buffer.memory[: x.nbytes]

    def forget(self, x: DiskParameters) -> None:
        """Discard what the buffers hold of a shard, because it has changed on disk."""
        if (buffer := self._buffer_of(x)) is not None:
            buffer.of, buffer.announced = None, False

    def close(self) -> None:
        """Give the space on disk back."""
        self.disk.close()

    def _buffer_of(self, x: DiskParameters) -> _Buffer | None:
        return next((b for b in self._buffers if b.of is x), None)

    def _filled(self, x: DiskParameters, *, blank: bool = False) -> _Buffer:
        buffer = self._buffer_of(x)
        if buffer is None:
            buffer = min(self._buffers, key=lambda b: b.announced)  # the one used longest ago that is not announced
            self._fill(buffer, x, blank=blank)
        if buffer.reading is not None:
            buffer.reading.result()
            buffer.reading = None
        buffer.announced = False
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer

    def _fill(self, buffer: _Buffer, x: DiskParameters, *, blank: bool = False) -> None:
        buffer.wait_for_readers()
        if buffer.reading is not None:
            buffer.reading.result()
        if buffer.memory.numel() < x.nbytes:
            buffer.memory = self._streams.host_vector(x.nbytes, torch.uint8, pin=True)
        buffer.of = x
        buffer.reading = None if blank else self.disk.read(x.at, buffer.memory[: x.nbytes])


class ParameterStores:
    """All parameter stores of one layout.

    Trained and frozen parameters lie in files of their own: those of the first go when buckets are cut anew.
    """

    def __init__(self, folder: Path | None, rank: int, sizes: Mapping[bool, int]) -> None:
        """Begin without stores. folder: for stores on disk; sizes: bytes of trained (True) and of frozen parameters."""
        self._folder, self._rank, self._sizes = folder, rank, sizes
        self._streams: CopyStreams | None = None
        self._disks: dict[bool, ParameterBuffers] = {}  # of trained, and of frozen parameters

    def add(self, n: int, dtype: torch.dtype, device: torch.device, *, trained: bool, drafts: bool) -> ParameterStore:
        """Make a store for n elements. drafts: keep drafts also where the store is in memory."""
        self._streams = self._streams or CopyStreams(device)
        if self._folder is None:
            return HostParameters(self._streams, n, dtype, drafts=drafts)
        if trained not in self._disks:
            size = max(self._sizes[trained] * (1 + trained), 1)
            disk = Disk(self._folder, size, name=f"paceline-{self._rank}-parameters")
            self._disks[trained] = ParameterBuffers(disk, self._streams)
        return DiskParameters(self._disks[trained], n, dtype, drafts=trained)

    def close_trained(self) -> None:
        """Give the space of the trained parameters back."""
        if (disk := self._disks.pop(True, None)) is not None:
            disk.close()
