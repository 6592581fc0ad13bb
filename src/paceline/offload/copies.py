"""Copies between the device and the host, beside the computing.

Without an accelerator host and device are one, and a copy is a plain copy: so everything here runs on any machine.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from paceline.core.blank import blank
from paceline.errors import StoreError
from paceline.offload.host_threads import PATIENCE_S
from paceline.offload.memory_model import RING

_PAGE = mmap.PAGESIZE
_SPARE, CLAIMED = 16, 32  # the part of the device's memory that stays free, as 1/n; less where it was planned

Give = Callable[[Callable[[], None]], None]  # gives a vector back, with a wait until it may be written again


class CopyStreams:
    """One stream of copies out of the device and one back, each in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.spare = _SPARE
        self.promised: Callable[[], int] = lambda: 0  # bytes of the device that will be taken soon
        self._out: Any = torch.cuda.Stream(device) if self.cuda else None
        self._back: Any = torch.cuda.Stream(device) if self.cuda else None

    def copy_to_host(self, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copy pairs of (device, host) tensors, after what was launched so far. Gives a wait for the copies."""
        with self._on(self._out):
            for there, host in pairs:
                host.copy_(there, non_blocking=True)
                if self.cuda:
                    there.record_stream(self._out)  # its memory may be given back meanwhile
            return self._event(self._out)

    def send_to_device(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Copy to new memory of the device. Gives that, for `arrive`, and a wait until `host` may be written again."""
        if not self.cuda:
            return host.clone(), at_once
        with torch.cuda.stream(self._back):
            there = torch.empty_like(host, device=self.device)
            there.copy_(host, non_blocking=True)
            return there, self._event(self._back)

    def copy_to_device(self, host: Tensor, there: Tensor) -> tuple[Callable[[], Tensor], Callable[[], None]]:
        """Copy to given memory of the device, after what was launched so far.

        Gives a wait after which `there` may be used by what is launched from then on, and one until `host` may be
        written again.
        """
        with self._on(self._back):
            there.copy_(host, non_blocking=True)
        if not self.cuda:
            return lambda: there, at_once
        event = torch.cuda.Event(blocking=True)
        event.record(self._back)

        def arrive() -> Tensor:
            torch.cuda.current_stream(self.device).wait_event(event)
            return there

        return arrive, event.synchronize

    def has_room(self, others: int = 0) -> bool:
        """Say whether the device has room for what need not be there yet, beside what the computing needs.

        others: bytes that must stay free besides.
        """
        if not self.cuda:
            return True
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached - self.promised() - others > total // self.spare

    def arrive(self, *theres: Tensor) -> None:
        """Let what is launched from now on use what was sent to the device so far."""
        if self.cuda:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self._back)
            for there in theres:
                there.record_stream(now)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def _event(self, stream: torch.cuda.Stream | None) -> Callable[[], None]:
        if stream is None:
            return at_once
        event = torch.cuda.Event(blocking=True)  # a thread that waits must not take a core from those that step
        event.record(stream)
        return event.synchronize

    def host_vector(self, n: int, dtype: torch.dtype, *, pin: bool = False) -> Tensor:
        """Take host memory in large pages, filled with zeros. pin: the device may read and write it by itself.

        Not by torch's own allocator of pinned memory: it rounds up to a power of two, which for most of a host's
        memory is too much.
        """
        if n == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = -(-n * dtype.itemsize // _PAGE) * _PAGE
        memory = _Memory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        x = torch.frombuffer(memory, dtype=torch.uint8)
        if pin and self.cuda:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(x.data_ptr(), nbytes, 0))
            memory.at = x.data_ptr()
        return x[: n * dtype.itemsize].view(dtype)


class _Memory(mmap.mmap):
    """Memory that may be pinned: it must be unregistered from the device before the system frees it."""

    at: int | None = None

    def __del__(self) -> None:
        if self.at is not None:
            torch.cuda.cudart().cudaHostUnregister(self.at)


def at_once() -> None:
    """Wait for nothing: what is waited for is there."""


class Ring:
    """A few pinned vectors that take turns: each is handed out again when the copy that reads it has ended."""

    def __init__(self, streams: CopyStreams, count: int = RING) -> None:
        self._streams = streams
        self._free: SimpleQueue[tuple[Tensor, Callable[[], None]]] = SimpleQueue()
        for _ in range(count):
            self._free.put((torch.empty(0, dtype=torch.uint8), at_once))

    def take(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Give]:
        """Take a vector. Gives it, and how to give it back."""
        try:
            x, wait = self._free.get(timeout=PATIENCE_S)
        except Empty:
            raise StoreError(
                f"no vector came back from the host in {PATIENCE_S:.0f} s",
                why="the host's memory is swapped out, or a disk does not answer",
                do="look at the machine; keep less of the state there",
            ) from None
        wait()
        if x.nbytes < n * dtype.itemsize:
            x = self._streams.host_vector(n * dtype.itemsize, torch.uint8, pin=True)
        return blank(x[: n * dtype.itemsize].view(dtype)), lambda wait: self._free.put((x, wait))
