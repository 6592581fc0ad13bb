"""From what the user handed over to engines that are hooked up."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.group import Group
from paceline.core import loss_scale
from paceline.core.buffers import Buffers
from paceline.core.engine import Engine, EngineOptions
from paceline.core.engines import Engines
from paceline.core.exchange import no_scale
from paceline.core.hooks import Hooks
from paceline.method import Method
from paceline.session.objects import Objects
from paceline.session.session import SLOW_MBIT, Session
from paceline.session.settings import Settings
from paceline.session.tuner import Tuner
from paceline.telemetry.recorder import Recorder
from paceline.telemetry.tape import Tape


def engines(session: Session, objects: Objects, method: Method, settings: Settings) -> list[Engine]:
    """One engine for each optimizer, with parts and a lane of its own."""
    made, buffers = [], objects.buffers()
    for i, optimizer in enumerate(objects.optimizers):
        engine = assemble(
            objects,
            optimizer,
            method.copy(),  # the user may give one object to several calls of prepare
            session.group,
            recorder=session.recorder,
            settings=settings,
            engines=session.engines,
            buffers=buffers,
            averages_buffers=i == 0,
            slow_link=session.link_mbit < SLOW_MBIT,
            tape=session.tape,
        )
        session.by_optimizer[id(optimizer)] = engine
        made.append(engine)
    return made


def assemble(
    objects: Objects,
    optimizer: Optimizer,
    method: Method,
    group: Group,
    *,
    recorder: Recorder,
    settings: Settings,
    engines: Engines,
    buffers: Buffers | None = None,
    averages_buffers: bool = True,
    slow_link: bool = False,
    tape: Tape | None = None,
    options: EngineOptions | None = None,
) -> Engine:
    """An engine over one optimizer's parameters, hooked up. engines: all of this worker. buffers: those of the models,
    if other engines train these models too.
    """
    check_one(objects, optimizer, method, settings, world_size=group.world_size)
    bucket_bytes, first_bytes = _sizes(objects, optimizer, method, settings, slow_link=slow_link)
    scaler: Any = next((one for one in objects.scalers if one.is_enabled()), None)
    hooks = Hooks(objects.models, engines=engines, scaler=scaler)
    engine = Engine(
        optimizer,
        lambda: objects.parameters(optimizer),
        method,
        group,
        recorder=recorder,
        hooks=hooks,
        buffers=objects.buffers() if buffers is None else buffers,
        options=replace(
            options or EngineOptions(),
            accumulate=settings.accumulate,
            cuts=settings.micro_batch is not None,
            redeals=settings.micro_batch == "auto",
            summed=settings.loss == "sum",
            guard=settings.guard,
            check_replicas=settings.check_replicas,
            measure_noise=settings.advice,
            bucket_bytes=bucket_bytes,
            first_bytes=first_bytes,
            lane=engines.free_lane(),
            shares_backward=len(objects.optimizers) > 1,
            behind=len(engines) > 0,
            averages_buffers=averages_buffers,
        ),
        loss_scale=loss_scale.current(scaler) if scaler is not None else no_scale,
        on_resume=tape.about if tape is not None else None,
    )
    hooks.attach(engine)
    if settings.tuned is not None and not engine.idle:
        path = Path(settings.tuned)
        path = path if len(engines) == 1 else path.with_suffix(f".{len(engines)}{path.suffix}")
        tuner = Tuner(engine, path, bucket_bytes=settings.bucket_bytes(slow_link=slow_link))
        engine.on_forward(tuner.forward)
    return engine


def check(objects: Objects, method: Method, settings: Settings, *, world_size: int | None) -> None:
    """Refuse a method that does not go together with this job. world_size: if it is known, before workers have met."""
    for optimizer in objects.optimizers:
        check_one(objects, optimizer, method, settings, world_size=world_size)


def check_one(
    objects: Objects, optimizer: Optimizer, method: Method, settings: Settings, *, world_size: int | None
) -> None:
    """Refuse a method that does not go together with this optimizer."""
    method.check(objects.facts(optimizer))
    for part in method.parts():
        part.check(optimizer)
    if world_size is not None:
        method.balance.check_world(world_size, settings.accumulate)


def _sizes(
    objects: Objects, optimizer: Optimizer, method: Method, settings: Settings, *, slow_link: bool
) -> tuple[int, int]:
    """The bytes of a bucket, and of the first one."""
    parameters = [p for _, p in objects.parameters(optimizer)]
    bucket_bytes = settings.bucket_bytes(slow_link=slow_link)
    bucket_bytes = min(bucket_bytes, method.order.chunk_bytes() or bucket_bytes)
    if settings.bucket_mb is None and method.layout.at_once < sys.maxsize:
        bucket_bytes = min(bucket_bytes, _few_bytes(parameters, method.layout.at_once))
    gpu = any(p.is_cuda for p in parameters)
    first_bytes = min(bucket_bytes, 1 << 20) if slow_link or gpu else bucket_bytes
    return bucket_bytes, first_bytes


def _few_bytes(parameters: list[Tensor], at_once: int) -> int:
    """The size of a bucket where memory counts: those under way are an eighth of all, but operations take time."""
    return max(sum(p.nbytes for p in parameters) // (8 * at_once), 1 << 20)
