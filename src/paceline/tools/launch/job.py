"""`paceline run`: start a job's workers on this host, and watch them until the last one has ended.

[Note: the first cause] A worker that dies takes the others down with it, each with an error about the
network that says nothing. So whichever process first knows what happened writes it to the store under the
key `cause`, once, and all the others read it there. A worker that can still speak writes its own. For one
that cannot (killed, out of memory, aborted in C++) the launcher writes it, within milliseconds of the death,
before the other workers look. The job's exit code is that of the first cause.

SIGINT, SIGTERM and SIGHUP to the launcher are passed on to the workers, which then have `grace_s` seconds;
a second signal kills them at once, and a second later the launcher ends whatever it is doing. See also
[Note: no worker is left behind] in supervisor.py.

[Note: the launcher's threads] One thread watches the workers and waits for nothing else. Another makes every call of
the store, because such a call may never return: the host of the store may be gone without a word.

The launcher serves the store, so the store outlives every worker, and it listens on one address only:
loopback on a single host. (Given a host name, torch's own store listens on every interface.) Between hosts
the store has no password, as torch's has none: use a network you trust.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from paceline.comm.cause import Cause, of_worker
from paceline.comm.environment import board_prefix
from paceline.errors import PeerError, UsageError
from paceline.tools.launch.environment import worker_env
from paceline.tools.launch.output import WorkerOutput
from paceline.tools.launch.site import LaunchSite
from paceline.tools.launch.supervisor import GRACE_S, LaunchedWorker, Supervisor, WorkerCommand

MOST_WORKERS = 256  # on one host
CAUSE = f"{board_prefix({})}/cause"  # the store's key for the first cause
_HERE = f"{board_prefix({})}/here/"  # and, with a rank behind it, what each worker writes when it joins the others
_GONE = "launchers gone"  # the store's key that counts the hosts whose workers have all ended
_LINGER_S = 30.0  # how long the first host keeps the store up for the others
_STORE_S = 0.1  # how often the store is looked at
_LAST_RESORT_S = 1.0  # from the second signal until the launcher ends without tidying up
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to start on this host."""

    argv: Sequence[str]
    workers: int = 1  # on this host
    env: Mapping[str, str] = field(default_factory=dict)  # added to this process's environment
    rendezvous: LaunchSite = field(default_factory=LaunchSite)
    grace_s: float = GRACE_S

    @property
    def world_size(self) -> int:
        """The number of workers on all hosts together."""
        return self.rendezvous.hosts * self.workers


def launch(spec: JobSpec, output: WorkerOutput | None = None) -> LocalJob:
    """Start the workers of a job on this host. Their output goes to this process's own streams by default.

    Call it from a thread that lives as long as the job: the kernel ends the workers with the thread that
    started them.
    """
    if not 1 <= spec.workers <= MOST_WORKERS:
        raise UsageError(f"{spec.workers} workers cannot be started", do=f"choose 1..{MOST_WORKERS} on each host")
    job = LocalJob(spec, output or WorkerOutput.passed())
    job.start()
    return job


