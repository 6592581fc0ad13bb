"""`paceline run`: start a job's workers on this host, and watch them until the last one has ended.

[Note: the first cause] A worker that dies takes the others down with it, each with an error about the
network that says nothing. So whichever process first knows what happened writes it to the store under the
key `cause`, once, and all the others read it there. A worker that can still speak writes its own. For one
that cannot (killed, out of memory, aborted in C++) the launcher writes it, within milliseconds of the death,
before the other workers look. The job's exit code is that of the first cause.

SIGINT, SIGTERM and SIGHUP to the launcher are passed on to the workers, which then have `grace_s` seconds;
a second signal kills them at once, and a second later the launcher ends whatever it is doing. See also
[Note: no worker is left behind] in supervisor.py.

[Note: the launcher's threads] One thread watches the workers and waits for nothing else, but for the first host before
it starts them on another one. A second does what concerns the store (job_store.py), whose calls may take seconds.

The launcher serves the store, so the store outlives every worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from paceline.comm.cause import CAUSE, SAID, Cause, of_worker
from paceline.comm.store import Store
from paceline.errors import PacelineError, PeerError, UsageError
from paceline.tools.launch.environment import worker_env
from paceline.tools.launch.job_store import JobStore
from paceline.tools.launch.output import WorkerOutput
from paceline.tools.launch.site import LaunchSite
from paceline.tools.launch.supervisor import GRACE_S, LaunchedWorker, Supervisor, WorkerCommand

MOST_WORKERS = 256  # on one host
_HERE = "here"  # the store's key, with a rank behind it, for what each worker writes when it joins the others
_GONE = "launchers gone"  # the store's key that counts the hosts whose workers have all ended
_LINGER_S = 30.0  # how long the first host keeps the store up for the others
_STORE_S = 0.1  # how often the answers of the store are looked at
_EVER_S = 86400.0
_LONGEST_SAID = 500  # characters
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
        self._shared = JobStore(spec.rendezvous, list(spec.argv), spec.workers, output.tell)
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
        """Start the workers and the threads that serve them; on the other hosts, once the first one is there."""
        first = self.spec.rendezvous.index == 0
        if first:
            self._shared.serve()
            self._start_workers()
        self._storing = threading.Thread(target=self._tend_store, name="tend store", daemon=True)
        self._watching = threading.Thread(
            target=self._watch if first else self._join, name="watch workers", daemon=True
        )
        self._watching.start()
        self._storing.start()

    def _start_workers(self) -> None:
        try:
            for local_rank in range(self.spec.workers):
                self.output.add(self._supervisor.start(self._command(local_rank)))
        except BaseException as error:
            self._supervisor.kill()
            self._shared.close()
            if isinstance(error, OSError):
                raise UsageError(f"cannot start {self.spec.argv[0]}", why=str(error)) from None
            raise
        self.output.start()

    def _command(self, local_rank: int) -> WorkerCommand:
        spec, rendezvous, shared = self.spec, self.spec.rendezvous, self._shared
        base = {**os.environ, **spec.env}
        pipe = None if self.output.inherits(spec.world_size) else subprocess.PIPE
        return WorkerCommand(
            rank=rendezvous.index * spec.workers + local_rank,
            argv=[*rendezvous.prefix(local_rank, spec.workers), *spec.argv],
            env=worker_env(
                rendezvous,
                local_rank=local_rank,
                workers=spec.workers,
                port=shared.master_port,
                base=base,
                store=shared.variables,
            ),
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
            return 128 + self.stopped_by if any(codes.values()) or not codes else 0
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
        self._storing.join(_LINGER_S)

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def store(self, timeout: float = 60.0) -> Store:
        """The job's store, for a caller that has something to tell the workers."""
        if not self._store_settled.wait(timeout) or self._store_error:
            raise PeerError("the job's store cannot be reached", why=self._store_error)
        return self._shared.store

    def summary(self) -> dict[str, Any]:
        """How the job ended, as JSON has it."""
        return {
            "exit_code": self.exit_code,
            "cause": asdict(self.cause) if self.cause else None,
            "workers": [worker.summary() for worker in self.workers],
        }

    # ------------------------------------------------------------------------------------------ the store

    def _tend_store(self) -> None:
        """Do all that concerns the store, in a thread of its own. See [Note: the launcher's threads]."""
        try:
            if self.spec.rendezvous.index == 0:
                self._shared.connect()
                self._store_settled.set()
            while not self._store_settled.wait(_STORE_S):
                if self._ended.is_set():
                    return
            store = self._shared.store
            cause, said = store.when_any([CAUSE], _EVER_S), store.when_any([SAID], _EVER_S)
            while not self._ended.is_set():
                self._send_cause()
                if self.cause is None:
                    if cause.has_come and self.spec.rendezvous.hosts > 1:
                        cause.fields()  # raises if what has come is the end of the connection
                        self._blame(Cause(None, "a worker of another host failed"))
                    self._look_for_absent()
                if said.has_come and self.spec.rendezvous.index == 0 and (fields := said.fields()):
                    self.output.tell(fields[1].decode(errors="replace")[:_LONGEST_SAID])
                    store.delete(SAID)
                    said = store.when_any([SAID], _EVER_S)
                self._store_news.wait(_STORE_S)
                self._store_news.clear()
            self._send_cause()
            self._wait_for_other_hosts()
        except PacelineError as error:  # without a store no worker can be told
            self._store_error = self._store_error or f"{error.what}: {error.why}"
            self._blame(Cause(None, "the launcher has lost the job's store", why=error.why, do=error.do))
        finally:
            self._store_settled.set()
            self._store_left.set()

    def _send_cause(self) -> None:
        """Write the cause to the store; an earlier one that stands there already becomes the cause."""
        if self._cause_unsent and self.cause:
            self._cause_unsent = False
            earlier = self._shared.store.compare_set(CAUSE, "", self.cause.encode())
            self.cause = Cause.decode(earlier.decode(errors="replace"))

    def _look_for_absent(self) -> None:
        """Look for a worker that has ended without ever joining the others, while one of them waits for it."""
        ended = [w.rank for w in self.workers if w.code == 0]
        here = self._shared.store.collected(_HERE, self.spec.world_size) if ended else {}
        absent = [rank for rank in ended if rank not in here]
        if absent and here:
            self._blame(
                Cause(
                    absent[0],
                    f"worker {absent[0]} ended, with exit code 0, before it called paceline.prepare",
                    why="the other workers wait for it there",
                    do="let every worker call prepare, or start only those that do: --workers",
                )
            )

    def _wait_for_other_hosts(self) -> None:
        """Keep the store of several hosts up until the last of them needs it no more."""
        rendezvous, store = self.spec.rendezvous, self._shared.store
        if rendezvous.hosts == 1:
            return
        until = time.monotonic() + (2 * self.spec.grace_s if self.cause else _LINGER_S)
        gone = store.add(_GONE, 1)
        if rendezvous.index:
            store.take_back_will()
        while rendezvous.index == 0 and gone < rendezvous.hosts and time.monotonic() < until and not self.stopped_by:
            time.sleep(0.05)
            gone = store.add(_GONE, 0)

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

    def _join(self) -> None:
        """On another host than the first: wait for that, start the workers, and watch them."""
        try:
            self._shared.join(lambda: self._stops > 0)
            self._start_workers()
            self._store_settled.set()
        except PacelineError as error:
            if self.stopped_by is None:
                self.cause = Cause(None, error.what, error.why, error.do, kind=type(error).__name__)
        self._watch()

    def _watch(self) -> None:
        try:
            while self._supervisor.running:
                for worker in self._supervisor.watch(0.1):
                    if worker.code and self.cause is None:
                        self._blame(self._describe(worker, worker.code))
                if self.cause is not None:
                    self._supervisor.kill_stopped()
            self._leave_store()
        except Exception as error:  # a watcher that fails must not look like a job that went well
            self.cause = Cause(None, "the launcher failed", why=f"{type(error).__name__}: {error}")
        finally:
            with contextlib.ExitStack() as last:  # whoever waits for the job must not wait for ever
                last.callback(self._done.set)
                last.callback(self.output.finish)
                last.callback(self._shared.close)
                last.callback(self._ended.set)
                last.callback(self._supervisor.kill)

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
