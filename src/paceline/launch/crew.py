"""Start a job's workers on this host, and watch them until the last one has ended.

[Note: the first cause] A worker that dies takes the others down with it, each with an error about the
network that says nothing. So whoever knows first what happened writes it to the store under the key
`cause`, once; everyone else reads it there. A worker that can still speak writes its own. For one that
cannot (killed, out of memory, aborted in C++) the launcher does it here, within milliseconds of the death,
before its neighbours look. The job's exit code is that of the first cause.

[Note: nobody is left behind] Workers die with their launcher, however it dies (the kernel sees to it). When
one worker fails the others get `grace` seconds to end by themselves, then SIGTERM, then SIGKILL. SIGINT,
SIGTERM and SIGHUP to the launcher are handed on, with the same grace; the second one kills at once.

The launcher serves the store, so it outlives every worker, and it listens on one address only: loopback on
a single host. (Asked by host name, torch's own store listens on every interface.) Between hosts the store
has no password, as torch's has none: use a network you trust.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from paceline.environment import board_prefix
from paceline.errors import PeerError, UsageError
from paceline.launch.output import Output
from paceline.launch.site import Site
from paceline.launch.worker import Cause, Worker, die_with_parent, worker_env

MOST_WORKERS = 256  # on one host
GRACE_S = 5.0
CAUSE = f"{board_prefix({})}/cause"  # the board's key for it
_GONE = "launchers gone"  # the store's key that counts the hosts whose workers have all ended
_LINGER_S = 30.0  # how long the first host keeps the store up for the others
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    argv: Sequence[str],
    *,
    workers: int,
    env: Mapping[str, str] | None = None,
    site: Site | None = None,
    output: Output | None = None,
    grace: float = GRACE_S,
) -> Crew:
    """Start `workers` processes of `argv` here. `env` is added to this process's environment.

    Call it from a thread that lives as long as the job: the kernel ends the workers with the thread that
    started them.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise UsageError(f"{workers} workers cannot be started", do=f"choose 1..{MOST_WORKERS} on each host")
    site, output = site or Site(), output or Output.passed()
    listener = site.inside(site.listen) if site.index == 0 else None
    port = listener.getsockname()[1] if listener else site.port
    pipe = None if output.inherits(site.hosts * workers) else subprocess.PIPE
    base = {**os.environ, **(env or {})}
    crew = Crew(site=site, output=output, grace=grace)
    bind = die_with_parent()
    try:
        for local in range(workers):
            process = subprocess.Popen(
                [*site.prefix(local, workers), *argv],
                env=worker_env(site, workers, local, port, base),
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                preexec_fn=bind,
                process_group=0,  # a terminal's Ctrl-C reaches the launcher only, which hands it on once
            )
            crew.workers.append(Worker(site.index * workers + local, process))
            output.add(crew.workers[-1])
    except BaseException as error:
        for worker in crew.workers:
            worker.send(signal.SIGKILL)
            worker.process.wait()
        if listener:
            listener.close()
        if isinstance(error, OSError):
            raise UsageError(f"cannot start {argv[0]}", why=str(error)) from None
        raise
    crew.start(listener, port)
    return crew


