"""What the user calls: `prepare`, and a handful of functions around it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

import paceline
from paceline import hooks
from paceline.comm import differ
from paceline.engine import Engine
from paceline.environment import Environment
from paceline.errors import MethodError, UsageError, nearest
from paceline.loader import Batch, Loader
from paceline.membership.rendezvous import World, join
from paceline.method import Method, method as make_method
from paceline.parts import Comm, Part
from paceline.race.gate import Gate
from paceline.race.peers import PEERS, prepare_peer
from paceline.telemetry import Hello, Recorder


@dataclass
class Session:
    """What this process holds once it has joined: one for all calls of `prepare`."""

    world: World
    control: Comm  # the loader's lane
    user: Comm  # paceline.mean's lane
    recorder: Recorder
    gate: Gate | None = None
    pack: list[Engine] = field(default_factory=list)
    engines: dict[int, Engine] = field(default_factory=dict)  # by id of the user's optimizer
    keep: list[Any] = field(default_factory=list)  # ... whose ids must stay taken


_session: Session | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `prepare` that are not the method's, checked."""

    batch: Literal["global", "per_worker"] = "global"
    accumulate: int = 1
    weight: Callable[[Any], float] | None = None
    guard: Literal["skip", "raise", "off"] = "skip"
    deadline: float = 300.0
    backend: str | None = None
    bucket_mb: float | None = None

    def __post_init__(self) -> None:
        _choice("batch", self.batch, ("global", "per_worker"))
        _choice("guard", self.guard, ("skip", "raise", "off"))
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise UsageError(f"accumulate={self.accumulate!r} is not a whole number of 1 or more")
        _number("deadline", self.deadline, high=86400.0, unit=" seconds")
        if self.bucket_mb is not None:
            _number("bucket_mb", self.bucket_mb, high=65536.0, unit=" MB")
        if self.weight is not None and not callable(self.weight):
            raise UsageError(f"weight={self.weight!r} is not a function of a batch")


def _choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r} is not a choice", do=nearest(str(value), known))


