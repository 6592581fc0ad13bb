"""What a process holds once it has joined the others: its group, its telemetry, its engines."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from paceline._version import __version__
from paceline.comm.environment import EVENTS, TRACE, Environment, odd_settings, pace_mbit
from paceline.comm.group import Group
from paceline.comm.process import WorkerProcess
from paceline.comm.protocol import Comm
from paceline.comm.rendezvous import Rendezvous, meet
from paceline.core.engine import Engine
from paceline.core.engines import Engines
from paceline.core.redeal import Redeal
from paceline.data import random_streams
from paceline.data.loader import Loader
from paceline.errors import PeerError, UsageError
from paceline.session.advice import advise
from paceline.session.gate import Gate
from paceline.session.objects import Objects
from paceline.session.settings import Settings
from paceline.telemetry import hooks as trace_hooks
from paceline.telemetry.events import Hello, Note
from paceline.telemetry.files import check_folder
from paceline.telemetry.recorder import Recorder
from paceline.telemetry.tape import Tape
from paceline.telemetry.traced_comm import TracedComm
from paceline.telemetry.traced_recorder import TracedRecorder

SLOW_MBIT = 1500.0  # below this the link is what a step on a CPU waits for
_PROBES_KB, _PROBE_S = (64, 64, *[1024] * 8), 0.3  # small ones first: a very slow link shows at once

_current: Session | None = None


def current() -> Session | None:
    """This process's session; None before the first `prepare`."""
    return _current


def open_session(env: Environment, settings: Settings) -> Session:
    """This process's session, which is started if there is none yet: the other workers are met."""
    global _current
    if _current is None:
        _current = Session.start(env, settings)
    elif settings.group is not None and settings.group is not _current.given_group:
        raise UsageError(
            "prepare was called with another group than before",
            why="a process has one session, over one group of workers",
            do="give the same group= in every call, or call paceline.shutdown() in between",
        )
    return _current


def close_session() -> None:
    """Settle what is under way, say good-bye to the other workers and forget the session."""
    global _current
    if _current is not None:
        _current.process.leave()
        _current = None


