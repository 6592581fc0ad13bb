"""A contender's worker processes: started once, allowed some steps in each turn, ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PeerError, plain
from paceline.session.gate import GATE
from paceline.telemetry.events import AnyEvent, Bye
from paceline.tools.launch import LaunchedWorker, Supervisor, WorkerCommand
from paceline.tools.launch.last_words import last_words
from paceline.tools.race.event_tail import EventTail
from paceline.tools.race.network import WorkerPlacement

_POLL_S = 0.2
_GRACE_S = 3.0  # after one worker has failed, the others get this long to say why, before they are ended
_LONGEST = 400
# What a worker reports whose neighbour has gone: true, but not the reason.
_CONSEQUENCE = re.compile(r"connection (closed|reset|refused)|broken pipe|PeerError|PeerTimeoutError", re.IGNORECASE)


class ContenderError(Exception):
    """A contender has failed and is out of the race. The text is shown in its row."""


@dataclass
class GatedWorker:
    """One worker process with the race's ends of the two pipes to its gate (see session/gate.py)."""

    process: LaunchedWorker
    go_fd: int
    done_fd: int
    log: Path
    unread: bytes = b""
    ready: bool = False  # it has written `done` since its last turn began
    closed: bool = False  # it has closed its end of the pipe

    def say(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its exit code will show
            os.write(self.go_fd, text.encode())

    def hear(self) -> None:
        """Read what the worker wrote to its pipe."""
        received = os.read(self.done_fd, 4096)
        if not received:
            self.closed = True
            return
        *lines, self.unread = (self.unread + received).split(b"\n")
        self.ready = self.ready or any(line.startswith(b"done ") for line in lines)

    def close(self) -> None:
        """Close the pipes. It is safe to call again."""
        for fd in (self.go_fd, self.done_fd):
            if fd >= 0:
                os.close(fd)
        self.go_fd = self.done_fd = -1


class ContenderWorkers:
    """All workers of one contender."""

    def __init__(
        self,
        directory: Path,
        command: Sequence[str],
        placements: Sequence[WorkerPlacement],
        env: Mapping[str, str],
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.workers: list[GatedWorker] = []
        self.events: list[list[AnyEvent]] = [[] for _ in placements]
        self._tails = [EventTail(directory / f"worker-{rank}.jsonl") for rank in range(len(placements))]
        self._supervisor = Supervisor()
        try:
            for rank, placement in enumerate(placements):
                argv = [*placement.prefix, *command]
                self.workers.append(self._start(rank, argv, {**placement.env, **env}))
        except (OSError, subprocess.SubprocessError) as error:
            self.kill()
            raise ContenderError(f"cannot be started: {error}") from None

    def go(self, steps: int) -> None:
        """Let every worker do that many steps."""
        for worker in self.workers:
            worker.ready = False
            worker.say(f"go {steps}\n")

    def wait(self, seconds: float) -> bool:
        """Wait until every worker is ready for another turn. False: the script has come to its own end."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                if not worker.closed:
                    selector.register(worker.done_fd, selectors.EVENT_READ, worker)
            while not all(worker.ready for worker in self.workers):
                for key, _ in selector.select(_POLL_S):
                    key.data.hear()
                    if key.data.closed:
                        selector.unregister(key.fd)
                self._check()
                if not self._supervisor.running:
                    return False
                if time.monotonic() > end:
                    late = next(rank for rank, worker in enumerate(self.workers) if not worker.ready)
                    reason = f"worker {late} did not finish its turn in {seconds:.0f} s"
                    raise ContenderError(self._with_log(late, reason))
        return True

    def stop(self, seconds: float) -> None:
        """End the turns: the script ends by itself, with its last evaluation and whatever else it does."""
        for worker in self.workers:
            worker.say("stop\n")
        end = time.monotonic() + seconds
        while self._supervisor.running:
            self._check()
            if time.monotonic() > end:
                raise ContenderError(self._with_log(0, f"did not end within {seconds:.0f} s of being told to"))
            self._supervisor.wait(_POLL_S)
        self._check()

    def kill(self) -> None:
        """End what still runs, and read the last events. It is safe to call at any time, and again."""
        self._supervisor.kill()
        for worker in self.workers:
            worker.close()
        self.read()

    def read(self) -> None:
        """Add what the workers have written since the last time to `events`."""
        for events, tail in zip(self.events, self._tails, strict=True):
            events.extend(tail.new())

    def _start(self, rank: int, argv: Sequence[str], env: Mapping[str, str]) -> GatedWorker:
        their_go, go_fd = os.pipe()
        done_fd, their_done = os.pipe()
        log = self.directory / f"worker-{rank}.log"
        try:
            with log.open("wb") as out:
                process = self._supervisor.start(
                    WorkerCommand(
                        rank=rank,
                        argv=argv,
                        env={**env, GATE: f"{their_go},{their_done}"},
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        pass_fds=(their_go, their_done),
                    )
                )
        except (OSError, subprocess.SubprocessError):
            os.close(go_fd)
            os.close(done_fd)
            raise
        finally:
            os.close(their_go)
            os.close(their_done)
        return GatedWorker(process, go_fd, done_fd, log)

    def _check(self) -> None:
        """Raise if a worker has failed, with the reason of the one that knows it."""
        self._supervisor.watch(0)
        if not self._supervisor.failed:
            return
        self._supervisor.wait(_GRACE_S)
        self.read()
        failed = [worker.rank for worker in self._supervisor.failed]
        reasons = {rank: self._reason(rank) for rank in failed}
        # The first that does not merely complain about another worker.
        cause = next((rank for rank in failed if not self._blames_another(rank, reasons[rank])), failed[0])
        raise ContenderError(self._with_log(cause, reasons[cause]))

    def _blames_another(self, rank: int, reason: str) -> bool:
        return self.workers[rank].process.code == PeerError.exit_code or _CONSEQUENCE.search(reason) is not None

    def _reason(self, rank: int) -> str:
        code = self.workers[rank].process.code or 0
        errors = [event.error for event in self.events[rank] if isinstance(event, Bye) and event.error]
        if errors:
            return plain(errors[0].splitlines()[0])
        if code < 0:
            return f"worker {rank} was ended by {signal.Signals(-code).name}"
        return last_exception(self.workers[rank].log) or f"worker {rank} ended with exit code {code}"

    def _with_log(self, rank: int, reason: str) -> str:
        return f"{reason} (log: {self.workers[rank].log})"


def last_exception(log: Path) -> str:
    """What went wrong, from a worker's output, with the advice of an error of ours."""
    try:
        output = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = last_words(output)
    advice = [f"{word} {text}" for word, text in (("why:", found.why), ("do: ", found.do)) if text]
    return "; ".join(filter(None, [found.what, *advice]))[:_LONGEST]
