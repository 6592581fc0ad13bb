"""What the user calls: `prepare`, and a handful of functions around it."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.checkpoint import load as loading
from paceline.checkpoint import save as saving
from paceline.checkpoint.extra import plain
from paceline.checkpoint.manifest import MOST
from paceline.comm.environment import KNOBS, Environment
from paceline.comm.single import SingleComm
from paceline.core.change import check_between_steps
from paceline.core.consensus import consensus_weights, latest_weights
from paceline.core.engine import Engine
from paceline.core.parts import Part
from paceline.core.shard import Owned
from paceline.data import balancing
from paceline.data.loader import Batch, Loader
from paceline.errors import MethodError, UsageError, nearest
from paceline.method import Method
from paceline.method import method as make_method
from paceline.session import assemble, memory_cap, micro_batches, session
from paceline.session.advice import Advice, advise
from paceline.session.hooks import watch_for_same_work
from paceline.session.objects import Objects, device_of
from paceline.session.session import Session, current
from paceline.session.settings import Settings
from paceline.sharding import meta
from paceline.telemetry import hooks as trace_hooks
from paceline.telemetry.pace import clock_of
from paceline.telemetry.recorder import Moment

_lost = 0  # saves in a row that no disk took
_MOST_LOST = 3

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
BatchT = TypeVar("BatchT")
ScalerT = TypeVar("ScalerT", bound=GradScaler)
AnyMethod = str | Method | Part | None
AnyPath = str | PathLike[str] | None


@overload
def prepare(
    model: ModelT,
    optimizer: OptimizerT,
    /,
    *,
    method: AnyMethod = None,
    batch: Literal["global", "per_worker"] = "global",
    accumulate: int = 1,
    micro_batch: int | Literal["auto"] | None = None,
    memory_gb: float | None = None,
    weight: Callable[[Any], float] | None = None,
    loss: Literal["mean", "sum"] = "mean",
    random: Literal["per_worker", "as_seeded"] = "per_worker",
    guard: Literal["skip", "raise", "off"] = "skip",
    timeout: float = 300.0,
    backend: Literal["gloo", "nccl"] | None = None,
    bucket_mb: float | None = None,
    weights: AnyPath = None,
    tuned: AnyPath = None,
    group: Any = None,
    check_replicas: int = 50,
    advice: int = 0,
    **knobs: Any,
) -> tuple[ModelT, OptimizerT]: ...
@overload
def prepare(
    model: ModelT,
    optimizer: OptimizerT,
    loader: DataLoader[BatchT],
    /,
    *,
    method: AnyMethod = None,
    batch: Literal["global", "per_worker"] = "global",
    accumulate: int = 1,
    micro_batch: int | Literal["auto"] | None = None,
    memory_gb: float | None = None,
    weight: Callable[[Any], float] | None = None,
    loss: Literal["mean", "sum"] = "mean",
    random: Literal["per_worker", "as_seeded"] = "per_worker",
    guard: Literal["skip", "raise", "off"] = "skip",
    timeout: float = 300.0,
    backend: Literal["gloo", "nccl"] | None = None,
    bucket_mb: float | None = None,
    weights: AnyPath = None,
    tuned: AnyPath = None,
    group: Any = None,
    check_replicas: int = 50,
    advice: int = 0,
    **knobs: Any,
) -> tuple[ModelT, OptimizerT, Loader[BatchT]]: ...
@overload
def prepare(
    model: ModelT,
    optimizer: OptimizerT,
    loader: Iterable[BatchT],
    /,
    *,
    method: AnyMethod = None,
    batch: Literal["global", "per_worker"] = "global",
    accumulate: int = 1,
    micro_batch: int | Literal["auto"] | None = None,
    memory_gb: float | None = None,
    weight: Callable[[Any], float] | None = None,
    loss: Literal["mean", "sum"] = "mean",
    random: Literal["per_worker", "as_seeded"] = "per_worker",
    guard: Literal["skip", "raise", "off"] = "skip",
    timeout: float = 300.0,
    backend: Literal["gloo", "nccl"] | None = None,
    bucket_mb: float | None = None,
    weights: AnyPath = None,
    tuned: AnyPath = None,
    group: Any = None,
    check_replicas: int = 50,
    advice: int = 0,
    **knobs: Any,
) -> tuple[ModelT, OptimizerT, Loader[BatchT]]: ...
@overload
def prepare(
    model: ModelT,
    optimizer: OptimizerT,
    loader: DataLoader[BatchT],
    scaler: ScalerT,
    /,
    *,
    method: AnyMethod = None,
    batch: Literal["global", "per_worker"] = "global",
    accumulate: int = 1,
    micro_batch: int | Literal["auto"] | None = None,
    memory_gb: float | None = None,
    weight: Callable[[Any], float] | None = None,
    loss: Literal["mean", "sum"] = "mean",
    random: Literal["per_worker", "as_seeded"] = "per_worker",
    guard: Literal["skip", "raise", "off"] = "skip",
    timeout: float = 300.0,
    backend: Literal["gloo", "nccl"] | None = None,
    bucket_mb: float | None = None,
    weights: AnyPath = None,
    tuned: AnyPath = None,
    group: Any = None,
    check_replicas: int = 50,
    advice: int = 0,
    **knobs: Any,
) -> tuple[ModelT, OptimizerT, Loader[BatchT], ScalerT]: ...
@overload
def prepare(
    model: ModelT,
    optimizer: OptimizerT,
    loader: Iterable[BatchT],
    scaler: ScalerT,
    /,
    *,
    method: AnyMethod = None,
    batch: Literal["global", "per_worker"] = "global",
    accumulate: int = 1,
    micro_batch: int | Literal["auto"] | None = None,
    memory_gb: float | None = None,
    weight: Callable[[Any], float] | None = None,
    loss: Literal["mean", "sum"] = "mean",
    random: Literal["per_worker", "as_seeded"] = "per_worker",
    guard: Literal["skip", "raise", "off"] = "skip",
    timeout: float = 300.0,
    backend: Literal["gloo", "nccl"] | None = None,
    bucket_mb: float | None = None,
    weights: AnyPath = None,
    tuned: AnyPath = None,
    group: Any = None,
    check_replicas: int = 50,
    advice: int = 0,
    **knobs: Any,
) -> tuple[ModelT, OptimizerT, Loader[BatchT], ScalerT]: ...
@overload
def prepare(
    *objects: Any,
    method: AnyMethod = None,
    batch: Literal["global", "per_worker"] = "global",
    accumulate: int = 1,
    micro_batch: int | Literal["auto"] | None = None,
    memory_gb: float | None = None,
    weight: Callable[[Any], float] | None = None,
    loss: Literal["mean", "sum"] = "mean",
    random: Literal["per_worker", "as_seeded"] = "per_worker",
    guard: Literal["skip", "raise", "off"] = "skip",
    timeout: float = 300.0,
    backend: Literal["gloo", "nccl"] | None = None,
    bucket_mb: float | None = None,
    weights: AnyPath = None,
    tuned: AnyPath = None,
    group: Any = None,
    check_replicas: int = 50,
    advice: int = 0,
    **knobs: Any,
) -> Any: ...
def prepare(
    *objects: Any,
    method: AnyMethod = None,
    batch: Literal["global", "per_worker"] = "global",
    accumulate: int = 1,
    micro_batch: int | Literal["auto"] | None = None,
    memory_gb: float | None = None,
    weight: Callable[[Any], float] | None = None,
    loss: Literal["mean", "sum"] = "mean",
    random: Literal["per_worker", "as_seeded"] = "per_worker",
    guard: Literal["skip", "raise", "off"] = "skip",
    timeout: float = 300.0,
    backend: Literal["gloo", "nccl"] | None = None,
    bucket_mb: float | None = None,
    weights: AnyPath = None,
    tuned: AnyPath = None,
    group: Any = None,
    check_replicas: int = 50,
    advice: int = 0,
    **knobs: Any,
) -> Any:
    """Make a plain training loop data-parallel.

    Takes models, optimizers, loaders (a torch DataLoader with the *global* batch size, or any iterable of this
    worker's batches) and a GradScaler, in any number and order, and gives them back in the same order: models and
    optimizers are the same objects with hooks attached, loaders are new.

    method: a name ("exact", "half", ... see `paceline methods`), names joined by "+", a part, or a paceline.Method.
        The command line's --method wins over this one, and says so.
    batch: "global" (batch_size is shared out) or "per_worker" (every worker takes batch_size, as with DDP).
    accumulate: micro-batches to a step. Write the loop as without it: in between, `step` and `zero_grad` do
        nothing, and the window's gradient is the mean over all its samples. Do not divide the loss.
    micro_batch: the most samples that a worker computes at once. A larger share is handed out in several iterations of
        the loop, which make one step as with accumulate. "auto": it is found, by `with paceline.retry():`.
    memory_gb: the most memory that this process may use: of its GPU, or on a CPU of the host's beside what is mapped.
    weight: how much a batch counts, if not by its samples: `lambda batch: (batch[1] != pad).sum()` for tokens.
    loss: "mean" (of the samples in a batch, as torch's losses are) or "sum" (reduction="sum"): gradients are then
        summed over workers and micro-batches, as one process with all the samples would sum them.
    random: "per_worker" (from here on each worker draws random numbers of its own, which follow from worker 0's and
        its rank: other dropout masks, other noise) or "as_seeded" (they stay as the script has seeded them).
    guard: what happens to a step whose gradient is NaN or infinite on some worker: "skip" it everywhere, "raise",
        or "off".
    timeout: seconds after which a wait for other workers is an error.
    backend: "gloo" or "nccl"; chosen by the device if not given.
    bucket_mb: megabytes of gradients to one exchange; chosen by the measured speed of the link if not given.
    weights: where the weights come from, if not from the models: a folder of paceline.save, or a safetensors file.
        Parameters on the meta device are filled from there, or else by their modules' own reset_parameters().
    tuned: a file. If it exists, sizes (of buckets, chunks, the credit) are taken from it; else they are searched for
        in the first hundred steps of training, and written there.
    group: an existing process group of torch.distributed, or one axis of a DeviceMesh, in place of all workers.
    check_replicas: how many steps lie between two looks whether all workers have the same weights, where the method
        promises that; 0: never.
    advice: how many steps lie between two measurements of the gradients' noise, on which paceline.advice() rests and
        its line at the end of the run; 0: none is made, and no line is printed.
    knobs: the method's own, by name: `prepare(..., method="powersgd", rank=4)`.
    """
    given = {
        "batch": batch,
        "accumulate": accumulate,
        "micro_batch": micro_batch,
        "memory_gb": memory_gb,
        "weight": weight,
        "loss": loss,
        "random": random,
        "guard": guard,
        "timeout": timeout,
        "backend": backend,
        "bucket_mb": bucket_mb,
        "weights": weights,
        "tuned": tuned,
        "group": group,
        "check_replicas": check_replicas,
        "advice": advice,
    }
    env = Environment.read()
    settings = Settings(**given | _overrides(env, given))
    chosen, peer = _method(method, knobs, env)
    sorted_ = Objects.sort(objects)
    sorted_.check()
    micro_batches.check(settings, sorted_, chosen, peer)
    if peer is not None and settings.loss == "sum":
        raise UsageError(f"{peer} takes the mean of gradients", why="loss='sum' asks for their sum", do="leave one out")
    if chosen.sync.open_ended:
        _check_rounds(chosen.sync.name, sorted_, settings)
    meta.check(sorted_.models, weights=settings.weights is not None)
    if peer is None:
        assemble.check(sorted_, chosen, settings, world_size=env.world_size if settings.group is None else None)
    balancing.check(sorted_.loaders, chosen.balance, settings.batch, env.world_size)
    here = session.open_session(env, settings)
    here.process.check_not_forked()
    here.check_new(sorted_)
    name = peer or str(chosen)
    here.say_hello(sorted_, name)
    here.forget_gone()
    here.agree(sorted_, peer or json.dumps(chosen.config(), sort_keys=True), settings)
    new: dict[int, Any] = {}
    engines: list[Engine] = []
    fill = _values(here, sorted_, settings, later=peer is None and chosen.layout.shards_parameters)
    if peer is None:
        engines = assemble.engines(here, sorted_, chosen, settings)
        fill(engines)
    else:
        new |= _peer(peer, sorted_, here)
    if here.tape is not None:
        trace_hooks.watch([new.get(id(m), m) for m in sorted_.models], here.tape, peer=peer is not None)
    here.has_loader = here.has_loader or bool(sorted_.loaders)
    if here.group.board is not None and not here.has_loader:
        watch_for_same_work([new.get(id(m), m) for m in sorted_.models], here.group.board, lambda: here.has_loader)
    loaders = [_loader(here, source, chosen, settings, engines, sorted_.models) for source in sorted_.loaders]
    new |= {id(source): loader for source, loader in zip(sorted_.loaders, loaders, strict=True)}
    here.print_once(name, loaders)
    if settings.memory_gb is not None:
        memory_cap.cap(settings.memory_gb, device_of(sorted_.models))
    if settings.random == "per_worker":
        here.separate_streams()
    result = tuple(new.get(id(one), one) for one in objects)
    return result if len(result) != 1 else result[0]


_OWN = tuple(name for name in inspect.signature(prepare).parameters if name not in ("objects", "knobs", "method"))


def _overrides(env: Environment, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `prepare` that the command line set in place of the script's, which is said once."""
    found = {name: value for name, value in (env.knobs or {}).items() if name in _OWN}
    _say_changes(env, found, given)
    return found


def _say_changes(env: Environment, found: dict[str, Any], given: dict[str, Any]) -> None:
    """Say once what the environment changes in what the script says. --set is handed on as PACELINE_SET."""
    for name, value in found.items() if env.rank == 0 else ():
        said = f"changes {name} from {given[name]!r} to" if name in given else f"sets {name} to"
        print(f"paceline: {KNOBS} (--set) {said} {value!r}", file=sys.stderr)


def _method(given: AnyMethod, knobs: dict[str, Any], env: Environment) -> tuple[Method, str | None]:
    """The method, or the name of a peer that runs in its place."""
    from_command_line = {name: value for name, value in (env.knobs or {}).items() if name not in _OWN}
    spec: Any = given if given is not None else "exact"
    if env.method is not None:
        said = ", ".join([str(given), *(f"{name}={value}" for name, value in knobs.items())])
        if given is not None and (env.method != given or knobs) and env.rank == 0:
            print(
                f"paceline: PACELINE_METHOD (--method) changes the method from {said} to {env.method}", file=sys.stderr
            )
        spec, knobs = env.method, {}
    _say_changes(env, from_command_line, knobs)
    knobs = knobs | from_command_line
    if isinstance(spec, str) and (spec == "floor" or spec.startswith("torch:")):
        if knobs:
            raise MethodError(f"{spec} takes no knobs", why=f"{sorted(knobs)[0]!r} was given")
        return Method(), spec
    try:
        return make_method(spec, **knobs), None
    except MethodError as error:
        wrong = next((k for k in knobs if "no knob" in error.what and repr(k) in error.what), None)
        if wrong is None:
            raise
        raise _unknown(wrong, error) from None


def _check_rounds(name: str, objects: Objects, settings: Settings) -> None:
    """Refuse what cannot be where each worker takes as many micro-batches to a step as it has time for."""
    if settings.accumulate > 1:
        raise UsageError(
            f"accumulate={settings.accumulate} beside {name}",
            why=f"under {name} a step has as many micro-batches as a worker has time for",
            do="leave accumulate out; micro= is the size of a micro-batch and deadline_ms= the time",
        )
    if settings.micro_batch is not None:
        raise UsageError(
            f"micro_batch={settings.micro_batch!r} beside {name}",
            why=f"under {name} workers take micro-batches already",
            do="leave micro_batch out; micro= is the size of a micro-batch",
        )
    if settings.advice:
        raise UsageError(
            f"advice={settings.advice} beside {name}",
            why="the noise of gradients is measured between equal steps, and here each has another number of samples",
            do="ask for advice in a run of every_step",
        )
    if settings.weight is not None:
        raise UsageError(
            f"weight= beside {name}",
            why="it asks all workers about every batch, and they take different numbers of micro-batches",
            do="leave weight= out, or use a method whose workers take a share of every batch",
        )
    if settings.tuned is not None:
        raise UsageError(
            f"tuned={str(settings.tuned)!r} beside {name}",
            why="sizes are compared by the time of a step, and here a step takes the time it is given",
            do="give bucket_mb= yourself",
        )
    if len(objects.optimizers) > 1:
        raise UsageError(
            f"{len(objects.optimizers)} optimizers under {name}",
            why="the rounds of each would end at other micro-batches, and workers would wait for each other for ever",
            do="put all parameters into one optimizer, as parameter groups",
        )


def _unknown(name: str, error: MethodError) -> MethodError:
    """A name that is neither an argument of `prepare` nor a knob of the method: the nearest of both is named."""
    meant = nearest(name, _OWN)
    if meant.startswith("did you mean"):
        return MethodError(f"prepare has no argument {name!r}", do=meant)
    return MethodError(error.what, do=f"{error.do}; arguments of prepare itself: {', '.join(_OWN)}")


def _values(here: Session, objects: Objects, settings: Settings, *, later: bool) -> Callable[[list[Engine]], None]:
    """Give every worker the same weights.

    later: parameters that are not there yet get theirs from the function this gives, when engines have sharded them.
    """
    blank = meta.Blank(objects.models, here.rendezvous.device)
    later = later and bool(blank.ids)
    seed = here.shared_seed()

    def fill(engines: list[Engine]) -> None:
        if settings.weights is None:
            blank.fill(seed, Owned(engines))
            return
        blank.make_room(Owned(engines))
        blank.fill(seed, Owned(engines), only_unsaved=True)
        loading.load_model(loading.source(Path(settings.weights), here.control), objects, engines, here.control)

    if not later:
        fill([])
    here.share_weights(objects, without=blank.ids if later else ())
    return fill if later else lambda engines: None


def _loader(
    here: Session, source: Any, method: Method, settings: Settings, engines: list[Engine], models: list[nn.Module]
) -> Loader[Any]:
    number = here.loaders
    here.loaders += 1
    size = micro_batches.size(settings, method, models, here)
    look = micro_batches.warning_of_batch_norm(models, size)

    def hand_out(batch: Batch) -> None:
        look(batch)
        if torch.is_grad_enabled():
            here.redeal = next((engine.redeal for engine in engines if engine.redeal.on), None)
        for engine in engines:
            engine.take_batch(batch, number)
        if (board := here.group.board) is not None:
            board.step = here.recorder.step
            board.where = f"samples {batch.indices[:8]}" if batch.indices else ""

    def loop_ended() -> None:
        for engine in engines:
            engine.loop_ended(number)

    loader: Loader[Any] = Loader(
        source,
        group=here.group,
        balance=method.balance,
        recorder=here.recorder,
        batch=settings.batch,
        weight=settings.weight,
        seed=here.shared_seed(),
        on_batch=hand_out,
        on_end=loop_ended,
        gate=here.gate,
        meet=here.meet if method.sync.is_async else None,
        clock=clock_of(device_of(models)),
        size=size,
        redeals=micro_batches.redeals(here, engines, size, settings),
        rule=method.sync.micro_batch if method.sync.open_ended else None,
    )

    def round_ended(of: int | None, handed: list[int]) -> None:
        if of == number:
            loader.round_ended(handed)

    for engine in engines:
        engine.on_round(round_ended)
    return loader


def _peer(peer: str, objects: Objects, here: Session) -> dict[int, Any]:
    """Torch's own method in place of ours."""
    from paceline.integrations.peers import prepare_peer

    if len(objects.models) > 1 or len(objects.optimizers) > 1:
        raise UsageError(f"{peer} runs with one model and one optimizer", do="use one of Paceline's own methods")
    model, optimizer = objects.models[0], objects.optimizers[0]
    new_model, new_optimizer = prepare_peer(peer, model, optimizer, here.rendezvous)
    return {id(model): new_model, id(optimizer): new_optimizer}


# ---------------------------------------------------------------------------------------------------- checkpoints


def save(
    folder: str | PathLike[str],
    *objects: Any,
    step: int | None = None,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
) -> Path | None:
    """Write a checkpoint of models and optimizers: a folder `step-000123` in `folder`, whole or not there at all.

    Every worker must call it, after a step. It holds the models' parameters and buffers, the optimizers' state, what
    the method remembers and where torch's random numbers stand; paceline.load reads it on any number of workers.

    step: its number, if not the count of steps made since `prepare` (or since the checkpoint that was loaded).
    extra: what else is needed to go on, as JSON: epoch, scheduler.state_dict(), loader.state_dict(), ...
    keep: how many checkpoints stay in the folder; the oldest go. All, if not given.

    Gives the checkpoint's path. A disk that is full does not end the training: that is said, None is given, and only
    the third failure in a row is an error.
    """
    global _lost
    found, engines = _saved(objects, "save")
    if current() is None and Environment.read().world_size > 1:
        raise UsageError("paceline.save was called before paceline.prepare", do="prepare first: it joins the workers")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise UsageError(f"keep={keep!r} is not a whole number of 1 or more")
    if step is None and not engines:
        raise UsageError("which step is this?", why="nothing here is prepared, so nobody counts", do="give step=")
    if step is not None and (type(step) is not int or not 0 <= step <= MOST):
        raise UsageError(f"step={step!r} is not a whole number from 0 to 2**53")
    root, more = _path(folder, "save"), plain({} if extra is None else extra)
    comm = here.control if (here := current()) else SingleComm()
    try:
        with untimed():
            for engine in engines:
                check_between_steps(engine, "paceline.save")
                engine.replicas.check()
            path = saving.save(root, found, engines, comm, step=step, extra=more, keep=keep)
    except saving.NotWrittenError as error:
        _lost += 1
        if _lost == _MOST_LOST:
            raise
        if comm.rank == 0:
            print(f"paceline: {error}", file=sys.stderr, flush=True)
        return None
    _lost = 0
    return path


def load(folder: str | PathLike[str], *objects: Any) -> dict[str, Any]:
    """Go on where a checkpoint was written: in the models and optimizers given, prepared or not. Gives its `extra`.

    folder: one that was given to paceline.save (its newest checkpoint that is whole is taken, and one that is broken
    is named), or one checkpoint in it, or a safetensors file, of which only a model takes its weights.

    Every worker must call it. There may be more or fewer of them than saved it, with another layout; with as many and
    the same method, training goes on bit for bit.
    """
    found, engines = _saved(objects, "load")
    with untimed():
        return loading.load(
            _path(folder, "load"), found, engines, here.control if (here := current()) else SingleComm()
        )


def _path(folder: Any, what: str) -> Path:
    if not isinstance(folder, (str, PathLike)) or "\0" in str(folder) or not str(folder):
        raise UsageError(f"paceline.{what} takes a folder first, not {repr(folder)[:80]}")
    return Path(folder)


def _saved(objects: tuple[Any, ...], what: str) -> tuple[Objects, list[Engine]]:
    """What is saved or loaded, and the engines that share it out."""
    found = Objects.sort(objects)
    if not found.models or found.loaders or found.scalers:
        raise UsageError(
            f"paceline.{what} takes models, and their optimizers",
            do="pass state_dict() of a loader, a scheduler or a GradScaler through extra=",
        )
    params = {id(p) for model in found.models for p in model.parameters()}
    engines = [
        engine
        for engine in _engines()
        if any(id(p) in params for group in engine.optimizer.param_groups for p in group["params"])
    ]
    return found, engines


# ---------------------------------------------------------------------------------------------------- around the loop


def log(*, at: Moment | None = None, **metrics: Any) -> None:
    """Report values (loss, accuracy, ...) of the current step to telemetry: `paceline.log(loss=loss.item())`.

    at: an earlier `paceline.moment()`, for what was found out only later, on a copy of the weights.
    """
    if (here := current()) is not None:
        here.recorder.log(metrics, at)


def moment() -> Moment:
    """Now: (steps completed, seconds of training), for `paceline.log(at=...)`."""
    return here.recorder.moment() if (here := current()) else Moment(0, 0.0)


def untimed() -> AbstractContextManager[None]:
    """What happens inside (evaluation, saving) does not count as training time."""
    return here.recorder.untimed() if (here := current()) else contextlib.nullcontext()


@contextlib.contextmanager
def consensus(*, wait: bool = True) -> Iterator[None]:
    """Inside, the weights are those that all workers agree on; after it, this worker's own again.

    For evaluation and saving with methods that let the workers' weights differ (local_sgd, sma, gossip, ...): worker
    0's own weights are one worker's, not the group's. Every worker must enter. Under methods whose replicas always
    agree it does nothing and costs nothing.

    wait=False: where workers keep their own pace (async_average, ...), wait for nobody and take the newest weights that
    this worker knows to have been everybody's, or its own. For an evaluation in the middle of training, which would
    otherwise make the fast wait for the slow.
    """
    with contextlib.ExitStack() as stack:
        for engine in _engines():
            together = wait or not engine.method.sync.is_async
            stack.enter_context(consensus_weights(engine) if together else latest_weights(engine))
        yield


def is_async() -> bool:
    """Are the workers asynchronous? Then nothing in the loop may wait for all of them."""
    return any(engine.method.sync.is_async for engine in _engines())


def no_sync(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Hold communication back: gradients of every backward inside only add up, on this worker.

    The first backward outside exchanges them all: p.grad is then the mean over all samples since the last step, as
    if they had been one batch. Do not divide the loss.
    """
    return _engine(optimizer, "no_sync").no_sync()


def will_step(optimizer: Optimizer) -> bool:
    """Will the next optimizer.step() really step? For LR schedulers and logging.

    With accumulate=N, micro_batch= and a balance that changes the batch it does in the last iteration of several. After
    a backward that did not fit into some worker's memory it does not. All workers whose methods step together agree.
    """
    return _engine(optimizer, "will_step").will_step


def scheduled_steps(optimizer: Optimizer) -> int:
    """How many steps of a learning-rate schedule the last optimizer.step() was worth.

    One, if it stepped; none in the middle of `accumulate` micro-batches and where the step did not count. Under a
    balance that changes how large a step is, as many as its page says, which may be none, one or several:

        for _ in range(paceline.scheduled_steps(optimizer)):
            scheduler.step()
    """
    return _engine(optimizer, "scheduled_steps").sizes.scheduled


def advice(optimizer: Optimizer | None = None) -> Advice:
    """Say how many workers and which batch this job is good for, by what was measured until now: `print` it.

    Needs prepare(advice=K) or a balance that measures, and a loader that was given to `prepare`. Nothing is asked of
    the other workers: the noise is the same on all, the times are this worker's. optimizer: which, if several.
    """
    here = current()
    if here is None:
        raise UsageError("paceline.advice was called before paceline.prepare")
    engines = list(here.engines)
    if optimizer is None and len(engines) != 1:
        raise UsageError(f"advice about which of {len(engines)} optimizers?", do="paceline.advice(optimizer)")
    return advise(engines[0] if optimizer is None else _engine(optimizer, "advice"))


def _engines() -> Iterable[Engine]:
    """All engines of this worker."""
    return here.engines if (here := current()) else ()


def _engine(optimizer: Optimizer, what: str) -> Engine:
    engine = here.by_optimizer.get(id(optimizer)) if (here := current()) else None
    if engine is None:
        raise UsageError(f"{what}: this optimizer is not prepared", do="call paceline.prepare with it first")
    return engine
