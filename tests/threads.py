"""Workers as threads: run(world, fn) calls fn(comm) in `world` threads and gives the results in rank order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline.threadcomm import Room, ThreadComm


def run(world: int, fn: Callable[[ThreadComm], Any], *, deadline_s: float = 30.0) -> list[Any]:
    room = Room(world, deadline_s)
    results: list[Any] = [None] * world
    errors: list[Exception | None] = [None] * world

    def work(rank: int) -> None:
        try:
            results[rank] = fn(ThreadComm(room, rank))
        except Exception as error:
            errors[rank] = error
            room.fail(error)

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * deadline_s)
        assert not t.is_alive(), "a worker hangs"
    first = room.error or next((e for e in errors if e), None)
    if first:
        raise first
    return results
