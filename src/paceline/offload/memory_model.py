"""The memory model: how many bytes the optimizer's state and a step take, and what therefore lies where.

This is plain arithmetic without torch. `store="auto"` places the state by it (placement.py), and `paceline plan
--memory` plans by it (tools/plan/memory.py).

[Note: placement] Parameters are in the order in which they are stepped. The last of them stay on the device, for the
next forward needs them first and nothing is left to hide their step behind; the first go to disk, which then has the
longest time. One worker holds, for n numbers of s bytes, of which a have their state offloaded and d of these on disk:

    device   12·(n − a), and above that the larger of the reserve (activations) and what the end of backward needs:
             gradients s·(n − a), a turn in fp32, and the new parameters that come from the host
    host     12·(a − d), s·a for gradients unless they are streamed, a ring of RING·s and, with anything on disk,
             STATE_BUFFERS·12 bytes for each number of the largest parameter there
    disk     12·d

New parameters wait on the device, s·a; where that is too much, only those from disk do, s·d, for they would have to be
read twice; or none. A parameter that is much larger than the others takes more room in the buffers than in memory: it
may be better not to have it on disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

STATE, MOMENTS = 12, 8  # bytes a number: the fp32 master and Adam's two moments, and the moments alone
USABLE = 0.95  # the part of a memory that may be used: allocators leave gaps
RESERVE = 0.1  # the part of a device that is for activations, where the user does not say how much they are
BUCKET = 25 << 20  # bytes of the largest bucket, unless a parameter is larger
AT_ONCE = 1 << 30  # bytes of gradients in fp32 that are stepped at a time: enough to keep a device busy
STRETCH = 1 << 25  # elements whose masters are compared with their parameters at a time
RING = 4  # vectors of new parameters: one that is filled, one that is stepped, one that leaves, one to spare
STATE_BUFFERS = 4  # of state on disk: one is stepped, one written, and one is there while the next is read
PARAMETER_BUFFERS = 4  # of parameters on disk: two on their way to the device, and two being read
DRAFTS = 3  # of new parameters on their way to disk: one is made while others are written
_LARGEST = 4  # sizes that are tried as the largest on disk


# ------------------------------------------------------------------------------------------------ what a step takes


def state_bytes(s: int, moments: int = 2) -> int:
    """Give the bytes of state on the device for each parameter of s bytes: a master of 16-bit ones, and moments."""
    return 4 * moments + (4 if s < 4 else 0)


def turn(n: int, most: int, s: int) -> int:
    """Give the bytes of the device that [Note: in turns] of sharding/turns.py takes.

    n: numbers of s bytes that are stepped there; most: the most of them in one bucket.
    """
    return min(4 * n, max(AT_ONCE, 4 * most)) + compared(min(most, n), s) if s < 4 else 0


def compared(n: int, s: int) -> int:
    """Give the bytes it takes to compare the masters of a bucket of n numbers with its parameters."""
    return s * n + (5 + 2 * s) * min(n, STRETCH)


def ring_bytes(bucket: int, s: int) -> int:
    """Give the host's memory for new parameters on their way to the device. bucket: numbers of the largest."""
    return RING * s * bucket


def buffer_bytes(bucket: int, state: int = STATE) -> int:
    """Give the host's memory for state on its way to disk and back. state: bytes for each number."""
    return STATE_BUFFERS * state * bucket


def parameter_buffer_bytes(bucket: int, s: int) -> int:
    """Give the host's memory for parameters on their way from disk, and for drafts of them."""
    return (PARAMETER_BUFFERS + DRAFTS) * s * bucket


def beside(place: int, *sizes: int) -> list[int]:
    """Give what of each size needs memory of its own beside a place that they fill one after the other.

    Activations are gone when the step is made. So they and what a step needs have one place: the larger one counts.
    """
    own = []
    for size in sizes:
        own.append(max(0, size - place))
        place -= size - own[-1]
    return own


# ------------------------------------------------------------------------------------------------ what lies where


