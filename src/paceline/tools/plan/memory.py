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
stay there until the step, unless they are streamed (step="stream"). With zero3 the parameters may go along
(`cpu+params`, `nvme+params`): on the device are then those in use and next, on disk each has two places.

[Note: one place for both] Activations are gone when the step is made. So they and what a step needs (gradients, a turn
of them in fp32 for masters on the device; new parameters from the host) have one place: the larger of the two counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.offload.memory_model import (
    BUCKET,
    USABLE,
    beside,
    buffer_bytes,
    parameter_buffer_bytes,
    ring_bytes,
    state_bytes,
    turn,
)

WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a parameter
MOMENTS = {"adamw": 2, "momentum": 1, "sgd": 0}  # numbers an optimizer remembers of each
LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
STORES = ("device", "fractional", "cpu", "nvme", "cpu+params", "nvme+params")
SMALLEST = 1 << 20  # bytes of a bucket, which has at most BUCKET and is a BUCKETS-th of the model between the two
BUCKETS = 32

# Whole buckets on the device at a time. zero1: the one whose parameters are gathered; zero2: the one being filled and
# the one on its way; zero3: the parameters in use and next, and the gradients of both.
_ON_THE_WAY = {"replicated": 0, "zero1": 1, "zero2": 2, "zero3": 4}


