"""The worker's side of taking turns: between two steps it asks the gate whether it may go on.

PACELINE_GATE="r,w" names two inherited pipes. The worker writes `done <steps>` and then waits for `go <n>`
(n more steps) or `stop`. Its first word is `done 0`: it is ready. A closed pipe means stop too, so nothing
is left behind when the race dies. What a turn costs is measured where it opens and closes, while nobody
else computes: three barriers, and the network interface's own counters.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping

from paceline.comm.carried import carried
from paceline.comm.environment import PACE
from paceline.comm.interface import Counters, counters
from paceline.comm.pacing import pace
from paceline.errors import PeerTimeoutError, UsageError
from paceline.telemetry.events import Barrier, Wire
from paceline.telemetry.recorder import Recorder

GATE, WIRE, TIMEOUT = "PACELINE_GATE", "PACELINE_WIRE", "PACELINE_GATE_TIMEOUT"
OWN_CONNECTIONS = "tcp"  # in place of an interface: count this process's own connections
_BARRIERS = 3  # the first of them only brings the workers to the same moment


class Gate:
    """Counts the steps of a turn. Calling it gives False once there is no other turn."""

    def __init__(self, recorder: Recorder, barrier: Callable[[], None], env: Mapping[str, str] = os.environ) -> None:
        self.recorder, self.barrier = recorder, barrier
        self._before_stop: list[Callable[[], None]] = []
        self._in, self._out = _pipes(env.get(GATE, ""))
        self._wire = env.get(WIRE, "")
        self._pace = float(env.get(PACE) or 0)
        self._timeout_s = float(env.get(TIMEOUT) or 3600)
        # Workers of one host share its interface; what it counted is split evenly among them.
        shared = self._wire not in ("", OWN_CONNECTIONS)
        self._sharing = int(env.get("LOCAL_WORLD_SIZE") or env.get("WORLD_SIZE") or 1) if shared else 1
        self._left = self._turn = 0
        self._stopped = False
        self._unread = b""
        self._before = Counters(0, 0)

    @classmethod
    def from_env(cls, recorder: Recorder, barrier: Callable[[], None]) -> Gate | None:
        """The gate of this worker, or None outside of a race."""
        return cls(recorder, barrier) if os.environ.get(GATE) else None

    def before_stop(self, call: Callable[[], None]) -> None:
        """Have `call` called before this worker stands still for another contender's turn."""
        self._before_stop.append(call)

    def __call__(self) -> bool:
        """Between two steps: may the next one begin? Blocks while it is somebody else's turn."""
        if self._stopped:
            return False
        if self._left == 0:
            self._close_turn()
            self._turn = self._left = self._next_turn()
            if self._turn == 0:
                self._stopped = True
                return False
            self._open_turn()
        self._left -= 1
        return True

    def _open_turn(self) -> None:
        for i in range(_BARRIERS):
            start = time.perf_counter()
            self.barrier()
            if i == 0:
                self.pace()
                continue
            self.recorder.emit(Barrier(t=time.monotonic(), ms=(time.perf_counter() - start) * 1e3))
        self._before = self._counters()

    def pace(self) -> None:
        """Emulate the link. Every turn anew: connections are made when they are first needed, some of them late."""
        if self._pace:
            pace(self._pace)

    def _close_turn(self) -> None:
        for call in self._before_stop:
            call()
        if self._turn and self._wire:
            sent, received = (now - then for now, then in zip(self._counters(), self._before, strict=True))
            self.recorder.emit(
                Wire(
                    t=time.monotonic(),
                    steps=self._turn,
                    # A connection closed since takes its count with it.
                    sent=max(0, sent) // self._sharing,
                    received=max(0, received) // self._sharing,
                    interface=self._wire,
                )
            )
        # The race reads the events when it hears that the turn is over, so they have to be there by then.
        self.recorder.flush()
        try:
            os.write(self._out, f"done {self._turn}\n".encode())
        except BrokenPipeError:
            self._stopped = True

    def _next_turn(self) -> int:
        """How many steps the next turn has; 0: there is none."""
        end = time.monotonic() + self._timeout_s
        while not self._stopped and b"\n" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PeerTimeoutError(
                    f"no turn for {self._timeout_s:.0f} s",
                    why="the race that started this worker lives, but does not answer",
                    do=f"raise {TIMEOUT} if the other contenders take that long",
                )
            some = os.read(self._in, 4096)
            if not some:
                return 0
            self._unread += some
        line, _, self._unread = self._unread.partition(b"\n")
        word, _, count = line.decode(errors="replace").partition(" ")
        return int(count) if word == "go" and count.isdecimal() else 0

    def _counters(self) -> Counters:
        if self._wire == OWN_CONNECTIONS:
            return carried()
        return counters(self._wire) if self._wire else Counters(0, 0)


def _pipes(text: str) -> tuple[int, int]:
    try:
        read, write = (int(fd) for fd in text.split(","))
        # Processes the job starts itself must not hold the pipes open after the job has ended.
        os.set_inheritable(read, False)
        os.set_inheritable(write, False)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{GATE}={text!r} does not name two open pipes",
            why=str(error),
            do="it is set by `paceline race`; unset it to run the script on its own",
        ) from None
    return read, write