class FreeMemory(NamedTuple):
    """The bytes that one worker may use in each place."""

    device: int
    host: int
    disk: int
    total: int = 0  # of the device, used or not


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one worker has to place."""

    sizes: Sequence[int]  # numbers of its shards of the parameters, in the order in which they are stepped
    s: int = 2  # bytes of a parameter
    keeps_gradients: bool = True  # on the host until the step; else [Note: streamed]
    reserve: int = 0  # bytes of the device for activations
    bucket: int = 0  # numbers that travel together, though parameters may be smaller
    passing: int = 0  # bytes of whole buckets on their way between workers


class Placement(NamedTuple):
    """The number of parameters whose state lies in each place.

    Those that may go to disk and are too large for it are on the host, and not counted there.
    """

    device: int
    host: int
    disk: int
    largest: int  # a parameter with more numbers does not go to disk
    room: bool = True  # the device has room for all new parameters; else it is for those from disk first


def place(load: Load, free: FreeMemory, *, device: int | None = None, host: int | None = None) -> Placement | None:
    """Place the state as [Note: placement] says. None: it does not fit.

    device, host: of how many numbers the state lies there, where the user has said so.
    """
    said = _Said(device, host)
    largest = sorted(set(load.sizes), reverse=True)[: 1 if host is not None else _LARGEST] if free.disk else [0]
    for waiting in _WAITING:
        tries = (_Try(load, free, said, waiting=waiting, largest=limit).placed() for limit in largest)
        if found := [placed for placed in tries if placed is not None]:
            return min(found, key=lambda placed: placed.disk)
    return None


_WAITING = ("offloaded", "disk", "none")  # whose new parameters wait on the device


class _Said(NamedTuple):
    """Of how many numbers the state lies on the device and on the host, where the user has said so."""

    device: int | None
    host: int | None


class _Try:
    """One way to place the state: whose new parameters wait on the device, and how large those on disk may be."""

    def __init__(self, load: Load, free: FreeMemory, said: _Said, *, waiting: str, largest: int) -> None:
        self.load, self.free, self.said = load, free, said
        self.waiting, self.largest = waiting, largest
        fit = [n if n <= largest else 0 for n in load.sizes]
        self.until = [0, *itertools.accumulate(load.sizes)]  # numbers before the i-th
        self.fit_until = [0, *itertools.accumulate(fit)]  # numbers before the i-th that may go to disk
        self.bucket_until = _largest_buckets(load.sizes, load.bucket)
        self.fit_bucket_until = _largest_buckets(fit, load.bucket)

    def placed(self) -> Placement | None:
        """Offload as few parameters as fit, and put as few of these on disk. None: it does not fit.

        The first `offloaded` parameters are not on the device, the first `beyond` of these not on the host if they may.
        """
        count, beyond = len(self.load.sizes), 0
        for offloaded in range(count + 1):
            while not self._fits_host(offloaded, beyond):
                beyond += 1
                if beyond > offloaded:
                    return None
            if STATE * self.fit_until[beyond] > self.free.disk:
                return None
            if self._fits_device(offloaded, beyond):
                return Placement(
                    device=self.until[count] - self.until[offloaded],
                    host=self.until[offloaded] - self.until[beyond],
                    disk=self.fit_until[beyond],
                    largest=self.largest,
                    room=self.waiting == "offloaded",
                )
        return None

    def _fits_host(self, offloaded: int, beyond: int) -> bool:
        if self.said.host is not None:
            return self.until[offloaded] - self.until[beyond] <= self.said.host
        s, n = self.load.s, self.until[offloaded]
        need = STATE * (n - self.fit_until[beyond]) + ring_bytes(self.bucket_until[offloaded], s)
        need += s * n if self.load.keeps_gradients else 0
        return need + buffer_bytes(self.fit_bucket_until[beyond]) <= self.free.host

    def _fits_device(self, offloaded: int, beyond: int) -> bool:
        load, n = self.load, self.until[-1] - self.until[offloaded]
        if self.said.device is not None:
            return n <= self.said.device
        waiting = {"offloaded": self.until[offloaded], "disk": self.fit_until[beyond], "none": 0}[self.waiting]
        end_of_backward = load.s * (n + waiting) + turn(n, self.bucket_until[-1], load.s) + load.passing
        need = state_bytes(load.s) * n + load.reserve + sum(beside(load.reserve, end_of_backward))
        return need <= self.free.device


def _largest_buckets(sizes: Sequence[int], bucket: int) -> list[int]:
    """Give the numbers of the largest bucket of the first i parameters, for every i."""
    most = itertools.accumulate(sizes, max, initial=0)
    return [min(max(n, bucket), total) for n, total in zip(most, itertools.accumulate(sizes, initial=0), strict=True)]
