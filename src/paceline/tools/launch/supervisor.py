"""Worker processes on this host: started together, watched, signalled, and never left behind.

`paceline run` (job.py) and `paceline race` (race/workers.py) both stand on the one class in here.

[Note: no worker is left behind] The kernel kills the workers when the thread that started them ends, however
it ends, and the guardian (guardian.py) what they have started themselves. A worker that fails takes its own
children (data loaders) with it. When one worker has failed, its owner may give the others `grace_s` seconds to
end by themselves; then they get SIGTERM, and after as long again SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from paceline.comm.liveness import is_stopped
from paceline.errors import PeerError
from paceline.tools.launch import guardian

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """How one worker process is started."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    stdout: int | IO[bytes] | None = None  # as in subprocess.Popen; None: this process's own
    stderr: int | IO[bytes] | None = None
    pass_fds: Sequence[int] = ()


@dataclass
class LaunchedWorker:
    """One worker process of a job, from its start to its exit code."""

    rank: int
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    signalled: bool = False  # it was asked to end
    # Reentrant, because a signal handler of this program may interrupt the thread that holds it.
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; -N when signal N killed it; None while it runs."""
        return self.process.returncode if self.ended else None

    @property
    def failed(self) -> bool:
        """Whether it ended badly by itself, rather than because it was asked to end."""
        return bool(self.code) and not self.signalled

    def reap(self) -> bool:
        """Collect the exit code if the process has ended. A failed worker's own children are killed with it."""
        with self._lock:
            if self.ended:
                return True
            # WNOWAIT leaves the process a zombie, so that its number cannot be given to another one before the group
            # of that number has been killed.
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                return False
            if status.si_code != os.CLD_EXITED or status.si_status:
                self._kill_group()
            self.process.wait()
            self.ended = time.monotonic()
            return True

    def send(self, signum: int) -> None:
        """Send a signal, unless the process has ended. SIGKILL goes to its children too."""
        with self._lock:
            if self.ended:
                return
            self.signalled = True
            if signum == signal.SIGKILL:
                self._kill_group()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill the process and its children, and wait for its end."""
        self.send(signal.SIGKILL)
        with self._lock:
            if not self.ended:
                self.process.wait()
                self.ended = time.monotonic()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def summary(self) -> dict[str, Any]:
        seconds = (self.ended or time.monotonic()) - self.started
        return {"rank": self.rank, "pid": self.pid, "exit_code": self.code, "seconds": round(seconds, 3)}


class Supervisor:
    """Starts worker processes, notices each end at once, passes signals on, and leaves no process behind.

    It has no thread of its own: `watch` must be called until `running` is empty, or `kill` once.
    """

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self.workers: list[LaunchedWorker] = []
        self._ends = _EndNotices()
        self._stops = 0
        self._next_signal: int = signal.SIGTERM
        self._signal_at: float | None = None  # when the next signal is due

    @property
    def running(self) -> list[LaunchedWorker]:
        """The workers whose end has not been seen yet."""
        return [worker for worker in self.workers if worker.ended is None]

    @property
    def failed(self) -> list[LaunchedWorker]:
        """The workers that have failed by themselves, in order of rank."""
        return [worker for worker in self.workers if worker.failed]

    def start(self, command: WorkerCommand) -> LaunchedWorker:
        """Start one worker. Where that fails, the caller ends the others with `kill`.

        Call it from a thread that lives as long as the job: the kernel ends the workers with the thread that
        started them.
        """
        process = subprocess.Popen(
            list(command.argv),
            env={**command.env, guardian.MARK: guardian.mark()},
            stdin=subprocess.DEVNULL,
            stdout=command.stdout,
            stderr=command.stderr,
            pass_fds=tuple(command.pass_fds),
            preexec_fn=die_with_parent(),
            process_group=0,  # a terminal's Ctrl-C reaches this process only, which passes it on once
        )
        worker = LaunchedWorker(command.rank, process)
        self.workers.append(worker)
        self._ends.add(worker)
        return worker

    def watch(self, seconds: float) -> list[LaunchedWorker]:
        """Wait at most that long for a worker to end, and send a signal that is due.

        Returns the workers that ended since the last call, the likeliest culprit first.
        """
        self._ends.wait(seconds)
        ended = [worker for worker in self.running if worker.reap()]
        if self._signal_at is not None and time.monotonic() > self._signal_at:
            self._signal(self._next_signal)
        return sorted(ended, key=_suspicion)

    def wait(self, seconds: float) -> bool:
        """Wait until all workers have ended. False: some still run after that many seconds."""
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            self.watch(min(0.1, seconds))
        return not self.running

    def end_after_grace(self) -> None:
        """A worker has failed: the others get SIGTERM after the grace, unless a signal is due already."""
        if self._signal_at is None:
            self._signal_at = time.monotonic() + self.grace_s

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask the workers to end. After the grace, or when asked again, they are killed."""
        self._stops += 1
        self._signal(signum if self._stops == 1 else signal.SIGKILL)

    def kill_stopped(self) -> None:
        """Kill workers that are stopped (SIGSTOP) if no other one runs: they could not end by themselves."""
        running = self.running
        if all(is_stopped(worker.pid) for worker in running):
            for worker in running:
                worker.send(signal.SIGKILL)

    def kill(self) -> None:
        """End what still runs, at once. It is safe to call at any time, and again."""
        running = self.running
        for worker in running:
            worker.send(signal.SIGKILL)
        for worker in running:
            worker.kill()
        self._ends.close()

    def _signal(self, signum: int) -> None:
        for worker in self.running:
            worker.send(signum)
        self._next_signal = signal.SIGKILL
        self._signal_at = time.monotonic() + self.grace_s


class _EndNotices:
    """Wakes up at once when a process ends, without SIGCHLD, which belongs to the main program."""

    def __init__(self) -> None:
        self._fds: set[int] = set()
        self._poll = select.poll()

    def add(self, worker: LaunchedWorker) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old one
            fd = os.pidfd_open(worker.pid)
            self._fds.add(fd)
            self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> None:
        if not self._fds:
            time.sleep(min(seconds, 0.02))
            return
        for fd, _ in self._poll.poll(seconds * 1000):
            self._poll.unregister(fd)
            self._fds.remove(fd)
            os.close(fd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _suspicion(worker: LaunchedWorker) -> int:
    """The position of a worker among the suspects, of those that ended together; the least is the likeliest.

    One that was killed is more likely the cause than one that failed, and one that only says that a peer
    failed is least likely.
    """
    if (worker.code or 0) < 0:
        return 0
    return 2 if worker.code == PeerError.exit_code else 1


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the kernel kills the new process when the thread that started it ends, however that happens."""
    # Everything is looked up before the fork: after it, other threads' locks may be held for ever.
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    words = [ctypes.c_ulong(word) for word in (signal.SIGKILL, 0, 0, 0)]
    parent = os.getpid()

    def bind() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, *words)
            if os.getppid() != parent:  # the parent died before the line above
                os._exit(1)

    return bind
