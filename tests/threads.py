"""Workers as threads: run(world, fn) calls fn(comm) in `world` threads and gives the results in rank order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline.comm.threads import Room, ThreadComm


def run(world_size: int, fn: Callable[[ThreadComm], Any], *, timeout_s: float = 30.0) -> list[Any]:
    room = Room(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    errors: list[Exception | None] = [None] * world_size

    def work(rank: int) -> None:
        try:
            results[rank] = fn(ThreadComm(room, rank))
        except Exception as error:
            errors[rank] = error
            room.fail(error)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(world_size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * timeout_s)
        assert not t.is_alive(), "a worker hangs"
    first = room.error or next((e for e in errors if e), None)
    if first:
        raise first
    return results
