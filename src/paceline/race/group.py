"""A contender's worker processes: started once, let go for a turn, ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PeerError
from paceline.launch import die_with_parent
from paceline.race.gate import GATE
from paceline.race.network import Place
from paceline.race.tail import Tail
from paceline.telemetry import AnyEvent, Bye

_POLL_S = 0.2
_GRACE_S = 3.0  # after one worker has failed, the others get this long to say why, before they are ended
_CAUSE = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b")
_ADVICE = re.compile(r"\s+(why|do): ")  # the second and third line of our own errors
_RANK = re.compile(r"^\[rank\d+\]: ")  # torch puts it before every line of a traceback
_LONGEST = 400
# What a worker says whose neighbour has gone: true, but not the reason.
_CONSEQUENCE = re.compile(r"connection (closed|reset|refused)|broken pipe|PeerError|DeadlineError", re.IGNORECASE)


class ContenderError(Exception):
    """This contender is out. The text is for its row."""


@dataclass
class Worker:
    """One process and the race's ends of its pipes."""

    process: subprocess.Popen[bytes]
    go: int
    done: int
    log: Path
    unread: bytes = b""
    ready: bool = False  # it has written `done` since it was last let go
    silent: bool = False  # its end of the pipe is closed


class Group:
    """All workers of one contender."""

    def __init__(self, directory: Path, command: Sequence[str], places: Sequence[Place], env: dict[str, str]) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.workers: list[Worker] = []
        self.events: list[list[AnyEvent]] = [[] for _ in places]
        self._tails = [Tail(directory / f"worker-{rank}.jsonl") for rank in range(len(places))]
        try:
            for rank, place in enumerate(places):
                self.workers.append(_start(rank, [*place.prefix, *command], place.env | env, directory))
        except (OSError, subprocess.SubprocessError) as error:
            self.end()
            raise ContenderError(f"cannot be started: {error}") from None

    def go(self, steps: int) -> None:
        """Let every worker do that many steps."""
        for worker in self.workers:
            worker.ready = False
            _say(worker, f"go {steps}\n")

    def wait(self, seconds: float) -> bool:
        """Until every worker is ready for another turn. False: the script has come to its own end."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                if not worker.silent:
                    selector.register(worker.done, selectors.EVENT_READ, worker)
            while not all(w.ready for w in self.workers):
                for key, _ in selector.select(_POLL_S):
                    if not _hear(key.data):
                        selector.unregister(key.fd)
                self._check()
                if all(w.process.poll() == 0 for w in self.workers):
                    return False
                if time.monotonic() > end:
                    late = [rank for rank, w in enumerate(self.workers) if not w.ready]
                    raise ContenderError(
                        self._told(late[0], f"worker {late[0]} did not finish its turn in {seconds:.0f} s")
                    )
        return True

    def stop(self, seconds: float) -> None:
        """No more turns: the script ends by itself, with its last evaluation and whatever else it does."""
        for worker in self.workers:
            _say(worker, "stop\n")
        end = time.monotonic() + seconds
        while any(w.process.poll() is None for w in self.workers):
            self._check()
            if time.monotonic() > end:
                raise ContenderError(self._told(0, f"did not end within {seconds:.0f} s of being told to"))
            time.sleep(0.02)
        self._check()

    def end(self) -> None:
        """End what still runs. It is safe to call at any time, and again."""
        running = [w for w in self.workers if w.process.poll() is None]
        for worker in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)  # with its data loaders: it leads a session of its own
        for worker in running:
            worker.process.wait()
        for worker in self.workers:
            for fd in (worker.go, worker.done):
                if fd >= 0:
                    os.close(fd)
            worker.go = worker.done = -1
        self.read()

    def read(self) -> None:
        """Add what the workers have written since the last time to `events`."""
        for events, tail in zip(self.events, self._tails, strict=True):
            events.extend(tail.new())

    def _check(self) -> None:
        """Raise if a worker has failed, with the reason of the one that knows it."""
        if not any(w.process.poll() for w in self.workers):
            return
        end = time.monotonic() + _GRACE_S
        while any(w.process.poll() is None for w in self.workers) and time.monotonic() < end:
            time.sleep(0.05)
        failed = [rank for rank, w in enumerate(self.workers) if w.process.poll()]
        self.read()
        reasons = {rank: self._reason(rank) for rank in failed}
        # The first that does not merely complain about another worker.
        cause = next((rank for rank in failed if not self._blames_another(rank, reasons[rank])), failed[0])
        raise ContenderError(self._told(cause, reasons[cause]))

    def _blames_another(self, rank: int, reason: str) -> bool:
        code = self.workers[rank].process.returncode
        return code == PeerError.exit_code or _CONSEQUENCE.search(reason) is not None

    def _reason(self, rank: int) -> str:
        code = self.workers[rank].process.returncode
        named = next((e.error for e in self.events[rank] if isinstance(e, Bye) and e.error), "")
        if named:
            return named.splitlines()[0]
        if code < 0:
            return f"worker {rank} was ended by {signal.Signals(-code).name}"
        return first_cause(self.workers[rank].log) or f"worker {rank} ended with exit code {code}"

    def _told(self, rank: int, reason: str) -> str:
        return f"{reason} (log: {self.workers[rank].log})"


def first_cause(log: Path) -> str:
    """What went wrong, from a worker's output: the last exception it names, else its last line."""
    try:
        said = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line for raw in said if (line := _RANK.sub("", raw).rstrip())]
    named = [i for i, line in enumerate(lines) if _CAUSE.match(line)]
    if not named:
        return lines[-1].strip()[:_LONGEST] if lines else ""
    what, *rest = lines[named[-1] :]
    advice = [line.strip() for line in rest[:2] if _ADVICE.match(line)]
    return "; ".join([what.removeprefix("paceline.errors."), *advice])[:_LONGEST]


def _start(rank: int, command: list[str], env: dict[str, str], directory: Path) -> Worker:
    their_go, go = os.pipe()
    done, their_done = os.pipe()
    log = directory / f"worker-{rank}.log"
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=env | {GATE: f"{their_go},{their_done}"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(their_go, their_done),
                preexec_fn=die_with_parent(),
                # Ctrl-C is for the race, which then ends its workers in an order that leaves results behind.
                start_new_session=True,
            )
    except (OSError, subprocess.SubprocessError):
        os.close(go)
        os.close(done)
        raise
    finally:
        os.close(their_go)
        os.close(their_done)
    return Worker(process, go, done, log)


def _say(worker: Worker, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # it has ended: that is found out where its exit code is looked at
        os.write(worker.go, text.encode())


def _hear(worker: Worker) -> bool:
    """Read what the worker wrote. False: it has closed its end."""
    some = os.read(worker.done, 4096)
    if not some:
        worker.silent = True
        return False
    *lines, worker.unread = (worker.unread + some).split(b"\n")
    worker.ready = worker.ready or any(line.startswith(b"done ") for line in lines)
    return True