class LocalJob:
    """The workers of one job on this host. See the notes at the top of this file.

    Threads of its own watch the workers and serve the store, so several jobs can run at a time. As a context
    manager it leaves no worker behind.
    """

    def __init__(self, spec: JobSpec, output: WorkerOutput) -> None:
        self.spec, self.output = spec, output
        self.cause: Cause | None = None
        self.stopped_by: int | None = None  # the signal that ended the job
        self._supervisor = Supervisor(grace_s=spec.grace_s)
        self._store: Any = None
        self._store_error = ""
        self._cause_unsent = False  # there is a cause that is not in the store yet
        self._store_settled = threading.Event()  # the store can be used, or never will
        self._store_news = threading.Event()  # there is something to be done with the store
        self._ended = threading.Event()  # every worker here has ended
        self._store_left = threading.Event()  # nothing is to be done with the store any more
        self._done = threading.Event()
        self._blaming = threading.Lock()
        self._stops = 0  # how often the job was asked to end
        self._oom_kills_before = _oom_kills()

    @property
    def workers(self) -> list[LaunchedWorker]:
        return self._supervisor.workers

    def start(self) -> None:
        """Start the workers and the threads that serve them."""
        rendezvous = self.spec.rendezvous
        listener = rendezvous.inside(rendezvous.listen) if rendezvous.index == 0 else None
        port = listener.getsockname()[1] if listener else rendezvous.port
        try:
            for local_rank in range(self.spec.workers):
                self.output.add(self._supervisor.start(self._command(local_rank, port)))
        except BaseException as error:
            self._supervisor.kill()
            if listener:
                listener.close()
            if isinstance(error, OSError):
                raise UsageError(f"cannot start {self.spec.argv[0]}", why=str(error)) from None
            raise
        # The workers are already importing torch. One thread does the same for the store, while the other watches.
        self._storing = threading.Thread(target=self._tend_store, args=(listener, port), name="store", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="watch workers", daemon=True)
        self.output.start()
        self._storing.start()
        self._watching.start()

    def _command(self, local_rank: int, port: int) -> WorkerCommand:
        spec, rendezvous = self.spec, self.spec.rendezvous
        base = {**os.environ, **spec.env}
        pipe = None if self.output.inherits(spec.world_size) else subprocess.PIPE
        return WorkerCommand(
            rank=rendezvous.index * spec.workers + local_rank,
            argv=[*rendezvous.prefix(local_rank, spec.workers), *spec.argv],
            env=worker_env(rendezvous, local_rank=local_rank, workers=spec.workers, port=port, base=base),
            stdout=pipe,
            stderr=pipe,
        )

    # --------------------------------------------------------------------------------------- for the caller

    def wait(self, timeout: float | None = None) -> int | None:
        """The job's exit code when all workers here have ended; None if that takes over `timeout` seconds."""
        return self.exit_code if self._done.wait(timeout) else None

    def poll(self) -> int | None:
        """The job's exit code, or None while a worker runs."""
        return self.wait(0)

    @property
    def exit_code(self) -> int:
        """The exit code of the first cause; 0 if all went well; 4 if a worker was killed."""
        codes = {worker.rank: worker.code for worker in self.workers}
        if self.stopped_by is not None:
            return 128 + self.stopped_by if any(codes.values()) else 0
        if self.cause is None:
            return 0
        own = None if self.cause.worker is None else codes.get(self.cause.worker)
        return own if own is not None and own > 0 else self.cause.exit_code

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Ask the workers to end; after the grace, or when asked again, they are killed."""
        if self.cause is None and self.stopped_by is None:  # what failed before stays the cause
            self.stopped_by = signum
        self._stops += 1
        self._supervisor.stop(signum)

    def close(self) -> None:
        """End whatever still runs, and the store."""
        if not self._done.is_set():
            self.stop()
            self._done.wait()
        self._store_settled.wait(_LINGER_S)  # a process must not end while one of its threads imports torch
        self._storing.join(_LAST_RESORT_S)  # a call of the store may never return
        self._store = None

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def store(self, timeout: float = 60.0) -> Any:
        """The job's torch.distributed.TCPStore, for a caller that has something to tell the workers."""
        if not self._store_settled.wait(timeout) or self._store is None:
            raise PeerError("the job's store cannot be reached", why=self._store_error)
        return self._store

    def summary(self) -> dict[str, Any]:
        """How the job ended, as JSON has it."""
        return {
            "exit_code": self.exit_code,
            "cause": asdict(self.cause) if self.cause else None,
            "workers": [worker.summary() for worker in self.workers],
        }

    # ------------------------------------------------------------------------------------------ the store

    def _open_store(self, listener: socket.socket | None, port: int) -> None:
        """Serve the store on the first host; on the other hosts, connect to it."""
        try:
            # Imported here because the command line starts without torch. This is not the data path: gradients
            # never pass through the launcher.
            dist: Any = importlib.import_module("torch.distributed")
            rendezvous, wait = self.spec.rendezvous, datetime.timedelta(seconds=self.spec.grace_s)
            common = {"timeout": wait, "wait_for_workers": False}
            if listener:
                fd = listener.detach()
                self._store = rendezvous.inside(
                    lambda: dist.TCPStore(rendezvous.address, port, None, True, master_listen_fd=fd, **common)
                )
            elif self._reach(rendezvous.address, port):
                self._store = dist.TCPStore(rendezvous.address, port, None, False, **common)
        except Exception as error:
            self._store_error = f"{type(error).__name__}: {error}"
        finally:
            self._store_settled.set()

    def _reach(self, address: str, port: int) -> bool:
        """Wait until the first host listens, which may be started later than this one."""
        while not self._done.is_set():
            try:
                socket.create_connection((address, port), timeout=1).close()
                return True
            except OSError:
                self._done.wait(0.2)
        return False

    def _tend_store(self, listener: socket.socket | None, port: int) -> None:
        """Do all that concerns the store, in the store's own thread. See [Note: the launcher's threads]."""
        try:
            self._open_store(listener, port)
            while not self._ended.is_set() and self._store is not None:
                self._send_cause()
                if self.cause is None:
                    self._look_for_other_hosts()
                    self._look_for_absent()
                self._store_news.wait(_STORE_S)
                self._store_news.clear()
            self._ended.wait()
            self._send_cause()
            self._wait_for_other_hosts()
        except (RuntimeError, AttributeError) as error:  # without a store no worker can be told
            self._store_error = self._store_error or str(error)
        finally:
            self._store_left.set()

    def _send_cause(self) -> None:
        """Write the cause to the store; an earlier one that stands there already becomes the cause."""
        if self._cause_unsent and self.cause and self._store is not None:
            self._cause_unsent = False
            earlier = self._store.compare_set(CAUSE, "", self.cause.encode())
            self.cause = Cause.decode(earlier.decode(errors="replace"))

    def _look_for_other_hosts(self) -> None:
        """Look for a failed worker of another host: workers here may be blocked where they cannot notice it."""
        if self.spec.rendezvous.hosts > 1 and self._store.check([CAUSE]):
            self._blame(Cause(None, "a worker of another host failed"))

    def _look_for_absent(self) -> None:
        """Look for a worker that has ended without ever joining the others, while one of them waits for it."""
        ended = [w.rank for w in self.workers if w.code == 0 and not self._store.check([f"{_HERE}{w.rank}"])]
        if ended and any(self._store.check([f"{_HERE}{rank}"]) for rank in range(self.spec.world_size)):
            self._blame(
                Cause(
                    ended[0],
                    f"worker {ended[0]} ended, with exit code 0, before it called paceline.prepare",
                    why="the other workers wait for it there",
                    do="let every worker call prepare, or start only those that do: --workers",
                )
            )

    def _wait_for_other_hosts(self) -> None:
        """Keep the store of several hosts up until the last of them needs it no more."""
        rendezvous = self.spec.rendezvous
        if rendezvous.hosts == 1 or self._store is None:
            return
        until = time.monotonic() + (2 * self.spec.grace_s if self.cause else _LINGER_S)
        gone = self._store.add(_GONE, 1)
        while rendezvous.index == 0 and gone < rendezvous.hosts and time.monotonic() < until and not self.stopped_by:
            time.sleep(0.05)
            gone = self._store.add(_GONE, 0)

    def _leave_store(self) -> None:
        """Every worker here has ended: give the thread of the store its time, which is short after a signal."""
        self._ended.set()
        self._store_news.set()
        began = time.monotonic()
        while not self._store_left.wait(_STORE_S):
            waited = time.monotonic() - began
            if waited > 2 * _LINGER_S or self._stops > 1 or (self._stops and waited > _LAST_RESORT_S):
                return

    # ------------------------------------------------------------------------------------------ the workers

    def _watch(self) -> None:
        try:
            while self._supervisor.running:
                for worker in self._supervisor.watch(0.1):
                    if worker.code and self.cause is None:
                        self._blame(self._describe(worker, worker.code))
                if self._store_error and self.spec.rendezvous.index == 0 and not self.cause:
                    self._blame(Cause(None, "the launcher cannot serve the store", why=self._store_error))
            self._leave_store()
        except Exception as error:  # a watcher that fails must not look like a job that went well
            self.cause = Cause(None, "the launcher failed", why=f"{type(error).__name__}: {error}")
        finally:
            self._supervisor.kill()
            self.output.finish()
            self._done.set()

    def _blame(self, cause: Cause) -> None:
        """Record why the job fails, tell the other workers, and give them the grace. See [Note: the first cause]."""
        with self._blaming:
            if self.cause is not None:
                return
            self.cause = cause
            self._cause_unsent = self.spec.world_size > 1
        self._store_news.set()
        self._supervisor.end_after_grace()

    def _describe(self, worker: LaunchedWorker, code: int) -> Cause:
        who = f"worker {worker.rank}"
        if self.stopped_by is not None:
            name = signal.Signals(self.stopped_by).name
            return Cause(worker.rank, f"{who} was stopped", why=f"its launcher was sent {name}")
        said = self.output.last_words(worker.rank)
        if code > 0:
            if said.why or said.do:  # an error of ours: its sentences are better than anything said about it
                return Cause(worker.rank, of_worker(worker.rank, said.what), said.why, said.do)
            return Cause(worker.rank, f"{who} ended with exit code {code}", why=said.what)
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        if code != -signal.SIGKILL:
            return Cause(worker.rank, f"{who} was killed by {name}", why=said.what)
        if _oom_kills() > self._oom_kills_before:
            why = "the kernel ran out of memory and killed a process while the job ran"
        else:
            why = "it was sent from outside: by a person, a batch system, a container's memory limit"
        return Cause(worker.rank, f"{who} was killed by SIGKILL (out of memory?)", why=why)