class Crew:
    """The workers of one job on this host. See the notes at the top.

    Everything happens in a thread of its own, so several crews can be watched at a time. As a context
    manager it leaves no worker behind.
    """

    def __init__(self, *, site: Site, output: Output, grace: float) -> None:
        self.site, self.output, self.grace = site, output, grace
        self.workers: list[Worker] = []
        self.cause: Cause | None = None
        self.asked: int | None = None  # the signal that ended the job
        self._store: Any = None
        self._broken = ""
        self._untold = False  # there is a cause that is not in the store yet
        self._met = threading.Event()  # the store can be used, or never will
        self._done = threading.Event()
        self._deadline: float | None = None  # when the next signal is due ...
        self._next: int = signal.SIGTERM  # ... and which
        self._stops = 0
        self._ooms = _oom_kills()
        self._looked = 0.0

    def start(self, listener: socket.socket | None, port: int) -> None:
        # The workers are already importing torch; so does this thread, while the other one is watching.
        self._meeting = threading.Thread(target=self._meet, args=(listener, port), name="store", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="crew", daemon=True)
        self.output.start()
        self._meeting.start()
        self._watching.start()

    # --------------------------------------------------------------------------------------- for the caller

    def wait(self, timeout: float | None = None) -> int | None:
        """The job's exit code when all workers here have ended; None if that takes over `timeout` seconds."""
        return self.exit_code if self._done.wait(timeout) else None

    def poll(self) -> int | None:
        return self.wait(0)

    @property
    def exit_code(self) -> int:
        """0: fine. Else that of the first cause: 4 where a worker was killed or is not here, or its own."""
        codes = {worker.rank: worker.code for worker in self.workers}
        if self.asked is not None:
            return 128 + self.asked if any(codes.values()) else 0
        if self.cause is None:
            return 0
        own = codes.get(-1 if self.cause.worker is None else self.cause.worker)
        return own if own is not None and own > 0 else PeerError.exit_code

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask the workers to end; after the grace, or when asked again, they are killed."""
        if self._stops == 0 and self.cause is None:  # what failed before stays the cause
            self.asked = signum
        for worker in self.workers:
            worker.send(signal.SIGKILL if self._stops else signum)
        self._stops += 1
        self._next, self._deadline = signal.SIGKILL, time.monotonic() + self.grace

    def close(self) -> None:
        """End whatever still runs, and the store."""
        if not self._done.is_set():
            self.stop()
            self._done.wait()
        self._meeting.join()
        self._store = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def store(self, timeout: float = 60.0) -> Any:
        """The job's torch.distributed.TCPStore, for those who have something to tell the workers."""
        if not self._met.wait(timeout) or self._store is None:
            raise PeerError("the job's store cannot be reached", why=self._broken)
        return self._store

    def summary(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "cause": asdict(self.cause) if self.cause else None,
            "workers": [worker.summary() for worker in self.workers],
        }

    # ------------------------------------------------------------------------------------------ the store

    def _meet(self, listener: socket.socket | None, port: int) -> None:
        """Serve the store, or on the other hosts reach it."""
        try:
            # Here and not above: the command line starts without torch. This is not the data path: gradients
            # never pass through the launcher.
            dist: Any = importlib.import_module("torch.distributed")
            address, wait = self.site.address, datetime.timedelta(seconds=self.grace)
            if listener:
                fd = listener.detach()
                self._store = self.site.inside(
                    lambda: dist.TCPStore(address, port, None, True, wait, wait_for_workers=False, master_listen_fd=fd)
                )
            elif self._reach(address, port):
                self._store = dist.TCPStore(address, port, None, False, wait, wait_for_workers=False)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
        finally:
            self._met.set()

    def _reach(self, address: str, port: int) -> bool:
        """Wait until the first host listens, which may be started later than this one."""
        while not self._done.is_set():
            try:
                socket.create_connection((address, port), timeout=1).close()
                return True
            except OSError:
                self._done.wait(0.2)
        return False

    def _blame(self, cause: Cause) -> None:
        """[Note: the first cause]"""
        self.cause, self._untold = cause, self.site.hosts * len(self.workers) > 1
        self._post()
        self._deadline = self._deadline or time.monotonic() + self.grace

    def _post(self) -> None:
        """Tell the others, now or as soon as there is a store: a worker may die while this process imports torch."""
        if not (self._untold and self.cause and self._met.is_set()):
            return
        self._untold = False
        mine = self.cause.encode()
        try:
            self.cause = Cause.decode(self._store.compare_set(CAUSE, "", mine).decode(errors="replace"))
        except (RuntimeError, AttributeError) as error:  # there is no store (any more), and so nobody to tell
            self._broken = self._broken or str(error)

    def _read_cause(self) -> None:
        """Has a worker of another host failed? Those here may be blocked where they cannot notice."""
        if self.site.hosts == 1 or self._store is None or self.cause or time.monotonic() - self._looked < 0.5:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(RuntimeError):
            if self._store.check([CAUSE]):
                self._blame(Cause(None, "a worker of another host failed"))

    def _take_leave(self) -> None:
        """Several hosts: the store must stay up until the last of them needs it no more."""
        if self.site.hosts == 1 or not self._met.wait(_LINGER_S) or self._store is None:
            return
        self._post()
        until = time.monotonic() + (2 * self.grace if self.cause else _LINGER_S)
        with contextlib.suppress(RuntimeError):
            gone = self._store.add(_GONE, 1)
            while self.site.index == 0 and gone < self.site.hosts and time.monotonic() < until and not self.asked:
                time.sleep(0.05)
                gone = self._store.add(_GONE, 0)

    # ------------------------------------------------------------------------------------------ the workers

    def _watch(self) -> None:
        running = list(self.workers)
        deaths = _Deaths(running)
        try:
            while running:
                deaths.wait(0.1)
                ended = [worker for worker in running if worker.reap()]
                running = [worker for worker in running if worker not in ended]
                for worker in sorted(ended, key=_suspicion):
                    self._note_end(worker)
                if self._broken and self.site.index == 0 and not self.cause:
                    self._blame(Cause(None, "the launcher cannot serve the store", why=self._broken))
                self._post()
                self._read_cause()
                if self._deadline and time.monotonic() > self._deadline:
                    for worker in running:
                        worker.send(self._next)
                    self._next, self._deadline = signal.SIGKILL, time.monotonic() + self.grace
            self._take_leave()
        except Exception as error:  # a watcher that fails must not look like a job that went well
            self.cause = Cause(None, "the launcher failed", why=f"{type(error).__name__}: {error}")
            for worker in running:
                worker.send(signal.SIGKILL)
                worker.process.wait()
        finally:
            deaths.close()
            self.output.finish()
            self._done.set()

    def _note_end(self, worker: Worker) -> None:
        if worker.code and self.cause is None:
            self._blame(self._describe(worker, worker.code))

    def _describe(self, worker: Worker, code: int) -> Cause:
        who = f"worker {worker.rank}"
        if self.asked is not None:
            name = signal.Signals(self.asked).name
            return Cause(worker.rank, f"{who} was stopped", why=f"its launcher was sent {name}")
        if code > 0:
            return Cause(worker.rank, f"{who} ended with exit code {code}", why=self.output.last_line(worker.rank))
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        if code != -signal.SIGKILL:
            return Cause(worker.rank, f"{who} was killed by {name}", why=self.output.last_line(worker.rank))
        if _oom_kills() > self._ooms:
            why = "the kernel ran out of memory and killed a process while the job ran"
        else:
            why = "somebody sent it: a person, a batch system, a container's memory limit"
        return Cause(worker.rank, f"{who} was killed by SIGKILL (out of memory?)", why=why)


