"""What the user calls: `prepare`, and a handful of functions around it."""

from __future__ import annotations

import contextlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import consensus, hooks, meta
from paceline.alone import Alone
from paceline.checkpoint import folders
from paceline.checkpoint import load as loading
from paceline.checkpoint import save as saving
from paceline.checkpoint.holdings import Owned
from paceline.engine import Engine
from paceline.environment import Environment
from paceline.errors import MethodError, UsageError, differ, nearest
from paceline.loader import Batch, Loader
from paceline.method import Method
from paceline.method import method as make_method
from paceline.pack import Pack
from paceline.parts import Comm, Part
from paceline.race.peers import PEERS, prepare_peer
from paceline.session import SLOW_MBIT, Session
from paceline.settings import Settings
from paceline.shards.pieces import Shards
from paceline.telemetry import Moment, Recorder
from paceline.things import Things
from paceline.trace import hooks as trace_hooks
from paceline.tuner import Tuner

_session: Session | None = None
_lost = 0  # saves in a row that no disk took
_MOST_LOST = 3
_OWN = tuple(Settings.__dataclass_fields__)


def prepare(*objects: Any, method: str | Method | Part | None = None, **arguments: Any) -> Any:
    """Make a plain training loop data-parallel.

    Takes models, optimizers, loaders (a torch DataLoader with the *global* batch size, or any iterable of this
    worker's batches) and a GradScaler, in any number and order, and gives them back in the same order: models and
    optimizers are the same objects with hooks attached, loaders are new.

    method: a name ("exact", "half", ... see `paceline methods`), names joined by "+", a part, or a paceline.Method.
        Its knobs are keyword arguments. The command line's --method wins over this one, and says so.
    batch: "global" (batch_size is shared out) or "per_worker" (every worker takes batch_size, as with DDP).
    accumulate: micro-batches to a step. Write the loop as without it: in between, `step` and `zero_grad` do
        nothing, and the window's gradient is the mean over all its samples. Do not divide the loss.
    weight: how much a batch counts, if not by its samples: `lambda batch: (batch[1] != pad).sum()` for tokens.
    guard: what happens to a step whose gradient is NaN or infinite on some worker: "skip" it everywhere, "raise",
    or "off".
    deadline: seconds after which a wait for other workers is an error.
    backend: "gloo" or "nccl"; chosen by the device if not given.
    bucket_mb: megabytes of gradients to one exchange; chosen by the measured speed of the link if not given.
    weights: where the weights come from, if not from the models: a folder of paceline.save, or a safetensors file.
        Parameters on the meta device are filled from there, or else by their modules' own reset_parameters().
    tuned: a file. If it exists, sizes (of buckets, pieces, the credit) are taken from it; else they are searched for
        in the first hundred steps of training, and written there.
    """
    global _session
    env = Environment.read()
    settings = Settings(**{k: v for k, v in (arguments | (env.knobs or {})).items() if k in _OWN})
    chosen, peer = _method(method, {k: v for k, v in arguments.items() if k not in _OWN}, env)
    things = Things.sort(objects)
    things.check()
    meta.check(things.models, weights=settings.weights is not None)
    if _session is None:
        _session = Session.start(env, settings)
    _session.world.check_process()
    _session.check_new(things)
    name = peer or str(chosen)
    _session.say_hello(things, name)
    _session.agree(things, peer or json.dumps(chosen.config(), sort_keys=True), settings)
    new: dict[int, Any] = {}
    engines: list[Engine] = []
    lends = peer is None and isinstance(chosen.layout, Shards) and chosen.layout.lends
    fill = _values(_session, things, settings, later=lends)
    if peer is None:
        engines = _engines(_session, things, chosen, settings)
        fill(engines)
    else:
        new |= _peer(peer, things)
    if _session.tape is not None:
        trace_hooks.watch([new.get(id(m), m) for m in things.models], _session.tape, peer=peer is not None)
    loaders = [_loader(_session, source, chosen, settings, engines) for source in things.loaders]
    new |= {id(source): loader for source, loader in zip(things.loaders, loaders, strict=True)}
    _session.print_once(name, loaders)
    result = tuple(new.get(id(thing), thing) for thing in objects)
    return result if len(result) != 1 else result[0]


def _method(given: Any, knobs: dict[str, Any], env: Environment) -> tuple[Method, str | None]:
    """The method, or the name of a peer that runs in its place."""
    spec = given if given is not None else "exact"
    if env.method is not None:
        if given is not None and env.method != given and env.rank == 0:
            print(f"paceline: method {env.method} from the command line (the script says {given})", file=sys.stderr)
        spec, knobs = env.method, {}
    knobs = knobs | {k: v for k, v in (env.knobs or {}).items() if k not in _OWN}
    if isinstance(spec, str) and spec in PEERS:
        if knobs:
            raise MethodError(f"{spec} takes no knobs", why=f"{sorted(knobs)[0]!r} was given")
        return Method(), spec
    try:
        return make_method(spec, **knobs), None
    except MethodError as error:
        wrong = next((k for k in knobs if "no knob" in error.what and repr(k) in error.what), None)
        if wrong is None:
            raise
        raise MethodError(error.what, do=f"{error.do}; prepare itself has: {nearest(wrong, _OWN)}") from None


