"""This process as a worker of a group: it tells the others of failures and leaves properly."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

from paceline.comm.board import StoreBoard
from paceline.comm.group import Group
from paceline.comm.store_server import StoreServer
from paceline.errors import PacelineError, UsageError

_FAREWELL_S = 60.0  # how long a finished worker stays for those still in their last operation
_AFTERMATH_S = 20.0  # how long worker 0 stays after a failure, if it serves the store: until the others have left
_CLOSING_S = 0.1  # and after a good end, in which the others only have to hear that all are through


class WorkerProcess:
    """The life of this process as a worker, from joining the group to leaving it.

    server: the store, where this process serves it; then it must be the last to go.
    """

    def __init__(self, group: Group, *, timeout_s: float, server: StoreServer | None = None) -> None:
        self.group, self.timeout_s, self.server = group, timeout_s, server
        self.closing: list[Callable[[], None]] = []  # called when this worker leaves, whatever the reason
        self.failed = False
        self.exit_code = 1  # after a failure
        self._pid = os.getpid()
        self._over = False

    def check_not_forked(self) -> None:
        """Refuse to go on in a child of a worker."""
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked from a worker and is not one itself",
                why="connections to the other workers cannot be shared by two processes",
                do="start child processes with the spawn method, or before paceline.prepare",
            )

    def watch_exit(self) -> None:
        """Tell the others of an uncaught exception before they wonder, and say good-bye at the end."""
        hook = sys.excepthook

        def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if os.getpid() == self._pid:
                self.exit_code = getattr(error, "exit_code", 1)
                self.fail(error)
            hook(kind, error, trace)
            if sys.excepthook is tell and isinstance(error, PacelineError) and not hasattr(sys, "ps1"):
                raise SystemExit(self.exit_code)  # Python takes the exit code of the process from here

        sys.excepthook = tell
        atexit.register(self.leave)

    def fail(self, error: BaseException) -> None:
        """This worker cannot go on: leave the cause where the others look."""
        self.failed = True
        if self.group.board is not None:
            with contextlib.suppress(Exception):  # the store may be what failed
                self.group.board.post_cause(error)

    def leave(self) -> None:
        """Stay until every worker is through with the last operation, then close."""
        if self._over or os.getpid() != self._pid:
            return
        self._over = True
        atexit.unregister(self.leave)
        for close in self.closing:
            close()
        if self.group.board is None:
            return
        self.say_goodbye()
        if self.failed:
            # An operation may be under way, and taking down its backend would block until its time-out.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.exit_code)

    def say_goodbye(self) -> None:
        """Wait until every worker is through with its last operation, or after a failure has read the cause."""
        if self.group.board is not None:
            with contextlib.suppress(Exception):  # the store may be gone: then there is no worker to wait for
                self._farewell(self.group.board)

    def _farewell(self, board: StoreBoard) -> None:
        """After a failure only the server of the store stays, until the others have read the cause."""
        store, end = board.store, time.monotonic() + min(_FAREWELL_S, self.timeout_s)
        if not self.failed:
            board.write(f"left/{board.rank}", {"steps": board.step, "ops": board.counts()})
            store.take_back_will()
        board.write(f"gone/{board.rank}", True)
        gone, news = store.collect("gone", board.world_size, _FAREWELL_S), board.news()
        while not (self.failed or gone.has_come or news.has_come) and time.monotonic() < end:
            store.connection.wait_for(gone, news, seconds=end - time.monotonic())
        if self.server is not None and (self.failed or news.has_come):
            self.server.wait_until_left(_AFTERMATH_S)
        elif self.server is not None:
            time.sleep(_CLOSING_S)
