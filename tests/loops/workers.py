"""Two processes that work through the loops of one column, and one that runs the same loops plainly.

A process lives as long as nothing fails in it: loops of a column follow one another in one session, as a notebook has
them, and `paceline.shutdown()` ends it every few loops. So a cell costs a fraction of a second. After an error both are
replaced, and a cell that failed behind others is run again by fresh ones.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

import processes
from loops.job import Job, collect, loops

WORKERS = 2
PATIENCE_S = 100.0  # for one cell; longer than a wait's own time-out, which must have ended it
AFTERMATH_S = 50.0  # for a worker whose partner has answered already
_SESSION = 10  # loops to a session


@dataclass
class Answer:
    """What became of one run of a loop in one process. Tensors travel as bytes of float64."""

    own: dict[str, bytes] = field(default_factory=dict)  # what the loop gave, on this worker
    agreed: dict[str, bytes] = field(default_factory=dict)  # the same under paceline.consensus()
    error: str = ""  # the class of what it raised
    ours: bool = False  # it is a PacelineError
    waited: bool = False  # a wait ran past its time-out
    what: str = ""
    do: str = ""
    trace: str = ""
    stage: str = ""  # where it was raised: prepare, loop, consensus, shutdown
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        return not self.error

    @property
    def goes_on(self) -> bool:
        """Can the process run another loop? After a refusal by `prepare` it can: nothing had begun."""
        return self.fine or (self.stage == "prepare" and self.error == "MethodError")


class Pair:
    """Processes that answer together: two workers of one column, or (`column=None`) the plain one."""

    def __init__(self, column: str | None) -> None:
        self.column = column
        self._running: list[tuple[Any, Connection]] = []
        self.turn = 0  # loops that these processes have been given

    @property
    def fresh(self) -> bool:
        """Is the next loop the first one of new processes?"""
        return not self._running

    def run(self, name: str, *, own: str = "sgd") -> list[Answer]:
        """The loop of that name, on every process. own: which optimizer a plain run takes."""
        if not self._running:
            self._start()
        self.turn += 1
        for _, pipe in self._running:
            pipe.send((name, own, self.turn % _SESSION == 0 or loops()[name].apart))  # who is through early leaves
        answers = self._hear()
        if not all(a.goes_on for a in answers):
            self.close()
        return answers

    def close(self) -> None:
        """End the processes."""
        for _, pipe in self._running:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, pipe in self._running:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._running, self.turn = [], 0

    def _start(self) -> None:
        size = 1 if self.column is None else WORKERS
        base = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        ports = [processes.free_port() for _ in range(400)] if size > 1 else [0]
        for rank in range(size):
            here, there = processes._context.Pipe()
            env = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = processes._context.Process(target=_serve, args=(self.column, rank, env, ports, there))
            process.start()
            there.close()
            self._running.append((process, here))

    def _hear(self) -> list[Answer]:
        """The answers of all, in rank order. A worker that died or does not answer has an answer that says so."""
        answers: dict[int, Answer] = {}
        end = time.monotonic() + PATIENCE_S
        while len(answers) < len(self._running) and (left := end - time.monotonic()) > 0:
            open_ = {pipe: rank for rank, (_, pipe) in enumerate(self._running) if rank not in answers}
            for pipe in wait_for(list(open_), left):
                rank = open_[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self._running[rank][0].join(1)
                    answers[rank] = Answer(error="Died", what=f"exit code {self._running[rank][0].exitcode}")
                end = min(end, time.monotonic() + AFTERMATH_S)
        return [answers.get(r, Answer(error="Hang", what="no answer")) for r in range(len(self._running))]


def _serve(column: str | None, rank: int, env: dict[str, str], ports: list[int], pipe: Connection) -> None:
    """A process: it runs what it is sent until it is sent None, or something failed."""
    os.environ.update(env)
    if "LOOPS_LOG" in os.environ:
        log = os.open(f"{os.environ['LOOPS_LOG']}.{column}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    else:
        log = os.open(os.devnull, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    torch.set_num_threads(1)
    loops()
    gc.freeze()  # a collection then takes what loops have left, not a second for all of torch
    turn = 0
    while (task := pipe.recv()) is not None:
        name, own, last = task
        os.environ["MASTER_PORT"] = str(ports[turn % len(ports)])
        turn += last
        print(f"---- {name}", file=sys.stderr, flush=True)
        answer = _answer(name, column, own, rank, last=last)
        with contextlib.suppress(OSError):
            pipe.send(answer)
        if not answer.goes_on:
            break
    from paceline.session.session import current

    if (session := current()) is not None:
        session.process.exit_code = 0
        session.process.leave()
    os._exit(0)


def _answer(name: str, column: str | None, own: str, rank: int, *, last: bool) -> Answer:
    """Run the loop. last: the session ends after it."""
    import torch

    import paceline
    from paceline.session.session import current

    answer, began = Answer(), time.monotonic()
    job = Job(plain=True, own=own) if column is None else _job(column, rank)
    try:
        with _clean(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = loops()[name].run(job)
            answer.own = answer.agreed = dict(_packed(result))
            if column is not None:
                job.stage = "consensus"
                with paceline.consensus(), torch.no_grad():
                    answer.agreed = dict(_packed(result))
            del result
            if last:
                gc.collect()
                job.stage = "shutdown"
                paceline.shutdown()
    except Exception as error:
        answer.stage = job.stage
        answer.error, answer.trace = type(error).__name__, traceback.format_exc()
        print(answer.trace, file=sys.stderr, flush=True)
        answer.ours = isinstance(error, paceline.PacelineError)
        answer.waited = isinstance(error, paceline.PeerTimeoutError)
        answer.what, answer.do = getattr(error, "what", str(error)), getattr(error, "do", "")
        if (session := current()) is not None and not answer.goes_on:  # what an uncaught exception does in a script
            session.process.fail(error)
    answer.seconds = time.monotonic() - began
    return answer


def _job(column: str, rank: int) -> Job:
    from loops.methods import columns

    chosen = columns()[column]
    return Job(plain=False, own=chosen.own, method=chosen.make(), rank=rank, world_size=WORKERS)


def _packed(result: Any) -> Iterator[tuple[str, bytes]]:
    return ((name, x.numpy().tobytes()) for name, x in collect(result))


@contextlib.contextmanager
def _clean() -> Iterator[None]:
    """Every loop begins with the same seeds, and what it leaves behind of torch's settings is put back."""
    import numpy
    import torch

    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