def _values(session: Session, things: Things, settings: Settings, *, later: bool) -> Callable[[list[Engine]], None]:
    """The same weights on every worker. later: parameters that are not there yet get theirs from what this gives, when
    engines have made slices of them.
    """
    blank = meta.Blank(things.models, session.world.device)
    later = later and bool(blank.ids)
    seed = session.shared_seed()

    def fill(engines: list[Engine]) -> None:
        if settings.weights is None:
            blank.fill(seed, Owned(engines))
            return
        blank.make_room(Owned(engines))
        blank.fill(seed, Owned(engines), passing=True)
        loading.load_model(loading.source(Path(settings.weights), session.control), things, engines)

    if not later:
        fill([])
    session.share_weights(things, without=blank.ids if later else ())
    return fill if later else lambda engines: None


def _engines(session: Session, things: Things, method: Method, settings: Settings) -> list[Engine]:
    """One engine an optimizer, each with parts and a lane of its own."""
    engines = []
    for i, optimizer in enumerate(things.optimizers):
        own = method if i == 0 else method.copy()
        lane = session.world.lane(f"gradients {len(session.pack)}")
        engine = assemble(
            things,
            optimizer,
            own,
            lane,
            recorder=session.recorder,
            settings=settings,
            pack=session.pack,
            buffers=i == 0,
            slow_link=session.link_mbit < SLOW_MBIT,
            background=session.world.lane(f"background {len(session.pack)}") if own.wants_background() else None,
        )
        session.engines[id(optimizer)] = engine
        engines.append(engine)
    for engine in engines:
        engine.company = len(engines) > 1
    return engines


def assemble(
    things: Things,
    optimizer: Optimizer,
    method: Method,
    comm: Comm,
    *,
    recorder: Recorder,
    settings: Settings,
    pack: Pack,
    buffers: bool = True,
    slow_link: bool = False,
    background: Comm | None = None,
) -> Engine:
    """An engine over one optimizer's parameters, hooked up. `pack` is all engines of this worker."""
    method.check(things.facts(optimizer))
    method.layout.check(optimizer)
    parameters = [p for _, p in things.parameters(optimizer)]
    bucket_bytes = settings.bucket_bytes(slow_link=slow_link)
    bucket_bytes = min(bucket_bytes, method.order.piece_bytes() or bucket_bytes)
    if settings.bucket_mb is None and method.layout.at_once < sys.maxsize:
        bucket_bytes = min(bucket_bytes, _few_bytes(parameters, method.layout.at_once))
    gpu = any(p.is_cuda for p in parameters)
    engine = Engine(
        optimizer,
        lambda: things.parameters(optimizer),
        method,
        comm,
        recorder=recorder,
        buffers=things.buffers() if buffers else (),
        accumulate=settings.accumulate,
        guard=settings.guard,
        bucket_bytes=bucket_bytes,
        first_bytes=min(bucket_bytes, 1 << 20) if slow_link or gpu else bucket_bytes,
        background=background,
    )
    hooks.attach(engine, things.models, optimizer, pack=pack, scaler=things.scalers[0] if things.scalers else None)
    if settings.tuned is not None and not engine.idle:
        path = Path(settings.tuned)
        path = path if len(pack) == 1 else path.with_suffix(f".{len(pack)}{path.suffix}")
        engine.look = Tuner(engine, path, bucket_bytes=settings.bucket_bytes(slow_link=slow_link)).forward
    return engine