class Bytes(NamedTuple):
    """Bytes, or numbers, in each of three places."""

    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and by how many workers."""

    parameters: int
    largest: int = 0  # elements of the largest parameter
    inner: int = 0  # elements of the largest that is no embedding: embeddings are stepped first and last
    workers: int = 1
    dtype: str = "bf16"
    optimizer: str = "adamw"
    activations: int = 0  # bytes a worker
    keeps_gradients: bool = True  # on the host until the step; not with step=stream

    @property
    def s(self) -> int:
        """Bytes of a parameter."""
        return WIDTH[self.dtype]

    @property
    def state(self) -> int:
        """The bytes of master and moments for each parameter."""
        return state_bytes(self.s, MOMENTS[self.optimizer])

    @property
    def bucket(self) -> int:
        """The elements of the largest bucket, which is not smaller than the largest parameter."""
        return self._bucket(self.largest)

    @property
    def inner_bucket(self) -> int:
        """The elements of the largest bucket without embeddings."""
        return self._bucket(self.inner or self.largest)

    def _bucket(self, largest: int) -> int:
        usual = min(max(self.parameters * self.s // BUCKETS, SMALLEST), BUCKET) // self.s
        return min(self.parameters, max(usual, largest))


@dataclass(frozen=True)
class PlanRow:
    """One layout with one store: where each part of the job lies on each worker, and how many bytes are lacking."""

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


def rows(job: Job, room: Bytes, layouts: Iterable[str] = LAYOUTS, stores: Iterable[str] = STORES) -> list[PlanRow]:
    """Plan each layout with each store it goes with, what costs less time first. room: the bytes of one worker."""
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


def best(found: Iterable[PlanRow]) -> PlanRow | None:
    """Give the first row that fits and needs no disk, else no host, else the first that fits.

    `fractional` comes before `cpu` and `nvme`, because it keeps on the device what it can.
    """
    fitting = (row for row in found if row.fits)
    return min(fitting, key=lambda row: (row.total.disk > 0, row.total.host > 0), default=None)


def _row(job: Job, room: Bytes, layout: str, store: str) -> PlanRow:
    mine = -(-job.parameters // job.workers)
    owned = job.parameters if layout == "replicated" else mine
    where, _, params = store.partition("+")
    state = _placed(job, room, layout, where, owned)
    held = parts(job, layout, owned, state, offloaded_params=bool(params))
    total = PlanRow(layout, store, held, Bytes()).total
    lacks = Bytes(*(max(0, n - there) for n, there in zip(total, room, strict=True)))
    if 0 < lacks.device <= (new := held["new parameters"].device):  # these come later then, one bucket at a time
        held["new parameters"] = Bytes(device=new - lacks.device)
        lacks = lacks._replace(device=0)
    return PlanRow(layout, store, held, lacks)


def parts(job: Job, layout: str, owned: int, state: Bytes, *, offloaded_params: bool = False) -> dict[str, Bytes]:
    """Give what lies where at the worst moment.

    state: of how many parameters master and moments lie in which place. offloaded_params: the parameters lie there too.
    """
    away, shared = owned - state.device, layout in ("zero2", "zero3")
    masters = state.device if job.s < 4 and layout != "replicated" else 0
    bucket, inner = (-(-n * owned // job.parameters) for n in (job.bucket, job.inner_bucket))
    if not (state.device or state.host):
        inner = bucket  # all are on disk, embeddings too
    # [Note: one place for both]
    gradients, wide, new = beside(
        job.activations,
        job.s * (state.device if shared else job.parameters),
        turn(masters, bucket, job.s),
        0 if offloaded_params else job.s * away,
    )
    alone = 2 if offloaded_params else 0  # buckets of one worker: parameters from the host, and their gradients
    on_the_way = _ON_THE_WAY[layout] if job.workers > 1 else alone
    ring = min(ring_bytes(bucket, job.s), job.s * away)
    buffers = min(buffer_bytes(inner, job.state), job.state * state.disk)
    moments = 4 * MOMENTS[job.optimizer]
    return {
        "parameters": _offloaded_parameters(job.s, owned, bucket, state)
        if offloaded_params
        else Bytes(device=job.s * (owned if layout == "zero3" else job.parameters)),
        "activations": Bytes(device=job.activations),
        "gradients": Bytes(gradients, job.s * away if job.keeps_gradients else 0),
        "step in fp32": Bytes(device=wide),
        "new parameters": Bytes(device=new),
        "on the way": Bytes(device=on_the_way * job.s * job.bucket),
        "master": Bytes(*((job.state - moments) * n for n in state)),
        "moments": Bytes(*(moments * n for n in state)),
        "staged": Bytes(host=ring + buffers),
    }


def _offloaded_parameters(s: int, owned: int, bucket: int, state: Bytes) -> Bytes:
    """Give the bytes of parameters that lie where their state is. On disk each has two places."""
    if not state.disk:
        return Bytes(host=s * owned)
    return Bytes(host=min(parameter_buffer_bytes(bucket, s), s * owned), disk=2 * s * owned)


def _placed(job: Job, room: Bytes, layout: str, store: str, owned: int) -> Bytes:
    """Say of how many parameters master and moments lie in which place."""
    if store == "device" or job.state == 0:
        return Bytes(device=owned)
    if store == "cpu":
        return Bytes(host=owned)
    if store == "nvme":
        return Bytes(disk=owned)

    with_room = _filled(job, room, layout, owned, ahead=True)
    return with_room if with_room.disk == 0 else _filled(job, room, layout, owned, ahead=False)


def _filled(job: Job, room: Bytes, layout: str, owned: int, *, ahead: bool) -> Bytes:
    """Fill the device, then the host, then the disk. ahead: new parameters have room on the device."""

    def used(*state: int) -> Bytes:
        held = parts(job, layout, owned, Bytes(*state))
        if not ahead:
            del held["new parameters"]
        return PlanRow(layout, "", held, Bytes()).total

    device = _most(owned, lambda n: used(n).device <= room.device)
    away = owned - device
    if used(device, away).host <= room.host:
        return Bytes(device, away)
    host = _most(away - 1, lambda n: used(device, n, away - n).host <= room.host)
    return Bytes(device, host, away - host)


def _most(n: int, fits: Callable[[int], bool]) -> int:
    """Give the largest number up to n that fits."""
    return bisect.bisect_left(range(1, n + 1), True, key=lambda k: not fits(k))
