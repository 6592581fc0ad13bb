"""A server's process: a thread for each worker, and an eye on the worker that started it."""

from __future__ import annotations

import datetime
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import torch

from paceline.serving.comm import Pair, Place
from paceline.serving.desk import Desk
from paceline.waiting import SLICE_S

_LOOK_S = 0.1  # how often it looks whether its worker lives
_LAST_WORDS_S = 1.0  # to tell the others that it does not


def main(words: list[str]) -> None:
    place = Place.parse(words)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all: the worker decides
    torch.set_num_threads(1)  # it shares its host with a worker
    store, desk = place.store(), Desk()
    place.here(store, os.getpid(), socket.gethostname())
    threads = [
        threading.Thread(target=_serve, args=(desk, place, store, r), name=f"worker {r}", daemon=True)
        for r in range(place.world)
    ]
    for thread in threads:
        thread.start()
    end = math.inf
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        if os.getppid() != place.parent:
            end = min(end, time.monotonic() + _LAST_WORDS_S)
        time.sleep(_LOOK_S)


def _serve(desk: Desk, place: Place, store: Any, worker: int) -> None:
    """One worker's requests, one after the other, until its connection closes."""
    try:
        pair = Pair(place.pair(store, worker), 1, place.deadline_s)
        while True:
            answer = desk.ask(worker, pair.receive(_wait))
            if answer is not None:
                pair.send(answer)
                pair.sent(_wait)
    except RuntimeError:  # of the connection: what goes wrong at the desk is an answer
        desk.leave(worker)


def _wait(work: Any) -> None:
    """As long as it takes. What ends it is the end of the connection, or of this process."""
    while True:
        try:
            work.wait(datetime.timedelta(seconds=SLICE_S))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()
                return


if __name__ == "__main__":
    code = 0
    try:
        main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)  # operations may be under way: nobody waits for them
