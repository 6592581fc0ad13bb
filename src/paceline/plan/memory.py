"""What of a training job lies where, in bytes: by arithmetic, for every layout and store.

A worker of W holds, for each of P parameters of s bytes (s = 2: bf16 or fp16, 4: fp32):

                 parameters   gradients   master    moments       16 bits, AdamW    fp32, AdamW
    replicated   s            s           4         4k            16                16
    zero1        s            s           4/W       4k/W          4 + 12/W          8 + 8/W
    zero2        s            s/W         4/W       4k/W          2 + 14/W          4 + 12/W
    zero3        s/W          s/W         4/W       4k/W          16/W              16/W

k is the optimizer's: 2 for adamw, 1 for momentum, 0 for sgd; a master is kept of 16-bit parameters only. The store says
where master and moments lie: on the device, on the host (`cpu`), on disk (`nvme`), or `fractional`: what fits on the
device, then what fits on the host, the rest on disk. Where they are not on the device gradients go to the host too, and
stay there until the step, unless they only pass through (undo=False). With zero3 the parameters may go along
(`cpu+params`, `nvme+params`): on the device are then those in use and next, on disk each has two places.

[Note: one place for both] Activations are gone when the step is made. So they and what a step needs (gradients, a turn
of them in fp32 for masters on the device; new parameters from the host) have one place: the larger of the two counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a parameter
MOMENTS = {"adamw": 2, "momentum": 1, "sgd": 0}  # numbers an optimizer remembers of each
LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
STORES = ("device", "fractional", "cpu", "nvme", "cpu+params", "nvme+params")
USABLE = 0.95  # of what there is: allocators leave gaps
SMALLEST, LARGEST = 1 << 20, 25 << 20  # bytes of a bucket, which is a BUCKETS-th of the model else
BUCKETS = 32
TURN = 1 << 30  # bytes of gradients in fp32 at a time: [Note: in turns], shards/turns.py
STRETCH = 1 << 25  # elements whose masters are compared with their parameters at a time

# Whole buckets on the device at a time: none that is not a gradient anyway; the one whose parameters are gathered; the
# one being filled and the one on its way; the parameters in use and next, and the gradients of both.
_ON_THE_WAY = {"replicated": 0, "zero1": 1, "zero2": 2, "zero3": 4}
# Stretches of the size of a bucket on the host: one that comes, one that is stepped, one that goes, one to spare.
_STAGED = 4
# ... of parameters that are on disk: read for the device, and written after a step.
_SHELF = 7


class Bytes(NamedTuple):
    """In three places."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and by how many. largest: elements of the largest parameter; inner: ... that is no embedding,
    which are stepped first and last; activations: bytes a worker.
    """

    parameters: int
    largest: int = 0
    inner: int = 0
    workers: int = 1
    dtype: str = "bf16"
    optimizer: str = "adamw"
    activations: int = 0
    undo: bool = True

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
        return self._bucket(self.largest)

    @property
    def inner_bucket(self) -> int:
        """... without the embeddings."""
        return self._bucket(self.inner or self.largest)

    def _bucket(self, largest: int) -> int:
        usual = min(max(self.parameters * self.s // BUCKETS, SMALLEST), LARGEST) // self.s
        return min(self.parameters, max(usual, largest))


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
        if store in stores and layout in layouts and _together(layout, store)
    ]


def _together(layout: str, store: str) -> bool:
    if store.endswith("+params"):
        return layout == "zero3"
    return layout != "replicated" or store == "device"


def best(found: Iterable[Row]) -> Row | None:
    """Of those that fit the first that needs no disk, else no host, else the first. `cpu` and `nvme` are for who asks
    for them alone: `fractional` keeps on the device what it can.
    """
    fitting = (row for row in found if row.fits)
    return min(fitting, key=lambda row: (row.total.disk > 0, row.total.host > 0), default=None)


def _row(job: Job, room: Bytes, layout: str, store: str) -> Row:
    mine = -(-job.parameters // job.workers)
    owned = job.parameters if layout == "replicated" else mine
    where, _, params = store.partition("+")
    state = _placed(job, room, layout, where, owned)
    held = parts(job, layout, owned, state, lent=bool(params))
    total = Row(layout, store, held, Bytes()).total
    lacks = Bytes(*(max(0, n - there) for n, there in zip(total, room, strict=True)))
    if 0 < lacks.device <= (new := held["new parameters"].device):  # they come later then, one bucket at a time
        held["new parameters"] = Bytes(device=new - lacks.device)
        lacks = lacks._replace(device=0)
    return Row(layout, store, held, lacks)


def parts(job: Job, layout: str, owned: int, state: Bytes, *, lent: bool = False) -> dict[str, Bytes]:
    """What lies where at the worst moment. state: of how many parameters master and moments lie in which place. lent:
    the parameters lie there too.
    """
    away, shared = owned - state.device, layout in ("zero2", "zero3")
    masters = state.device if job.s < 4 and layout != "replicated" else 0
    bucket, inner = (-(-n * owned // job.parameters) for n in (job.bucket, job.inner_bucket))
    if not (state.device or state.host):
        inner = bucket  # all are on disk, embeddings too
    # [Note: one place for both]
    gradients, wide, new = _above(
        job.activations,
        job.s * (state.device if shared else job.parameters),
        _in_fp32(masters, bucket, job.s),
        0 if lent else job.s * away,
    )
    on_the_way = _ON_THE_WAY[layout] if job.workers > 1 else 2 if lent else 0  # alone: parameters and gradients
    ring, buffers = (min(_STAGED * bucket, away), min(_STAGED * inner, state.disk))
    moments = 4 * MOMENTS[job.optimizer]
    return {
        "parameters": _slices(job.s * owned, job.s * bucket, state)
        if lent
        else Bytes(device=job.s * (owned if layout == "zero3" else job.parameters)),
        "activations": Bytes(device=job.activations),
        "gradients": Bytes(gradients, job.s * away if job.undo else 0),
        "step in fp32": Bytes(device=wide),
        "new parameters": Bytes(device=new),
        "on the way": Bytes(device=on_the_way * job.s * job.bucket),
        "master": Bytes(*((job.state - moments) * n for n in state)),
        "moments": Bytes(*(moments * n for n in state)),
        "staged": Bytes(host=ring * job.s + buffers * job.state),
    }


def _slices(size: int, bucket: int, state: Bytes) -> Bytes:
    """Parameters that are where their state is."""
    return Bytes(host=min(_SHELF * bucket, size), disk=2 * size) if state.disk else Bytes(host=size)


def _in_fp32(masters: int, bucket: int, s: int) -> int:
    """A turn of gradients, and what it takes to compare the masters of a bucket with its parameters."""
    n = min(masters, bucket)
    return min(4 * masters, max(TURN, 4 * n)) + s * n + (5 + 2 * s) * min(n, STRETCH)


def _above(place: int, *sizes: int) -> list[int]:
    """What of each there is beside that place, which they fill first."""
    beside = []
    for size in sizes:
        beside.append(max(0, size - place))
        place -= size - beside[-1]
    return beside


def _placed(job: Job, room: Bytes, layout: str, store: str, owned: int) -> Bytes:
    """Of how many parameters master and moments lie in which place."""
    if store == "device" or job.state == 0:
        return Bytes(device=owned)
    if store == "cpu":
        return Bytes(host=owned)
    if store == "nvme":
        return Bytes(disk=owned)

    with_room = _filled(job, room, layout, owned, ahead=True)
    return with_room if with_room.disk == 0 else _filled(job, room, layout, owned, ahead=False)


def _filled(job: Job, room: Bytes, layout: str, owned: int, *, ahead: bool) -> Bytes:
    """`fractional`. ahead: there is room on the device for the new parameters; they come later otherwise."""

    def used(*state: int) -> Bytes:
        held = parts(job, layout, owned, Bytes(*state))
        if not ahead:
            del held["new parameters"]
        return Row(layout, "", held, Bytes()).total

    device = _most(owned, lambda n: used(n).device <= room.device)
    away = owned - device
    if used(device, away).host <= room.host:
        return Bytes(device, away)
    host = _most(away - 1, lambda n: used(device, n, away - n).host <= room.host)
    return Bytes(device, host, away - host)


def _most(n: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to n that fits; what is larger does not."""
    return bisect.bisect_left(range(1, n + 1), True, key=lambda k: not fits(k))
