"""Workers as real processes over gloo: run(world, fn) calls fn(rank) in each and gives an Outcome per worker.

Processes are forked from a server that has torch imported, so a world of three costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "paceline.api"])


@dataclass
class Outcome:
    """What became of one worker."""

    value: Any = None
    error: str = ""  # the class name of what it raised
    message: str = ""
    exitcode: int | None = None
    trace: str = ""


def _through(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Tensors travel as arrays: torch would share their memory with a process that is gone by then."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_through(v, kind, change) for v in value)
    return value


_PORTS = 5000  # for each process that runs tests, below those that the system gives to outgoing connections
_runner = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.count(random.randrange(_PORTS))


def free_port() -> int:
    """A port that neither another test nor the system takes before it is used."""
    for _ in range(_PORTS):
        port = 12000 + (_runner % 4) * _PORTS + next(_ports) % _PORTS
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def _worker(rank: int, env: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    outcome = Outcome()
    try:
        outcome.value = fn(rank, *args)
    except SystemExit as error:
        outcome.exitcode = int(error.code or 0)
    except Exception as error:
        outcome.error, outcome.message, outcome.trace = type(error).__name__, str(error), traceback.format_exc()
        from paceline.session.session import current

        if (session := current()) is not None:  # what an uncaught exception does in a script
            session.process.exit_code = 0
            session.process.fail(error)
    outcome.value = _through(outcome.value, torch.Tensor, lambda t: t.detach().numpy())
    pipe.send(outcome)
    from paceline.session.session import current

    if (session := current()) is not None:
        session.process.leave()


def join(timeout_s: float = 20.0, env: Any = None) -> Any:
    """Meet the other workers without `prepare`: a session without engines, whose process says good-bye as usual."""
    from paceline.comm.environment import Environment
    from paceline.session import session
    from paceline.session.settings import Settings

    return session.open_session(env or Environment.read(), Settings(timeout=timeout_s))


def run(
    world_size: int, fn: Callable[..., Any], *args: Any, env: dict[str, str] | None = None, wait_s: float = 60
) -> list[Outcome]:
    port = str(free_port())
    base = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    started = []
    for rank in range(world_size):
        here, there = _context.Pipe()
        own = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
        process = _context.Process(target=_worker, args=(rank, own, fn, args, there))
        process.start()
        there.close()
        started.append((process, here))
    outcomes = []
    for _, here in started:
        outcome = Outcome()
        try:
            if here.poll(wait_s):
                outcome = here.recv()
            else:
                outcome = Outcome(error="Hang", message=f"no answer within {wait_s} s")
        except EOFError:
            outcome = Outcome(error="Died")
        outcomes.append(outcome)
    for (process, _), outcome in zip(started, outcomes, strict=True):
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        if outcome.exitcode is None:
            outcome.exitcode = process.exitcode
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """The results, or the first worker's failure as this test's."""
    import numpy
    import torch

    for rank, o in enumerate(outcomes):
        assert not o.error, f"worker {rank}: {o.error}: {o.message}\n{o.trace}"
    return [_through(o.value, numpy.ndarray, torch.from_numpy) for o in outcomes]
