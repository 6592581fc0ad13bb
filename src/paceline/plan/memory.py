"""What of a training job lies where, in bytes: by arithmetic, for every layout and store.

A worker of W holds, for each of P parameters of s bytes (s = 2: bf16 or fp16, 4: fp32):

                 parameters   gradients   master    moments       16 bits, AdamW    fp32, AdamW
    replicated   s            s           4         4k            16                16
    zero1        s            s           4/W       4k/W          4 + 12/W          8 + 8/W
    zero2        s            s/W         4/W       4k/W          2 + 14/W          4 + 12/W
    zero3        s/W          s/W         4/W       4k/W          16/W              16/W

k is the optimizer's: 2 for adamw, 1 for momentum, 0 for sgd; a master is kept of 16-bit parameters only. The store says
where master and moments lie: on the device, on the host (`cpu`), on disk (`nvme`), or `fractional`: what fits on the
device, then what fits on the host, the rest on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a parameter
MOMENTS = {"adamw": 2, "momentum": 1, "sgd": 0}  # numbers an optimizer remembers of each
LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
STORES = ("device", "fractional", "cpu", "nvme")
USABLE = 0.95  # of what there is: allocators leave gaps
BUCKET = 25 << 20  # bytes, as prepare() cuts them on a fast link

# Whole buckets on the device at a time: none that is not a gradient anyway; the one whose parameters are gathered; the
# one being filled and the one on its way; the parameters in use and next, and the gradients of both.
_ON_THE_WAY = {"replicated": 0, "zero1": 1, "zero2": 2, "zero3": 4}
# Stretches of the size of a bucket on the host: one that comes, one that is stepped, one that goes, one to spare.
_STAGED = 4


class Bytes(NamedTuple):
    """In three places."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and by how many. largest: elements of the largest parameter; activations: bytes a worker."""

    parameters: int
    largest: int = 0
    workers: int = 1
    dtype: str = "bf16"
    optimizer: str = "adamw"
    activations: int = 0

    @property
    def s(self) -> int:
        return WIDTH[self.dtype]

    @property
    def state(self) -> int:
        """Bytes of master and moments, for each parameter."""
        return 4 * MOMENTS[self.optimizer] + (4 if self.s < 4 else 0)

    @property
    def bucket(self) -> int:
        """Elements: a bucket is not smaller than the largest parameter, which is not cut."""
        return min(self.parameters, max(BUCKET // self.s, self.largest))


@dataclass(frozen=True)
class Row:
    """One layout with one store: where each part of the job lies, on each worker, and how much room that lacks."""

    layout: str
    store: str
    parts: dict[str, Bytes]
    lacks: Bytes

    @property
    def total(self) -> Bytes:
        return Bytes(*map(sum, zip(*self.parts.values(), strict=True)))

    @property
    def fits(self) -> bool:
        return not any(self.lacks)


def rows(job: Job, room: Bytes, layouts: Iterable[str] = LAYOUTS, stores: Iterable[str] = STORES) -> list[Row]:
    """Each layout with each store it goes with, what costs less time first. room: for one worker."""
    layouts, stores = set(layouts), set(stores)
    usable = Bytes(*(int(USABLE * there) for there in room))
    return [
        _row(job, usable, layout, store)
        for store in STORES
        for layout in LAYOUTS
        if store in stores and layout in layouts and (layout != "replicated" or store == "device")
    ]


def best(found: Iterable[Row]) -> Row | None:
    """Of those that fit the first that needs no disk, else no host, else the first."""
    fitting = (row for row in found if row.fits)
    return min(fitting, key=lambda row: (row.total.disk > 0, row.total.host > 0), default=None)


def _row(job: Job, room: Bytes, layout: str, store: str) -> Row:
    mine = -(-job.parameters // job.workers)
    owned = job.parameters if layout == "replicated" else mine
    parts = {
        "parameters": Bytes(device=job.s * (mine if layout == "zero3" else job.parameters)),
        "gradients": Bytes(device=job.s * (mine if layout in ("zero2", "zero3") else job.parameters)),
        "activations": Bytes(device=job.activations),
        "on the way": Bytes(device=job.s * job.bucket * _ON_THE_WAY[layout]),
    }
    # On the device a slice of a 16-bit gradient is stepped in fp32, when the activations are gone.
    wide = 0 if job.s == 4 or layout == "replicated" else max(0, 4 * owned - job.activations)
    staged = min(_STAGED * BUCKET // job.s, owned)
    left = Bytes(
        device=room.device - sum(part.device for part in parts.values()),
        host=room.host - staged * job.s,
        disk=room.disk,
    )
    state = _placed(store, owned, job.state, wide / owned, left, staged)
    for name, width in (("master", job.state - 4 * MOMENTS[job.optimizer]), ("moments", 4 * MOMENTS[job.optimizer])):
        parts[name] = Bytes(*(width * n for n in state))
    parts["step in fp32"] = Bytes(device=wide * state.device // owned)
    if state.device < owned:
        parts["staged"] = Bytes(host=staged * (job.s + (job.state if state.disk else 0)))
    total = Row(layout, store, parts, Bytes()).total
    return Row(layout, store, parts, Bytes(*(max(0, n - there) for n, there in zip(total, room, strict=True))))


def _placed(store: str, n: int, width: int, wide: float, left: Bytes, staged: int) -> Bytes:
    """How many of n parameters have their master and moments, `width` bytes each, in which place."""
    if store == "device" or width == 0:
        return Bytes(device=n)
    if store == "cpu":
        return Bytes(host=n)
    if store == "nvme":
        return Bytes(disk=n)
    device = min(n, max(0, int(left.device / (width + wide))))
    host = n - device
    if host * width > left.host:  # so some of it goes to disk, and what goes there is staged too
        host = max(0, left.host - staged * width) // width
    return Bytes(device, host, n - device - host)
