"""Where a layout's optimizer state lies: as its knobs say, or as it fits. And the line that tells the user."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from paceline.comm.lane import NARROW
from paceline.errors import StoreError
from paceline.offload.disk import speed
from paceline.offload.free_memory import measured
from paceline.offload.memory_model import BUCKET, MOMENTS, RESERVE, STATE, FreeMemory, Load, Placement, place
from paceline.offload.nvme import OnDisk
from paceline.offload.params import DiskParameters
from paceline.telemetry.events import Note

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange
    from paceline.offload.offloaded import OffloadedBucket


class StoreKnobs(Protocol):
    """What a layout says of where its optimizer state is to lie."""

    @property
    def store(self) -> str: ...

    @property
    def step(self) -> str: ...

    path: str
    device_gb: float | None
    host_gb: float | None
    reserve_gb: float | None


def choose(
    layout: StoreKnobs, params: Sequence[Tensor], b: Bucket, world_size: int
) -> tuple[Placement, FreeMemory | None]:
    """Say how much of the state of these parameters lies where, and by which free memory that was chosen, if it was."""
    sizes, s = [p.numel() for p in params], b.flat.element_size()
    everything = sum(sizes)
    device, host = _numbers(layout.device_gb), _numbers(layout.host_gb)
    if layout.store == "cpu":
        return Placement(device or 0, everything, 0, 0), None
    if layout.store == "nvme":
        return Placement(device or 0, host or 0, everything, everything), None
    free = measured(b.device, layout.path)
    if free is None:
        return Placement(everything, 0, 0, 0), None
    coming = sum(max(p.nbytes - p.untyped_storage().nbytes(), 0) for p in params)  # they may have no memory yet
    free = free._replace(device=max(free.device - coming // world_size, 0))
    load = Load(
        sizes=[-(-n // world_size) for n in reversed(sizes)],
        s=s,
        keeps_gradients=layout.step != "stream",
        reserve=int(RESERVE * free.total if layout.reserve_gb is None else layout.reserve_gb * 1e9),
        bucket=BUCKET // s // world_size,
        passing=2 * s * max(sizes) if world_size > 1 else 0,
    )
    chosen = place(load, free, device=device, host=host)
    if chosen is None:
        raise _no_room(load, free, layout.path)
    return chosen, free


def _numbers(gb: float | None) -> int | None:
    """Give the number of parameters whose state takes so many gigabytes."""
    return None if gb is None else round(gb * 1e9 / STATE)


def _no_room(load: Load, free: FreeMemory, folder: str) -> StoreError:
    n = sum(load.sizes)
    streaming_helps = load.keeps_gradients and place(replace(load, keeps_gradients=False), free) is not None
    return StoreError(
        f"the optimizer's state, {_gb(STATE * n)}, does not fit",
        why=f"{_free(free, folder)}; of the device {_gb(load.reserve)} are for activations"
        + (f", and gradients on the host take {load.s} bytes a parameter" if load.keeps_gradients else ""),
        do="step='stream', which does not keep gradients on the host, makes it fit"
        if streaming_helps
        else f"{'' if folder else 'give path, a folder on a local disk; '}more workers, or less for activations "
        "(reserve_gb); `paceline plan --memory` says what would fit",
    )


def _free(free: FreeMemory, folder: str) -> str:
    words = [f"{_gb(free.device)} of {_gb(free.total)} on the device", f"{_gb(free.host)} of the host's memory"]
    return f"free: {', '.join([*words, *([f'{_gb(free.disk)} in {folder}'] if folder else [])])}"


def tell(ex: Exchange, offloaded: Mapping[int, OffloadedBucket], folder: str, free: FreeMemory | None) -> None:
    """Say on stderr, and in the events, where worker 0's state lies. free: the memory by which that was chosen."""
    device = memory = disk = 0
    for b in ex.buckets:
        one, n = offloaded.get(b.index), b.own.stop - b.own.start
        if one is None:
            device += n * (STATE if b.flat.dtype in NARROW else MOMENTS)
        elif isinstance(one.vectors, OnDisk):
            disk += n * STATE
        else:
            memory += n * STATE
    words = [f"{_gb(device)} on the device"] if device else []
    words += [f"{_gb(memory)} in memory"] if memory else []
    words += [f"{_gb(disk)} in {folder}{_rates(folder)}"] if disk else []
    text = f"optimizer state: {', '.join(words)}"
    stored = [one for one in offloaded.values() if one.store is not None]
    if stored:
        size = sum(one.vectors.n * one.dtype.itemsize for one in stored)
        text += f"; parameters: {_gb(size)} in {folder if isinstance(stored[0].store, DiskParameters) else 'memory'}"
    text += f"; {_free(free, folder)}" if free is not None else ""
    ex.recorder.emit(Note(t=time.monotonic(), text=text))
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _rates(folder: str) -> str:
    with contextlib.suppress(StoreError):  # there may be no room left to measure in
        rate = speed(Path(folder))
        return f" ({rate.write / 1e9:.1f} GB/s out, {rate.read / 1e9:.1f} in)"
    return ""


def _gb(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"