def _number(name: str, value: Any, *, high: float, unit: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not 0 < value <= high:
        raise UsageError(f"{name}={value!r} is out of range", do=f"choose {name} above 0 and at most {high:g}{unit}")


_OWN = tuple(Settings.__dataclass_fields__)


def prepare(*objects: Any, method: str | Method | Part | None = None, **arguments: Any) -> Any:
    """Make a plain training loop data-parallel.

    Takes models, optimizers, loaders (a torch DataLoader with the *global* batch size, or any iterable of batches of this
    worker) and GradScalers, in any number and order, and gives them back in the same order: models and optimizers are the
    same objects with hooks attached, loaders are new.

    method: a name ("exact", "half", ... see `paceline methods`), names joined by "+", a part, or a paceline.Method.
        Its knobs are keyword arguments. The command line's --method wins over this one, and says so.
    batch: "global" (batch_size is shared out) or "per_worker" (every worker takes batch_size, as with DDP).
    accumulate: micro-batches to a step. Write the loop as without it: in between, `step` and `zero_grad` do nothing, and
        the window's gradient is the mean over all its samples. Do not divide the loss.
    weight: how much a batch counts, if not by its samples: `lambda batch: (batch[1] != pad).sum()` for tokens.
    guard: what happens to a step whose gradient is NaN or infinite on some worker: "skip" it everywhere, "raise", or "off".
    deadline: seconds after which a wait for other workers is an error.
    backend: "gloo" or "nccl"; chosen by the device if not given.
    bucket_mb: megabytes of gradients to one exchange.
    """
    env = Environment.read()
    knobs = {k: v for k, v in arguments.items() if k not in _OWN}
    settings = Settings(**{k: v for k, v in arguments.items() if k in _OWN})
    chosen, peer = _method(method, knobs, env)
    things = Things.sort(objects)
    things.check()
    session = _join(env, settings)
    if peer is None:
        chosen.check()
    _say_hello(session, things, peer or str(chosen))
    _agree(session, things, peer or json.dumps(chosen.config(), sort_keys=True), settings)
    engines = [] if peer else _engines(session, things, chosen, settings)
    loaders = [_loader(session, source, chosen, settings, engines) for source in things.loaders]
    if peer:
        things = _with_peer(session, peer, things)
    if session.world.rank == 0:
        _print_once(session, peer or str(chosen), loaders)
    new = {id(old): now for old, now in zip(things.sources, loaders, strict=True)}
    new |= {id(old): now for old, now in things.replaced}
    result = tuple(new.get(id(thing), thing) for thing in objects)
    return result if len(result) != 1 else result[0]


# ---------------------------------------------------------------------------------------------------- what was given


@dataclass
class Things:
    """The user's objects, by kind."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    replaced: list[tuple[Any, Any]] = field(default_factory=list)  # by a peer's wrappers

    @property
    def sources(self) -> list[Any]:
        return self.loaders

    @classmethod
    def sort(cls, objects: Iterable[Any]) -> Things:
        things = cls()
        for thing in objects:
            if isinstance(thing, torch.nn.Module):
                things.models.append(thing)
            elif isinstance(thing, Optimizer):
                things.optimizers.append(thing)
            elif isinstance(thing, torch.amp.GradScaler):
                things.scalers.append(thing)
            elif isinstance(thing, Loader):
                raise UsageError("this loader is prepared already", do="prepare the DataLoader it was made from, once")
            elif hasattr(thing, "__iter__"):
                things.loaders.append(thing)
            else:
                raise UsageError(
                    f"prepare cannot take a {type(thing).__name__}",
                    do="give it models, optimizers, loaders and GradScalers; the rest stays as it is",
                )
        return things

    def names(self) -> dict[int, str]:
        """Every parameter's name, as its module calls it; with several models, the model's number before it."""
        many = len(self.models) > 1
        return {
            id(p): f"{i}.{name}" if many else name
            for i, model in enumerate(self.models)
            for name, p in model.named_parameters()
        }

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Floating-point buffers, which are averaged with every exchange."""
        return [
            (f"{i}.{name}", b)
            for i, model in enumerate(self.models)
            for name, b in model.named_buffers()
            if b.is_floating_point() and b.numel() and name.rpartition(".")[2] in _statistics(model, name)
        ]

    def check(self) -> None:
        """Refuse, before anything is started, what cannot be trained."""
        if not self.models or not self.optimizers:
            missing = "a model" if not self.models else "an optimizer"
            raise UsageError(f"prepare was not given {missing}", do="prepare(model, optimizer, loader, method=...)")
        for optimizer in self.optimizers:
            if _session is not None and id(optimizer) in _session.engines:
                raise UsageError("this optimizer is prepared already", do="call prepare once for each optimizer")
            if isinstance(optimizer, torch.optim.LBFGS):
                raise UsageError(
                    "LBFGS cannot be trained data-parallel",
                    why="its line search calls the loss again and decides by this worker's own value of it",
                )
        for model in self.models:
            for name, p in model.named_parameters():
                if p.is_meta:
                    raise UsageError(
                        f"parameter {name} is on the meta device",
                        do="give the model memory and values first (to_empty)",
                    )
        names = self.names()
        trained = [p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad]
        if not trained:
            raise UsageError(
                "no parameter is trainable", why="every requires_grad of the optimizer's parameters is False"
            )
        strange = [p for p in trained if id(p) not in names]
        if strange:
            raise UsageError(
                f"the optimizer holds {len(strange)} parameters that are in none of the models given",
                why=f"the first has shape {list(strange[0].shape)}",
                do="give prepare every model whose parameters the optimizer updates, and make the optimizer after .to(...)",
            )


def _statistics(model: torch.nn.Module, name: str) -> tuple[str, ...]:
    """Only running statistics drift apart; tables and masks are equal from the start."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return ("running_mean", "running_var") if getattr(owner, "track_running_stats", False) else ()


# ---------------------------------------------------------------------------------------------------- joining


def _method(given: Any, knobs: dict[str, Any], env: Environment) -> tuple[Method, str | None]:
    """The method, or the name of a peer that runs in its place."""
    spec = given if given is not None else "exact"
    if env.method is not None:
        if given is not None and env.method != given and env.rank == 0:
            print(f"paceline: method {env.method} from the command line (the script says {given})", file=sys.stderr)
        spec, knobs = env.method, dict(env.knobs or {})
    elif env.knobs:
        knobs |= env.knobs
    if isinstance(spec, str) and spec in PEERS:
        if knobs:
            raise MethodError(f"{spec} takes no knobs", why=f"{sorted(knobs)[0]!r} was given")
        return Method(), spec
    try:
        return make_method(spec, **knobs), None
    except MethodError as error:
        wrong = next((k for k in knobs if repr(k) in error.what and "no knob" in error.what), None)
        if wrong is not None:
            raise MethodError(error.what, do=f"{error.do}; prepare itself has: {nearest(wrong, _OWN)}") from None
        raise


def _join(env: Environment, settings: Settings) -> Session:
    global _session
    if _session is None:
        if env.events is not None:
            env.events.mkdir(parents=True, exist_ok=True)
        world = join(env, backend=settings.backend, deadline_s=settings.deadline)
        recorder = Recorder(env.events, env.rank)
        control = world.lane("control")
        _session = Session(world, control, world.lane("user"), recorder)
        _session.gate = Gate.from_env(recorder, lambda: _barrier(control))
        world.closing.append(recorder.close)
        world.watch_exit()
    _session.world.check_process()
    return _session


def _barrier(comm: Comm) -> None:
    comm.sum(torch.zeros(1)).wait()


def _agree(session: Session, things: Things, method: str, settings: Settings) -> None:
    """Every worker has the same model, optimizer, data, method and versions, or none of them starts."""
    text = [
        f"paceline {paceline.__version__}",
        f"torch {'.'.join(torch.__version__.split('.')[:2])}",
        f"method {method}",
        *(f"{k}={getattr(settings, k)}" for k in ("batch", "accumulate", "guard")),
    ]
    for i, model in enumerate(things.models):
        text += [
            f"parameter {i}.{n} {list(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
            for n, p in model.named_parameters()
        ]
        text += [f"buffer {i}.{n} {list(b.shape)} {b.dtype}" for n, b in model.named_buffers()]
    for optimizer in things.optimizers:
        groups = [
            {k: v for k, v in g.items() if isinstance(v, (int, float, bool, str, tuple))}
            for g in optimizer.param_groups
        ]
        text.append(f"optimizer {type(optimizer).__name__} {json.dumps(groups, sort_keys=True)}")
    for source in things.loaders:
        dataset = getattr(source, "dataset", None)
        size = len(dataset) if hasattr(dataset, "__len__") else "unknown"
        text.append(f"loader of {size} samples, batch {getattr(source, 'batch_size', None)}")
    session.control.agree("the set-up", "\n".join(text))


@torch.no_grad()
def _engines(session: Session, things: Things, method: Method, settings: Settings) -> list[Engine]:
    """One engine an optimizer; everyone starts from worker 0's weights."""
    for model in things.models:
        for tensor in (*model.parameters(), *model.buffers()):
            _broadcast(session.control, tensor)
    engines = []
    for i, optimizer in enumerate(things.optimizers):
        own = method if not i else make_method(Method(**{a: type(p)(**_knobs(p)) for a, p in method.axes().items()}))
        engine = assemble(
            things,
            optimizer,
            own,
            session.world.lane(f"gradients {len(session.pack)}"),
            recorder=session.recorder,
            settings=settings,
            pack=session.pack,
            buffers=not i,
        )
        session.engines[id(optimizer)] = engine
        session.keep.append(optimizer)
        engines.append(engine)
    return engines


def _knobs(part: Part) -> dict[str, Any]:
    config = {k: getattr(part, k) for k in part.__dataclass_fields__}
    return {k: type(v)(**_knobs(v)) if isinstance(v, Part) else v for k, v in config.items()}


def _broadcast(comm: Comm, tensor: Tensor) -> None:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = real.contiguous()
    if whole.dtype == torch.bool:
        byte = whole.to(torch.uint8)
        comm.broadcast(byte).wait()
        tensor.copy_(byte.bool())
        return
    comm.broadcast(whole).wait()
    if whole.data_ptr() != real.data_ptr():
        real.copy_(whole)


def assemble(
    things: Things,
    optimizer: Optimizer,
    method: Method,
    comm: Comm,
    *,
    recorder: Recorder,
    settings: Settings,
    pack: list[Engine],
    buffers: bool = True,
) -> Engine:
    """An engine over one optimizer's parameters, hooked up."""
    names = things.names()

    def named() -> list[tuple[str, Tensor]]:
        return [(names.get(id(p), f"added {i}"), p) for i, p in enumerate(_in_order(optimizer, names))]

    gpu = any(p.is_cuda for _, p in named())
    bucket = int((settings.bucket_mb or (25 if gpu else 4)) * 2**20)
    engine = Engine(
        named,
        method,
        comm,
        recorder=recorder,
        buffers=things.buffers() if buffers else (),
        accumulate=settings.accumulate,
        guard=settings.guard,
        bucket_bytes=bucket,
        first_bytes=min(bucket, 1 << 20),
    )
    hooks.attach(engine, things.models, optimizer, pack=pack, scaler=things.scalers[0] if things.scalers else None)
    return engine


def _in_order(optimizer: Optimizer, names: dict[int, str]) -> list[Tensor]:
    """The optimizer's parameters in the order the models registered them, whatever its groups are."""
    place = {key: i for i, key in enumerate(names)}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return sorted(params, key=lambda p: place.get(id(p), len(place)))


def _loader(session: Session, source: Any, method: Method, settings: Settings, engines: list[Engine]) -> Loader:
    board = session.world.board

    def hand_out(batch: Batch) -> None:
        for engine in engines:
            engine.batch = batch
        if board is not None:
            board.step = session.recorder.step
            board.where = f"samples {batch.indices[:8]}" if batch.indices else ""

    seed = torch.tensor([torch.initial_seed() % 2**62])
    session.control.broadcast(seed).wait()
    return Loader(
        source,
        comm=session.control,
        balance=method.balance,
        recorder=session.recorder,
        batch=settings.batch,
        weight=settings.weight,
        seed=int(seed),
        on_batch=hand_out,
        gate=session.gate,
    )


def _with_peer(session: Session, peer: str, things: Things) -> Things:
    if len(things.models) > 1 or len(things.optimizers) > 1:
        raise UsageError(f"{peer} runs with one model and one optimizer", do="use one of Paceline's own methods")
    model, optimizer = things.models[0], things.optimizers[0]
    new_model, new_optimizer, _ = prepare_peer(peer, model, optimizer, None)
    things.replaced = [(model, new_model), (optimizer, new_optimizer)]
    return things


# ---------------------------------------------------------------------------------------------------- saying what is


def _say_hello(session: Session, things: Things, method: str) -> None:
    session.recorder.emit(
        Hello(
            t=time.monotonic(),
            rank=session.world.rank,
            world=session.world.world,
            method=method,
            host=socket.gethostname(),
            pid=os.getpid(),
            unix=time.time(),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            parameters=sum(p.numel() for m in things.models for p in m.parameters()),
        )
    )


def _print_once(session: Session, method: str, loaders: list[Loader]) -> None:
    world = session.world
    workers = "1 worker" if world.world == 1 else f"{world.world} workers over {world.backend}"
    for line in [f"{workers}, method {method}", *(loader.describe() for loader in loaders)]:
        print(f"paceline: {line}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- around the loop


def rank() -> int:
    """This worker's number, from 0."""
    return _session.world.rank if _session else Environment.read().rank


def world() -> int:
    """How many workers there are."""
    return _session.world.world if _session else Environment.read().world


def mean(value: Tensor | float) -> Tensor:
    """The mean of a value over the workers, for metrics. Every worker must call it."""
    x = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    if _session is None:
        if Environment.read().world > 1:
            raise UsageError(
                "paceline.mean was called before paceline.prepare", do="prepare first: it joins the workers"
            )
        return x
    comm = _session.user
    text = f"paceline.mean of {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if not x.is_floating_point():
        raise UsageError(f"{text}: a mean needs floating-point values", do="convert it with .float()")
    with _session.recorder.untimed():
        sums = comm.gather(torch.tensor([zlib.crc32(text.encode())])).wait().flatten().tolist()
        if len(set(sums)) > 1:
            comm.agree("an operation", text)
        differ("an operation", [str(s) for s in sums])
        return comm.mean(x).wait()


def log(**metrics: Any) -> None:
    """Report values (loss, accuracy, ...) of the current step to telemetry: `paceline.log(loss=loss.item())`."""
    if _session is not None:
        _session.recorder.log(metrics)


def untimed() -> AbstractContextManager[None]:
    """What happens inside (evaluation, saving) does not count as training time."""
    return _session.recorder.untimed() if _session else contextlib.nullcontext()


def hold(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Hold communication back: gradients of every backward inside only add up, on this worker.

    The first backward outside exchanges them all: p.grad is then the mean over all samples since the last step, as if they
    had been one batch. Do not divide the loss.
    """
    return _engine(optimizer, "hold").hold()


def stepping(optimizer: Optimizer) -> bool:
    """With accumulate=N: will the next optimizer.step() really step? For LR schedulers and logging."""
    return not _engine(optimizer, "stepping").in_window


def _engine(optimizer: Optimizer, what: str) -> Engine:
    engine = _session.engines.get(id(optimizer)) if _session else None
    if engine is None:
        raise UsageError(f"{what}: this optimizer is not prepared", do="call paceline.prepare with it first")
    return engine