def _oom_kills() -> int:
    """How often this machine's kernel has killed a process for its memory since it started."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@contextlib.contextmanager
def forwarding_signals() -> Iterator[Callable[[LocalJob], None]]:
    """While inside, SIGINT, SIGTERM and SIGHUP go to the workers of the jobs that are given to what it yields.

    Enter it in the main thread, and before the workers start: a signal that comes earlier waits for its job. The second
    signal ends everything: this process too, a second later, even if it waits for something that never comes.
    """
    jobs: list[LocalJob] = []
    early: list[int] = []
    came = 0
    # A thread that stands ready, woken by a pipe: a signal handler may interrupt code that holds any lock.
    asleep, wake = os.pipe()
    over = threading.Event()
    threading.Thread(target=_last_resort, args=(asleep, over), name="last resort", daemon=True).start()

    def forward(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came == 2:
            os.write(wake, bytes([signum]))
        if not jobs:
            early.append(signum)
        for job in jobs:
            job.stop(signum)

    def forward_to(job: LocalJob) -> None:
        jobs.append(job)
        while early:
            job.stop(early.pop(0))

    # What is ignored stays ignored: under nohup, or in a shell's background job.
    before = {s: signal.getsignal(s) for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, forward)
    try:
        yield forward_to
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        over.set()
        os.close(wake)


def _last_resort(asleep: int, over: threading.Event) -> None:
    """End this process some time after a signal's number has come through the pipe, unless all is over by then.

    The kernel and the guardian then end what is left of the workers.
    """
    signum = os.read(asleep, 1)
    os.close(asleep)
    if signum and not over.wait(_LAST_RESORT_S):
        os._exit(128 + signum[0])