@dataclass
class Session:
    """One for all calls of `prepare` in a process."""

    rendezvous: Rendezvous
    group: Group
    process: WorkerProcess
    recorder: Recorder
    given_group: Any = None  # the process group handed to `prepare`
    gate: Gate | None = None
    tape: Tape | None = None  # where a timeline is asked for
    has_loader: bool = False  # one was handed to `prepare`
    link_mbit: float = math.inf  # what a worker sends in a mean, the slowest of them
    engines: Engines = field(default_factory=Engines)
    by_optimizer: WeakValueDictionary[int, Engine] = field(default_factory=WeakValueDictionary)  # by the id
    loaders: int = 0  # how many have been prepared
    redeal: Redeal | None = None  # of the batch that was handed out last, if it can be dealt again
    separate: bool = False  # the workers have been given random streams of their own

    @classmethod
    def start(cls, env: Environment, settings: Settings) -> Session:
        """Meet the other workers."""
        if env.events is not None:
            check_folder(env.events, EVENTS, [f"worker-{env.rank}.jsonl"])
        if env.trace is not None:
            check_folder(env.trace, TRACE)
        rendezvous = meet(env, backend=settings.backend, timeout_s=settings.timeout, group=settings.group)
        tape = Tape(env.trace_steps) if env.trace else None
        if tape is not None:
            watching = tape
            rendezvous.wrap = lambda lane: TracedComm(lane, watching)
            trace_hooks.watch_optimizers(tape)
        group = rendezvous.group(rendezvous.rank, rendezvous.world_size)
        process = WorkerProcess(group, timeout_s=settings.timeout, server=rendezvous.server)
        process.watch_exit()
        try:
            return cls._begin(env, settings, rendezvous, process, tape)
        except Exception as error:
            process.fail(error)
            process.say_goodbye()
            raise

    @classmethod
    def _begin(
        cls,
        env: Environment,
        settings: Settings,
        rendezvous: Rendezvous,
        process: WorkerProcess,
        tape: Tape | None,
    ) -> Session:
        """The workers have met: make the first lane and look at the link."""
        group = process.group
        recorder = _recorder(env, tape)
        gate = Gate.from_env(recorder, lambda: barrier(group.lane("control")))
        if gate is not None:
            gate.pace()
        mbit = link_mbit(group.lane("control"), len(rendezvous.route.hosts))
        session = cls(
            rendezvous,
            group,
            process,
            recorder,
            settings.group,
            gate,
            tape,
            link_mbit=mbit,
            engines=Engines(alone=group.world_size == 1),
        )
        if gate is not None:
            gate.before_stop(session.meet)
        process.closing += [session.settle, recorder.close]
        return session

    @property
    def control(self) -> Comm:
        """The lane of set-up and loaders."""
        return self.group.lane("control")

    @property
    def user(self) -> Comm:
        """The lane of paceline.mean and its like."""
        return self.group.lane("user")

    def meet(self) -> None:
        """Bring all workers to a common stop.

        Asynchronous workers would keep others waiting, and what is under way in the turn of another contender would
        take its bytes from it.
        """
        for engine in self.engines:
            engine.overlap.land()
            engine.method.layout.settle(engine.ex)
            if engine.method.sync.is_async:
                engine.method.sync.settle(engine.ex)

    def settle(self) -> None:
        """At the end of a run that has not failed: let what is under way arrive, on every worker."""
        if self.process.failed:
            return
        try:
            for engine in self.engines:
                engine.settle()
                self._advise(engine)
        except PeerError as error:
            self.process.fail(error)
            print(f"paceline: {error}", file=sys.stderr)

    def _advise(self, engine: Engine) -> None:
        """One line of advice at the end, where it was asked for."""
        if engine.options.measure_noise and self.group.rank == 0:
            text = str(advise(engine))
            self.recorder.emit(Note(t=time.monotonic(), text=text))
            print(f"paceline: {text}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------------------------------------ prepare

    def forget_gone(self) -> None:
        """Forget engines whose models and optimizers are gone on every worker: [Note: forgotten], engines.py."""
        if len(self.engines) and self.group.world_size > 1:
            there = torch.tensor(self.engines.collect(), dtype=torch.float32)
            everywhere = self.control.sum(there).wait() == self.group.world_size
            self.engines.keep(everywhere.tolist())

    def check_new(self, objects: Objects) -> None:
        """Refuse an optimizer that is prepared already."""
        if any(id(optimizer) in self.by_optimizer for optimizer in objects.optimizers):
            raise UsageError("this optimizer is prepared already", do="call prepare once for each optimizer")

    def agree(self, objects: Objects, method: str, settings: Settings) -> None:
        """Every worker has the same model, optimizer, data, method and versions, or none of them starts."""
        lines = [
            f"paceline {__version__}",
            f"torch {'.'.join(torch.__version__.split('.')[:2])}",
            f"method {method}",
            *(
                f"{name}={getattr(settings, name)}"
                for name in ("batch", "accumulate", "micro_batch", "loss", "random", "guard")
            ),
            *objects.lines(),
        ]
        self.control.agree("the set-up", "\n".join(lines))

    @torch.no_grad()
    def share_weights(self, objects: Objects, without: Collection[int] = ()) -> None:
        """All start from worker 0's parameters and buffers. without: the ids of those that are not there yet."""
        for model in objects.models:
            for tensor in (*model.parameters(), *model.buffers()):
                if id(tensor) not in without:
                    broadcast_(self.control, tensor)

    def shared_seed(self) -> int:
        """Worker 0's seed, on every worker."""
        seed = torch.tensor([torch.initial_seed() % 2**62])
        self.control.broadcast(seed).wait()
        return int(seed)

    def separate_streams(self) -> None:
        """Give every worker random streams of its own, and say so the first time."""
        random_streams.separate(self.control)
        if not self.separate and self.group.world_size > 1 and self.group.rank == 0:
            print(
                "paceline: each worker draws random numbers of its own, which follow from worker 0's and its rank"
                " (random='as_seeded' leaves them as they are)",
                file=sys.stderr,
                flush=True,
            )
        self.separate = True

    def say_hello(self, objects: Objects, method: str) -> None:
        """The first event of this worker: who it is."""
        self.recorder.emit(
            Hello(
                t=time.monotonic(),
                rank=self.group.rank,
                world_size=self.group.world_size,
                method=method,
                host=socket.gethostname(),
                pid=os.getpid(),
                unix=time.time(),
                torch=str(torch.__version__),
                threads=torch.get_num_threads(),
                parameters=sum(p.numel() for m in objects.models for p in m.parameters()),
            )
        )

    def print_once(self, method: str, loaders: list[Loader[Any]]) -> None:
        """What is really active, once, by worker 0."""
        if self.group.rank:
            return
        mbit = self.link_mbit
        speed = f" at {mbit:.0f} Mbit/s" if mbit < 1000 else f" at {mbit / 1000:.1f} Gbit/s" if mbit < math.inf else ""
        over = self.rendezvous.route.says() or self.rendezvous.backend
        many = f"{self.group.world_size} workers over {over}{speed}"
        workers = many if self.group.world_size > 1 else "1 worker"
        device = f" on {self.rendezvous.device}" if self.rendezvous.device.type == "cuda" else ""
        lines = [f"{workers}, method {method}{device}", *(loader.describe() for loader in loaders), *odd_settings()]
        for line in lines:
            print(f"paceline: {line}", file=sys.stderr, flush=True)


def _recorder(env: Environment, tape: Tape | None) -> Recorder:
    """The recorder of events; where there is a tape, of spans too."""
    if tape is None or env.trace is None:
        return Recorder(env.events, env.rank)
    return TracedRecorder(env.events, env.rank, tape=tape, traces=env.trace)


def link_mbit(comm: Comm, hosts: int) -> float:
    """The speed of a mean, as the slowest worker sees it: one number for all of them.

    Infinite on one host, where there is no link. Other programs can only make one look slow, so it is measured again
    until it looks fast or is slow for good.
    """
    if hosts == 1:
        return pace_mbit()
    best, waited = 0.0, 0.0
    for kilobytes in _PROBES_KB:
        x = torch.zeros(kilobytes * 256)
        barrier(comm)
        began = time.perf_counter()
        comm.mean(x).wait()
        mine = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        slowest = float(comm.all_gather(mine).wait().max())
        best = max(best, 2 * x.nbytes * (comm.world_size - 1) / comm.world_size * 8e-6 / slowest)
        waited += slowest
        if best > SLOW_MBIT or waited > _PROBE_S:
            break
    return best


def barrier(comm: Comm) -> None:
    """Wait until every worker is here."""
    comm.sum(torch.zeros(1)).wait()


def broadcast_(comm: Comm, tensor: Tensor, root: int = 0) -> None:
    """The tensor becomes the root's, whatever its type and layout."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = real.to(torch.uint8) if real.dtype == torch.bool else real.contiguous()
    comm.broadcast(whole, root).wait()
    if whole.data_ptr() != real.data_ptr():
        real.copy_(whole)