def _few_bytes(parameters: list[Tensor], at_once: int) -> int:
    """To a bucket, where memory counts: those under way are an eighth of all. But every operation takes time."""
    return max(sum(p.nbytes for p in parameters) // (8 * at_once), 1 << 20)


def _loader(session: Session, source: Any, method: Method, settings: Settings, engines: list[Engine]) -> Loader:
    board = session.world.board

    def hand_out(batch: Batch) -> None:
        for engine in engines:
            engine.take_batch(batch)
        if board is not None:
            board.step = session.recorder.step
            board.where = f"samples {batch.indices[:8]}" if batch.indices else ""

    return Loader(
        source,
        comm=session.control,
        balance=method.balance,
        recorder=session.recorder,
        batch=settings.batch,
        weight=settings.weight,
        seed=session.shared_seed(),
        on_batch=hand_out,
        gate=session.gate,
        meet=session.meet if method.sync.own_pace else None,
    )


def _peer(peer: str, things: Things) -> dict[int, Any]:
    if len(things.models) > 1 or len(things.optimizers) > 1:
        raise UsageError(f"{peer} runs with one model and one optimizer", do="use one of Paceline's own methods")
    model, optimizer = things.models[0], things.optimizers[0]
    new_model, new_optimizer, _ = prepare_peer(peer, model, optimizer, None)
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
    things, engines = _saved(objects, "save")
    if _session is None and Environment.read().world > 1:
        raise UsageError("paceline.save was called before paceline.prepare", do="prepare first: it joins the workers")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise UsageError(f"keep={keep!r} is not a whole number of 1 or more")
    if step is None and not engines:
        raise UsageError("which step is this?", why="nothing here is prepared, so nobody counts", do="give step=")
    number = engines[0].ex.step if step is None else step
    if type(number) is not int or number < 0:
        raise UsageError(f"step={step!r} is not a whole number of 0 or more")
    saving.check_extra(extra or {})
    root, comm = Path(folder), _session.control if _session else Alone()
    try:
        with untimed():
            path = saving.save(root, things, engines, comm, step=number, extra=extra or {})
            if keep is not None and comm.rank == 0:
                folders.retain(root, keep)
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
    things, engines = _saved(objects, "load")
    with untimed():
        return loading.load(Path(folder), things, engines, _session.control if _session else Alone())


def _saved(objects: tuple[Any, ...], what: str) -> tuple[Things, list[Engine]]:
    """What is saved or loaded, and the engines that share it out."""
    things = Things.sort(objects)
    if not things.models or things.loaders or things.scalers:
        raise UsageError(
            f"paceline.{what} takes models, and their optimizers",
            do="pass state_dict() of a loader, a scheduler or a GradScaler through extra=",
        )
    params = {id(p) for model in things.models for p in model.parameters()}
    engines = [
        engine
        for engine in (_session.pack if _session else ())
        if any(id(p) in params for group in engine.optimizer.param_groups for p in group["params"])
    ]
    return things, engines


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
    text = f"paceline.mean of {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if not x.is_floating_point():
        raise UsageError(f"{text}: a mean needs floating-point values", do="convert it with .float()")
    if _session is None:
        if Environment.read().world > 1:
            raise UsageError(
                "paceline.mean was called before paceline.prepare", do="prepare first: it joins the workers"
            )
        return x
    comm = _session.user
    with _session.recorder.untimed():
        # Sizes that differ must be found out before they meet on the wire: this lane is the user's, in any order.
        sums = comm.gather(torch.tensor([zlib.crc32(text.encode())])).wait().flatten().tolist()
        if len(set(sums)) > 1:
            comm.agree("an operation", text)
            differ("an operation", [str(s) for s in sums])
        return comm.mean(x).wait()


def log(*, at: Moment | None = None, **metrics: Any) -> None:
    """Report values (loss, accuracy, ...) of the current step to telemetry: `paceline.log(loss=loss.item())`.

    at: an earlier `paceline.moment()`, for what was found out only later, on a copy of the weights.
    """
    if _session is not None:
        _session.recorder.log(metrics, at)


def moment() -> Moment:
    """Now: (steps completed, seconds of training), for `paceline.log(at=...)`."""
    return _session.recorder.moment() if _session else Moment(0, 0.0)


def untimed() -> AbstractContextManager[None]:
    """What happens inside (evaluation, saving) does not count as training time."""
    return _session.recorder.untimed() if _session else contextlib.nullcontext()


@contextlib.contextmanager
def agreed(*, wait: bool = True) -> Iterator[None]:
    """Inside, the weights are those that all workers agree on; after it, this worker's own again.

    For evaluation and saving with methods that let the workers' weights differ (local_sgd, sma, gossip, ...): worker
    0's own weights are one rider's, not the group's. Every worker must enter. Under methods whose replicas always agree
    it does nothing and costs nothing.

    wait=False: where workers keep their own pace (async_average, ...), wait for nobody and take the newest weights that
    this worker knows to have been everybody's, or its own. For an evaluation in the middle of training, which would
    otherwise make the fast wait for the slow.
    """
    with contextlib.ExitStack() as stack:
        for engine in _session.pack if _session else ():
            together = wait or not engine.method.sync.own_pace
            stack.enter_context(consensus.agreed(engine) if together else consensus.latest(engine))
        yield


def own_pace() -> bool:
    """Do the workers keep their own pace? Then nothing in the loop may wait for all of them."""
    return any(engine.method.sync.own_pace for engine in _session.pack) if _session else False


def hold(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Hold communication back: gradients of every backward inside only add up, on this worker.

    The first backward outside exchanges them all: p.grad is then the mean over all samples since the last step, as
    if they had been one batch. Do not divide the loss.
    """
    return _engine(optimizer, "hold").hold()


def stepping(optimizer: Optimizer) -> bool:
    """With accumulate=N: will the next optimizer.step() really step? For LR schedulers and logging."""
    return _engine(optimizer, "stepping").window.closing


def _engine(optimizer: Optimizer, what: str) -> Engine:
    engine = _session.engines.get(id(optimizer)) if _session else None
    if engine is None:
        raise UsageError(f"{what}: this optimizer is not prepared", do="call paceline.prepare with it first")
    return engine
