"""`prepare(micro_batch=...)`: what it goes together with, and what loaders and engines need for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.core.engine import Engine
from paceline.data.loader import Batch
from paceline.data.micro_batches import MicroBatchSize
from paceline.data.redeals import Redeals, several
from paceline.data.sources import check_cuttable
from paceline.errors import MethodError, UsageError
from paceline.method import Method
from paceline.session.objects import Objects
from paceline.session.session import Session
from paceline.session.settings import Settings


def check(settings: Settings, objects: Objects, method: Method, peer: str | None) -> None:
    """Refuse what micro-batches do not go together with, before anything is started."""
    if settings.micro_batch is None:
        return
    said = f"micro_batch={settings.micro_batch!r}"
    if peer is not None:
        raise UsageError(f"{peer} does not know {said}", do="leave it out, or use one of Paceline's own methods")
    if not objects.loaders:
        raise UsageError(
            f"{said}, and no loader",
            why="it is the loader that deals a batch in several parts",
            do="hand the DataLoader to prepare too",
        )
    for source in objects.loaders:
        check_cuttable(source)
    if settings.micro_batch != "auto":
        return
    if len(objects.optimizers) > 1:
        raise several(len(objects.optimizers))
    if settings.weight is not None:
        raise UsageError(
            "micro_batch='auto' and weight= do not go together",
            why="the workers ask each other for the weight of every micro-batch, and one that ran out of memory leaves"
            " some out",
            do="give a number for micro_batch=, or leave weight= out",
        )
    if method.balance.measures_speed():
        raise MethodError(
            f"micro_batch='auto' with {method.balance.name}",
            why="a batch that did not fit is dealt again, and its shares may have changed meanwhile",
            do="give a number for micro_batch=, or use the balance even",
        )
    frozen = any(not p.requires_grad for model in objects.models for p in model.parameters())
    if method.layout.shards_parameters and frozen:
        raise MethodError(
            f"micro_batch='auto' with {method.layout.name} and frozen parameters",
            why="a worker that ran out of memory would not know which of them the others gather next",
            do="give a number for micro_batch=, or use zero2",
        )
    if method.sync.lag():
        raise MethodError(
            f"micro_batch='auto' with {method.sync.name}",
            why="it goes by gradients of earlier steps, whose batches cannot be dealt again",
            do="give a number for micro_batch=, or use every_step",
        )


def size(settings: Settings, method: Method, models: Sequence[nn.Module], here: Session) -> MicroBatchSize:
    """How large the micro-batches of a loader are.

    Where parameters are gathered in a forward, a worker that runs out of memory must know what the others go on to
    gather. It knows it from the micro-batch before, so the first of all is as small as the model can compute.
    """
    learns = method.layout.shards_parameters and here.group.world_size > 1 and settings.micro_batch == "auto"
    return MicroBatchSize(settings.micro_batch, first=0 if not learns else 2 if _has_batch_norm(models) else 1)


def warning_of_batch_norm(models: Sequence[nn.Module], size: MicroBatchSize) -> Callable[[Batch], None]:
    """What looks at each batch that is handed out, to warn once of a BatchNorm over a single sample."""
    watching = size.cuts and _has_batch_norm(models)

    def look(batch: Batch) -> None:
        nonlocal watching
        if watching and batch.weight == 1 and torch.is_grad_enabled():
            watching = False
            warnings.warn(
                "paceline: a micro-batch of one sample, and the model has BatchNorm: it normalises a sample by itself,"
                " or refuses to; a larger micro_batch=, GroupNorm or frozen averages do not depend on the size",
                stacklevel=2,
            )

    return look


def _has_batch_norm(models: Sequence[nn.Module]) -> bool:
    return any(isinstance(module, _BatchNorm) and module.training for model in models for module in model.modules())


def redeals(here: Session, engines: list[Engine], size: MicroBatchSize, settings: Settings) -> Redeals | None:
    """A loader's way back to a batch that did not fit, where there is one."""
    if not size.adapts:
        return None
    (engine,) = engines
    together = engine.method.sync.due(engine.ex.step)

    def others() -> int:
        return sum(one.ex.step for one in here.engines if one is not engine)

    return Redeals(
        engine.redeal,
        size,
        here.group,
        here.recorder,
        accumulate=settings.accumulate,
        together=together,
        others=others,
    )
