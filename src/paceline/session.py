"""What a process holds once it has joined the others: its lanes, its telemetry, its engines."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

import paceline
from paceline.engine import Engine
from paceline.environment import Environment, odd_settings
from paceline.errors import PeerError, UsageError
from paceline.loader import Loader
from paceline.membership.rendezvous import World, join
from paceline.pack import Pack
from paceline.parts import Comm
from paceline.race.gate import Gate, pace_mbit
from paceline.settings import Settings
from paceline.telemetry import Hello, Recorder
from paceline.things import Things
from paceline.trace import hooks as trace_hooks
from paceline.trace.comm import traced
from paceline.trace.recorder import TracedRecorder
from paceline.trace.tape import Tape

SLOW_MBIT = 1500.0  # below this the link is what a step on a CPU waits for
_PROBES_KB, _PROBE_S = (64, 64, *[1024] * 8), 0.3  # small ones first: a very slow link shows at once


@dataclass
class Session:
    """One for all calls of `prepare` in a process."""

    world: World
    control: Comm  # the lane of set-up and loader
    user: Comm  # the lane of paceline.mean
    recorder: Recorder
    gate: Gate | None = None
    tape: Tape | None = None  # where a timeline is asked for
    link_mbit: float = math.inf  # what a worker sends in a mean, the slowest of them
    pack: Pack = field(default_factory=Pack)
    engines: WeakValueDictionary[int, Engine] = field(default_factory=WeakValueDictionary)  # by their optimizers' ids

    @classmethod
    def start(cls, env: Environment, settings: Settings) -> Session:
        for directory in filter(None, (env.events, env.trace)):
            directory.mkdir(parents=True, exist_ok=True)
        world = join(env, backend=settings.backend, deadline_s=settings.deadline)
        world.watch_exit()
        tape = Tape(env.trace_steps) if env.trace else None
        recorder = _recorder(env, world, tape)
        control = world.lane("control")
        gate = Gate.from_env(recorder, lambda: barrier(control))
        if gate is not None:
            gate.pace()
        mbit = link_mbit(control, len(world.route.hosts))
        pack = Pack(alone=world.world == 1)
        session = cls(world, control, world.lane("user"), recorder, gate, tape, link_mbit=mbit, pack=pack)
        if gate is not None:
            gate.settle = session.meet
        world.closing += [session.settle, recorder.close]
        world.watch_exit()
        return session

    def meet(self) -> None:
        """A common stop. Workers that keep their own pace would keep others waiting, and what is under way in the turn
        of another contender would take its bytes from it.
        """
        for engine in self.pack:
            engine.crossing.land()
            engine.method.layout.settle(engine.ex)
            if engine.method.sync.own_pace:
                engine.method.sync.settle(engine.ex)

    def settle(self) -> None:
        """The end of a run that has not failed: what is under way arrives, on every worker."""
        if self.world.failed:
            return
        try:
            for engine in self.pack:
                engine.settle()
        except PeerError as error:
            self.world.fail(error)
            print(f"paceline: {error}", file=sys.stderr)

    def check_new(self, things: Things) -> None:
        if any(id(optimizer) in self.engines for optimizer in things.optimizers):
            raise UsageError("this optimizer is prepared already", do="call prepare once for each optimizer")

    def agree(self, things: Things, method: str, settings: Settings) -> None:
        """Every worker has the same model, optimizer, data, method and versions, or none of them starts."""
        lines = [
            f"paceline {paceline.__version__}",
            f"torch {'.'.join(torch.__version__.split('.')[:2])}",
            f"method {method}",
            *(f"{name}={getattr(settings, name)}" for name in ("batch", "accumulate", "guard")),
            *things.lines(),
        ]
        self.control.agree("the set-up", "\n".join(lines))

    @torch.no_grad()
    def share_weights(self, things: Things, without: Collection[int] = ()) -> None:
        """Everyone starts from worker 0's parameters and buffers. without: the ids of those that are not there yet."""
        for model in things.models:
            for tensor in (*model.parameters(), *model.buffers()):
                if id(tensor) not in without:
                    _broadcast(self.control, tensor)

    def shared_seed(self) -> int:
        """Worker 0's."""
        seed = torch.tensor([torch.initial_seed() % 2**62])
        self.control.broadcast(seed).wait()
        return int(seed)

    def say_hello(self, things: Things, method: str) -> None:
        self.recorder.emit(
            Hello(
                t=time.monotonic(),
                rank=self.world.rank,
                world=self.world.world,
                method=method,
                host=socket.gethostname(),
                pid=os.getpid(),
                unix=time.time(),
                torch=str(torch.__version__),
                threads=torch.get_num_threads(),
                parameters=sum(p.numel() for m in things.models for p in m.parameters()),
            )
        )

    def print_once(self, method: str, loaders: list[Loader]) -> None:
        """What is really active, once, by worker 0."""
        if self.world.rank:
            return
        mbit = self.link_mbit
        speed = f" at {mbit:.0f} Mbit/s" if mbit < 1000 else f" at {mbit / 1000:.1f} Gbit/s" if mbit < math.inf else ""
        over = self.world.route.says() or self.world.backend
        many = f"{self.world.world} workers over {over}{speed}"
        workers = many if self.world.world > 1 else "1 worker"
        for line in [f"{workers}, method {method}", *(loader.describe() for loader in loaders), *odd_settings()]:
            print(f"paceline: {line}", file=sys.stderr, flush=True)


def _recorder(env: Environment, world: World, tape: Tape | None) -> Recorder:
    """Of events; and where there is a tape, lanes and optimizers are watched too."""
    if tape is None or env.trace is None:
        return Recorder(env.events, env.rank)
    world.make_lane = traced(tape, world.make_lane)
    trace_hooks.watch_optimizers(tape)
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
        slowest = float(comm.gather(mine).wait().max())
        best = max(best, 2 * x.nbytes * (comm.world - 1) / comm.world * 8e-6 / slowest)
        waited += slowest
        if best > SLOW_MBIT or waited > _PROBE_S:
            break
    return best


def barrier(comm: Comm) -> None:
    comm.sum(torch.zeros(1)).wait()


def _broadcast(comm: Comm, tensor: Tensor) -> None:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = real.to(torch.uint8) if real.dtype == torch.bool else real.contiguous()
    comm.broadcast(whole).wait()
    if whole.data_ptr() != real.data_ptr():
        real.copy_(whole)
