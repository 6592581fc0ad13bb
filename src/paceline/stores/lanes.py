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

from paceline.errors import StoreError
from paceline.stores.crew import PATIENCE_S

RING = 4  # vectors: one that comes, one that is stepped, one that goes, one to spare
_PAGE = mmap.PAGESIZE
_SPARE, CLAIMED = 16, 32  # of the device's memory one part in so many; where it is counted what goes there

Give = Callable[[Callable[[], None]], None]  # back, with a wait before which it must not be written again


class Lanes:
    """One lane out of the device and one back, each in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.spare = _SPARE
        self.promised: Callable[[], int] = lambda: 0  # bytes on the device that somebody has not taken yet
        self._out: Any = torch.cuda.Stream(device) if self.cuda else None
        self._back: Any = torch.cuda.Stream(device) if self.cuda else None

    def out(self, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copy from the device, as it is when what was launched so far has run: (there, host) each. Gives a wait."""
        with self._on(self._out):
            for there, host in pairs:
                host.copy_(there, non_blocking=True)
                if self.cuda:
                    there.record_stream(self._out)  # its memory may be given back meanwhile
            return self._event(self._out)

    def back(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """A copy on the device, and a wait until `host` may be written again. The copy is for `arrive`."""
        if not self.cuda:
            return host.clone(), at_once
        with torch.cuda.stream(self._back):
            there = torch.empty_like(host, device=self.device)
            there.copy_(host, non_blocking=True)
            return there, self._event(self._back)

    def bring(self, host: Tensor, there: Tensor) -> tuple[Callable[[], Tensor], Callable[[], None]]:
        """Copy to memory of the device, after what was launched so far. Gives a wait after which `there` may be used by
        what is launched from then on, and one until `host` may be written again.
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

    def room(self, others: int = 0) -> bool:
        """Is there enough left on the device for what need not be there yet? The rest is for who computes, and so many
        bytes for others.
        """
        if not self.cuda:
            return True
        free, total = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached - self.promised() - others > total // self.spare

    def arrive(self, *theres: Tensor) -> None:
        """What was sent back so far may be used by what is launched from now on."""
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
        event = torch.cuda.Event(blocking=True)  # who waits for it must not take a core from who steps
        event.record(stream)
        return event.synchronize

    def vector(self, n: int, dtype: torch.dtype, *, pin: bool = False) -> Tensor:
        """Host memory in large pages, zero. pin: the device may read and write it by itself.

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
    """Pages that may be pinned: the device must forget them before the system does."""

    at: int | None = None

    def __del__(self) -> None:
        if self.at is not None:
            torch.cuda.cudart().cudaHostUnregister(self.at)


def at_once() -> None:
    """A wait for what is there."""


class Ring:
    """A few pinned vectors that take turns: each is handed out again when the copy that reads it has ended."""

    def __init__(self, lanes: Lanes, count: int = RING) -> None:
        self._lanes = lanes
        self._free: SimpleQueue[tuple[Tensor, Callable[[], None]]] = SimpleQueue()
        for _ in range(count):
            self._free.put((torch.empty(0, dtype=torch.uint8), at_once))

    def take(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Give]:
        """A vector, and how to give it back."""
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
            x = self._lanes.vector(n * dtype.itemsize, torch.uint8, pin=True)
        return x[: n * dtype.itemsize].view(dtype), lambda wait: self._free.put((x, wait))
