"""One worker process: its environment, its end, and what to say of it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.environment import SERVED
from paceline.launch.site import Site, cores

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


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
