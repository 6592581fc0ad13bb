"""A server's process: it has a thread for each worker, and ends when the worker that started it does."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback

import torch

from paceline.comm.dist import Transport
from paceline.errors import PeerError
from paceline.server.launch import ServerArguments
from paceline.server.messages import MessageChannel
from paceline.server.requests import RequestHandler

_LOOK_S = 0.1  # how often the server looks whether the worker that started it lives
_LAST_WORDS_S = 1.0  # how long it goes on after that worker's end, to tell the other workers of it


class SilentBoard:
    """The board of a server's lanes: a server waits as long as it takes, and has no other worker to ask for causes.

    What ends a wait is the end of the connection, or of this process.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker

    def agree(self, key: str, what: str, text: str) -> None: ...

    def pulse(self, lane: str, op: int, label: str, waited_s: float) -> None: ...

    def clear(self) -> None: ...

    def lost(self, label: str, error: Exception) -> PeerError:
        return PeerError(f"worker {self.worker} closed its connection", why=str(error), worker=self.worker)


def main(words: list[str]) -> None:
    """Serve until all workers have left, or the one that started this process has ended."""
    arguments = ServerArguments.parse(words)
    # First of all: to meet the others can take until the time-out, for which an orphan must not wait.
    threading.Thread(target=_end_with, args=(arguments.parent,), name="end with the worker", daemon=True).start()
    # Ctrl-C reaches every process of a terminal. The worker decides what it means, and this process ends after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # the host's other cores belong to its workers
    transport, handler = arguments.transport(), RequestHandler()
    arguments.announce(transport, os.getpid(), socket.gethostname())
    threads = [
        threading.Thread(target=_serve, args=(handler, arguments, transport, r), name=f"worker {r}", daemon=True)
        for r in range(arguments.world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_with(parent: int) -> None:
    """End this process soon after the worker that started it, whatever its other threads wait for."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    time.sleep(_LAST_WORDS_S)
    os._exit(0)


def _serve(handler: RequestHandler, arguments: ServerArguments, transport: Transport, worker: int) -> None:
    """Answer one worker's requests, one after the other, until its connection closes."""
    try:
        channel = MessageChannel(arguments.lane(transport, SilentBoard(worker), worker, serves=True))
        while True:
            answer = handler.ask(worker, channel.receive())
            if answer is not None:
                channel.send(answer)
                channel.flush()
    except (PeerError, RuntimeError):  # the connection closed: errors of the handler are answers, never raised
        handler.leave(worker)


if __name__ == "__main__":
    code = 0
    try:
        main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)  # a normal exit would wait for operations that are under way and may never end
