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
import ctypes
import datetime
import importlib
import ipaddress
import json
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, Any

import psutil

from paceline.environment import SERVED
from paceline.errors import PeerError, UsageError

if TYPE_CHECKING:
    from paceline.lab.namespaces import Lab

PORT = 29511  # where the store of several hosts listens unless told otherwise
MOST_WORKERS = 256  # on one host
GRACE_S = 5.0
# Where the first cause is in the store: at its root, where a worker's board is when paceline.prepare made
# the process group, and where it is when the script had made it. A worker uses one of them; what is not
# used costs nothing.
CAUSES = ("cause", "paceline/run.0/cause", "default_pg/0//paceline/cause")
_GONE = "launchers gone"  # the store's key that counts the hosts whose workers have all ended
_LINGER_S = 30.0  # how long the first host keeps the store up for the others
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|[0-9A-Fa-f:]{2,39}")
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# ---------------------------------------------------------------------------------------------------- where


@dataclass(frozen=True)
class Site:
    """Where this host's workers stand among all of the job's, and where all of them meet."""

    address: str = "127.0.0.1"  # the first host's, as every worker can reach it
    own: str = "127.0.0.1"  # this host's
    index: int = 0  # of this host
    hosts: int = 1
    port: int = 0  # of the store; 0: any free one
    lab: Lab | None = None  # this machine is several hosts, each in a namespace

    @classmethod
    def among(cls, hosts: Sequence[str], port: int = PORT) -> Site:
        """This host's place in a list that is the same on all of them, found by its addresses."""
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise UsageError(f"{host!r} is not a host name or an address", do="give names, separated by commas")
        if len(set(hosts)) < len(hosts):
            raise UsageError("a host is listed twice", why=f"hosts: {', '.join(hosts)}")
        if not 1 <= port <= 65535:
            raise UsageError(f"port {port} is not in 1..65535")
        own = own_addresses()
        mine = {i: address for i, host in enumerate(hosts) if (address := _own_address(host, own))}
        if len(mine) != 1:
            names = ", ".join(hosts[i] for i in mine)
            raise UsageError(
                f"{names} are all this host" if mine else f"this host is none of {', '.join(hosts)}",
                why=f"it is {socket.gethostname()}, with the addresses {', '.join(sorted(own))}",
                do="run the same command on every host, with one name or address for each",
            )
        ((index, address),) = mine.items()
        if len(hosts) == 1:
            return cls()
        if ipaddress.ip_address(address).is_loopback:
            raise UsageError(
                f"{hosts[index]} is {address} here, which the other hosts cannot reach",
                do="list the hosts by the addresses they know each other by",
            )
        if not _resolve(hosts[0]):
            raise PeerError(f"cannot resolve {hosts[0]!r}", do="list the first host by its address")
        first = address if index == 0 else hosts[0]
        return cls(address=first, own=address, index=index, hosts=len(hosts), port=port)

    @classmethod
    def in_lab(cls, lab: Lab) -> Site:
        """The workers spread evenly over the lab's hosts; the store on host 0, behind its link."""
        return cls(address=lab.address(0), own=lab.address(0), lab=lab)

    @property
    def interface(self) -> str:
        return self.lab.interface if self.lab else own_addresses().get(self.own, "")

    def prefix(self, local: int, workers: int) -> list[str]:
        return self.lab.exec_prefix(local * self.lab.hosts // workers) if self.lab else []

    def inside(self, work: Callable[[], Any]) -> Any:
        """Call `work` where the store is to be."""
        return self.lab.inside(0, work) if self.lab else work()

    def listen(self) -> socket.socket:
        """The store's socket, on this one address. Bound by us, because the store would bind them all."""
        listener = socket.socket(socket.AF_INET6 if ":" in self.own else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.own, self.port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            other = f"give all hosts another one: --port {_free_port(self.own)} is free here" if self.port else ""
            raise UsageError(
                f"cannot listen on {self.own} port {self.port}",
                why=str(error),
                do=other or "bring the loopback interface up: ip link set lo up",
            ) from None
        return listener


def own_addresses() -> dict[str, str]:
    """This host's addresses, each with its interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    }


def _resolve(host: str) -> list[str]:
    try:
        return [str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _own_address(host: str, own: Mapping[str, str]) -> str:
    """The address by which `host` is this host; empty if it is another one."""
    known = _resolve(host)
    loopback = [a for a in known if ipaddress.ip_address(a).is_loopback]
    return next((a for a in known if a in own and a not in loopback), loopback[0] if loopback else "")


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def cores() -> int:
    """How many this process may use, which a container or a batch system makes fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ----------------------------------------------------------------------------------------------- one worker


@dataclass(frozen=True)
class Cause:
    """What ended the job. `worker` is whose fault it was, where that is known."""

    worker: int | None
    what: str
    why: str = ""
    step: int | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Cause:
        """Whatever is in the store: a worker may have written it, or anyone who can reach the port."""
        try:
            found = json.loads(text)
            worker, what, why, step = (found.get(k) for k in ("worker", "what", "why", "step"))
        except (ValueError, AttributeError, RecursionError):
            return cls(None, "a worker failed", why="what it wrote about it cannot be read")
        whole = [n if type(n) is int else None for n in (worker, step)]
        return cls(whole[0], str(what or "a worker failed"), str(why or ""), whole[1])


@dataclass
class Worker:
    """One process of the job."""

    rank: int
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    _lock: Any = field(default_factory=threading.RLock, repr=False)  # a signal's handler may come on top of us

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; -N when signal N killed it; None while it runs."""
        return self.process.returncode if self.ended else None

    def reap(self) -> bool:
        """Has it ended? If it failed, its own children (data loaders) end with it."""
        with self._lock:
            if self.ended:
                return True
            # Looked at but not yet waited for, so that nobody else can be given its number before the next
            # line.
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                return False
            if status.si_code != os.CLD_EXITED or status.si_status:
                self._kill_group()
            self.process.wait()
            self.ended = time.monotonic()
            return True

    def send(self, signum: int) -> None:
        with self._lock:
            if self.ended:
                return
            if signum == signal.SIGKILL:
                self._kill_group()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def summary(self) -> dict[str, Any]:
        seconds = (self.ended or time.monotonic()) - self.started
        return {"rank": self.rank, "pid": self.pid, "exit_code": self.code, "seconds": round(seconds, 3)}


def worker_env(site: Site, workers: int, local: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of one worker: `base`, and its place among the others.

    OMP_NUM_THREADS and GLOO_SOCKET_IFNAME are only set where `base` does not: one worker's threads must not
    take another's cores, and gloo must listen nowhere but where the workers meet.
    """
    env = dict(base)
    env.update(
        RANK=str(site.index * workers + local),
        WORLD_SIZE=str(site.hosts * workers),
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(workers),
        MASTER_ADDR=site.address,
        MASTER_PORT=str(port),
        PYTHONUNBUFFERED="1",
    )
    env[SERVED] = "True"
    usual = {"OMP_NUM_THREADS": str(max(1, cores() // workers)), "GLOO_SOCKET_IFNAME": site.interface}
    env.update({name: value for name, value in usual.items() if value and not env.get(name)})
    return env


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the kernel kills the new process when the thread that started it ends, however that happens."""
    # Everything is looked up before the fork: after it, other threads' locks may be held for ever.
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    words = [ctypes.c_ulong(word) for word in (signal.SIGKILL, 0, 0, 0)]
    parent = os.getpid()

    def bind() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, *words)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

    return bind


# --------------------------------------------------------------------------------------------- their output


class Output:
    """Where the workers' lines go: to this process's own streams, and to a file for each worker with
    `log_dir`.

    Worker 0's output passes as it is, so that a job reads (and can be piped) as the plain script does; the
    lines of every other worker begin with its rank. A single worker without log file simply inherits the
    streams.
    """

    def __init__(self, *, log_dir: Path | None = None, out: IO[bytes] | None, err: IO[bytes] | None) -> None:
        self.log_dir, self.out, self.err = log_dir, out, err
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, list[_Stream]] = {}
        self._open: dict[IO[bytes], bool] = {}  # is the last line on it unfinished?
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="worker output", daemon=True)

    @classmethod
    def passed(cls, log_dir: Path | None = None, *, to_stderr: bool = False) -> Output:
        """The usual: stdout to stdout, stderr to stderr (or both to stderr: stdout is for a result)."""
        err = sys.stderr.buffer
        return cls(log_dir=log_dir, out=err if to_stderr else sys.stdout.buffer, err=err)

    @classmethod
    def kept(cls, log_dir: Path) -> Output:
        """To the log files only."""
        return cls(log_dir=log_dir, out=None, err=None)

    def inherits(self, world: int) -> bool:
        return world == 1 and self.log_dir is None and self.out is sys.stdout.buffer

    def add(self, worker: Worker) -> None:
        log = (self.log_dir / f"worker-{worker.rank}.log").open("wb", buffering=0) if self.log_dir else None
        for pipe, sink in ((worker.process.stdout, self.out), (worker.process.stderr, self.err)):
            if pipe is not None:
                stream = _Stream(worker.rank, pipe, sink, log)
                self._streams.setdefault(worker.rank, []).append(stream)
                self._selector.register(pipe, selectors.EVENT_READ, stream)

    def start(self) -> None:
        self._thread.start()

    def last_line(self, rank: int) -> str:
        """The last line of an ended worker's stderr: in Python, the exception that ended it."""
        if rank not in self._streams:
            return ""
        stream = self._streams[rank][1]
        stream.over.wait(0.2)  # it has ended, but its words may still be in the pipe
        lines = [line.strip() for line in stream.tail]
        return next((line.decode(errors="replace") for line in reversed(lines) if line), "")[:500]

    def finish(self) -> None:
        """Every worker has ended: pass on what is still in the pipes, even if grandchildren hold them open."""
        self._stop.set()
        self._thread.join()
        for stream in (s for streams in self._streams.values() for s in streams):
            stream.pipe.close()
            if stream.log:
                stream.log.close()
        self._selector.close()

    def _pump(self) -> None:
        quiet = 0
        while self._selector.get_map() and quiet < 3:
            ready = self._selector.select(timeout=0.1)
            quiet = quiet + 1 if self._stop.is_set() and not ready else 0
            for key, _ in ready:
                stream: _Stream = key.data
                chunk = os.read(key.fd, 1 << 16)
                self._log(stream, chunk)
                self._show(stream, stream.feed(chunk))
                if not chunk:
                    self._selector.unregister(stream.pipe)
                    stream.over.set()

    def _log(self, stream: _Stream, chunk: bytes) -> None:
        if stream.log is None or not chunk:
            return
        try:
            stream.log.write(chunk)
        except OSError as error:  # a full disk must not end the training
            if not self._lost:
                print(f"paceline: a log file is incomplete: {error}", file=sys.stderr)
            self._lost, stream.log = True, None

    def _show(self, stream: _Stream, text: bytes) -> None:
        sink = stream.sink
        if sink is None or not text:
            return
        apart = b"\n" if stream.prefix and self._open.get(sink) else b""
        try:
            sink.write(apart + text)
            sink.flush()
        except (OSError, ValueError):  # the reader is gone (`| head`): the workers go on
            stream.sink = None
        self._open[sink] = not text.endswith((b"\n", b"\r"))


class _Stream:
    """One worker's stdout or stderr on its way to ours."""

    _LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?=[^\n]))")  # progress bars end their lines with \r
    _COLOURS = (36, 33, 35, 32, 34, 31)

    def __init__(self, rank: int, pipe: IO[bytes], sink: IO[bytes] | None, log: IO[bytes] | None) -> None:
        self.pipe, self.sink, self.log = pipe, sink, log
        self.tail: deque[bytes] = deque(maxlen=5)
        self.over = threading.Event()
        self.prefix = b"" if rank == 0 else f"[{rank}] ".encode()
        if self.prefix and sink is not None and sink.isatty() and not os.environ.get("NO_COLOR"):
            self.prefix = b"\x1b[%dm[%d]\x1b[0m " % (self._COLOURS[rank % len(self._COLOURS)], rank)
        self._partial = b""

    def feed(self, chunk: bytes) -> bytes:
        """What to show now. An empty chunk is the end."""
        self._partial += chunk
        if not chunk and self._partial:
            self._partial += b"\n"
        lines = self._LINE.findall(self._partial)
        self._partial = self._partial[sum(map(len, lines)) :]
        if len(self._partial) > 1 << 16:  # no line is that long: somebody writes bytes
            lines, self._partial = [*lines, self._partial + b"\n"], b""
        self.tail.extend(lines)
        return b"".join(self.prefix + line for line in lines) if self.prefix else chunk


# ---------------------------------------------------------------------------------------------- all workers


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
            kept = [self._store.compare_set(key, "", mine).decode(errors="replace") for key in CAUSES]
            self.cause = Cause.decode(next((text for text in kept if text != mine), mine))
        except (RuntimeError, AttributeError) as error:  # there is no store (any more), and so nobody to tell
            self._broken = self._broken or str(error)

    def _read_cause(self) -> None:
        """Has a worker of another host failed? Those here may be blocked where they cannot notice."""
        if self.site.hosts == 1 or self._store is None or self.cause or time.monotonic() - self._looked < 0.5:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(RuntimeError):
            if any(self._store.check([key]) for key in CAUSES):
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
def forwarding(*crews: Crew) -> Iterator[None]:
    """While inside, SIGINT, SIGTERM and SIGHUP go to the workers. For the main thread only."""

    def forward(signum: int, frame: FrameType | None) -> None:
        for crew in crews:
            crew.stop(signum)

    # What is ignored stays so: nohup, or a shell's background job.
    before = {s: signal.getsignal(s) for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, forward)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
