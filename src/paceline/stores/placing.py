"""What of the optimizer's state lies where, in words."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.comm import NARROW
from paceline.errors import StoreError
from paceline.stores.disk import speed
from paceline.stores.nvme import OnDisk
from paceline.telemetry import Note

if TYPE_CHECKING:
    from paceline.exchange import Exchange
    from paceline.stores.away import Away

_MOMENTS, _MASTER = 8, 4  # bytes an element


def tell(ex: Exchange, aways: dict[int, Away], folder: str) -> None:
    """Worker 0's share of it, on stderr and in its events. aways: by bucket."""
    device = memory = disk = 0
    for b in ex.buckets:
        away, n = aways.get(b.index), b.own.stop - b.own.start
        if away is None:
            device += n * (_MOMENTS + (_MASTER if b.flat.dtype in NARROW else 0))
        elif isinstance(away.vectors, OnDisk):
            disk += n * (_MOMENTS + _MASTER)
        else:
            memory += n * (_MOMENTS + _MASTER)
    words = [f"{_gb(device)} on the device"] if device else []
    words += [f"{_gb(memory)} in memory"] if memory else []
    words += [f"{_gb(disk)} in {folder}{_rates(folder)}"] if disk else []
    text = f"optimizer state: {', '.join(words)}"
    ex.recorder.emit(Note(t=time.monotonic(), text=text))
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _rates(folder: str) -> str:
    with contextlib.suppress(StoreError):  # there may be no room left to measure in
        rate = speed(Path(folder))
        return f" ({rate.write / 1e9:.1f} GB/s out, {rate.read / 1e9:.1f} in)"
    return ""


def _gb(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e8 else f"{n / 1e6:.1f} MB"