class _Deaths:
    """Wakes up at once when a process ends, without SIGCHLD, which belongs to the main program."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._fds: list[int] = []
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old one
            self._fds.extend(os.pidfd_open(worker.pid) for worker in workers)
        self._poll = select.poll()
        for fd in self._fds:
            self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> None:
        if not self._fds:
            time.sleep(0.02)
            return
        for fd, _ in self._poll.poll(seconds * 1000):
            self._poll.unregister(fd)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def _suspicion(worker: Worker) -> int:
    """Of workers that ended together: who was killed is more likely the cause than who failed, and who only
    says that a peer failed is least likely."""
    return 0 if (worker.code or 0) < 0 else 2 if worker.code == PeerError.exit_code else 1


def _oom_kills() -> int:
    """How often this machine's kernel has killed a process for its memory since it started."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@contextlib.contextmanager
def forwarding() -> Iterator[Callable[[Crew], None]]:
    """While inside, SIGINT, SIGTERM and SIGHUP go to the workers of the crews it is told of. For the main thread only.

    Enter it before the workers start: a signal that comes before their crew is known waits for it.
    """
    crews: list[Crew] = []
    early: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        if not crews:
            early.append(signum)
        for crew in crews:
            crew.stop(signum)

    def to(crew: Crew) -> None:
        crews.append(crew)
        while early:
            crew.stop(early.pop(0))

    # What is ignored stays so: nohup, or a shell's background job.
    before = {s: signal.getsignal(s) for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, forward)
    try:
        yield to
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
