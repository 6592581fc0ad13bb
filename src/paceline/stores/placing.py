"""What of the optimizer's state lies where: by the knobs, or as it fits; and in words."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.comm import NARROW
from paceline.errors import StoreError
from paceline.stores.choosing import MOMENTS, RESERVE, STATE, Chosen, Load, Room, measured, place
from paceline.stores.disk import speed
from paceline.stores.nvme import OnDisk
from paceline.stores.params import InFile
from paceline.telemetry import Note

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange
    from paceline.shards.pieces import Shards
    from paceline.stores.away import Away

_BUCKET = 25 << 20  # bytes, where parameters are smaller


def choose(layout: Shards, params: Sequence[Tensor], b: Bucket, world: int) -> tuple[Chosen, Room | None]:
    """How much of these parameters' state lies where, and the room it was chosen by, if it was."""
    sizes, s = [p.numel() for p in params], b.flat.element_size()
    everything = sum(sizes)
    device, host = _numbers(layout.device_gb), _numbers(layout.host_gb)
    if layout.store == "cpu":
        return Chosen(device or 0, everything, 0, 0), None
    if layout.store == "nvme":
        return Chosen(device or 0, host or 0, everything, everything), None
    room = measured(b.device, layout.path)
    if room is None:
        return Chosen(everything, 0, 0, 0), None
    coming = sum(max(p.nbytes - p.untyped_storage().nbytes(), 0) for p in params)  # they may have no memory yet
    room = room._replace(device=max(room.device - coming // world, 0))
    load = Load(
        sizes=[-(-n // world) for n in reversed(sizes)],
        s=s,
        undo=layout.undo,
        reserve=int(RESERVE * room.total if layout.reserve_gb is None else layout.reserve_gb * 1e9),
        bucket=_BUCKET // s // world,
        passing=2 * s * max(sizes) if world > 1 else 0,
    )
    chosen = place(load, room, device=device, host=host)
    if chosen is None:
        raise _no_room(load, room, layout.path)
    return chosen, room


def _numbers(gb: float | None) -> int | None:
    """Whose state that is."""
    return None if gb is None else round(gb * 1e9 / STATE)


def _no_room(load: Load, room: Room, folder: str) -> StoreError:
    n = sum(load.sizes)
    passing = load.undo and place(replace(load, undo=False), room) is not None
    return StoreError(
        f"the optimizer's state, {_gb(STATE * n)}, does not fit",
        why=f"{_free(room, folder)}; of the device {_gb(load.reserve)} are for activations"
        + (f", and gradients on the host take {load.s} bytes a parameter" if load.undo else ""),
        do="undo=False, which does not keep gradients on the host, makes it fit"
        if passing
        else f"{'' if folder else 'give path, a folder on a local disk; '}more workers, or less for activations "
        "(reserve_gb); `paceline plan --memory` says what would fit",
    )


def _free(room: Room, folder: str) -> str:
    words = [f"{_gb(room.device)} of {_gb(room.total)} on the device", f"{_gb(room.host)} of the host's memory"]
    return f"free: {', '.join([*words, *([f'{_gb(room.disk)} in {folder}'] if folder else [])])}"


def tell(ex: Exchange, aways: dict[int, Away], folder: str, room: Room | None) -> None:
    """Worker 0's share of it, on stderr and in its events. aways: by bucket; room: by which it was chosen."""
    device = memory = disk = 0
    for b in ex.buckets:
        away, n = aways.get(b.index), b.own.stop - b.own.start
        if away is None:
            device += n * (STATE if b.flat.dtype in NARROW else MOMENTS)
        elif isinstance(away.vectors, OnDisk):
            disk += n * STATE
        else:
            memory += n * STATE
    words = [f"{_gb(device)} on the device"] if device else []
    words += [f"{_gb(memory)} in memory"] if memory else []
    words += [f"{_gb(disk)} in {folder}{_rates(folder)}"] if disk else []
    text = f"optimizer state: {', '.join(words)}"
    homes = [(away.home, b) for b in ex.buckets if (away := aways.get(b.index)) and away.home]
    if homes:
        size = sum((b.own.stop - b.own.start) * b.flat.itemsize for _, b in homes)
        text += f"; parameters: {_gb(size)} in {folder if isinstance(homes[0][0], InFile) else 'memory'}"
    text += f"; {_free(room, folder)}" if room is not None else ""
    ex.recorder.emit(Note(t=time.monotonic(), text=text))
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _rates(folder: str) -> str:
    with contextlib.suppress(StoreError):  # there may be no room left to measure in
        rate = speed(Path(folder))
        return f" ({rate.write / 1e9:.1f} GB/s out, {rate.read / 1e9:.1f} in)"
    return ""


def _gb(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"
