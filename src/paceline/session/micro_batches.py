"""`prepare(micro_batch=...)`: what it goes together with, and what loaders and engines need for it."""

from __future__ import annotations

from paceline.core.engine import Engine
from paceline.data.micro_batches import MicroBatchSize
from paceline.data.redeals import Redeals
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
        raise _several(len(objects.optimizers))
    if settings.weight is not None:
        raise UsageError(
            "micro_batch='auto' and weight= do not go together",
            why="the workers ask each other for the weight of every micro-batch, and one that ran out of memory leaves"
            " some out",
            do="give a number for micro_batch=, or leave weight= out",
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


def check_alone(settings: Settings, here: Session) -> None:
    """Refuse a second optimizer beside one whose batches may be dealt again."""
    others = len(here.engines)
    if others and (settings.micro_batch == "auto" or any(engine.redeal.on for engine in here.engines)):
        raise _several(others + 1)


def _several(optimizers: int) -> UsageError:
    return UsageError(
        f"micro_batch='auto' with {optimizers} optimizers",
        why="a worker that ran out of memory cannot know which of them the others will step next",
        do="give a number for micro_batch=",
    )


def redeals(here: Session, engines: list[Engine], size: MicroBatchSize, settings: Settings) -> Redeals | None:
    """A loader's way back to a batch that did not fit, where there is one."""
    if not size.adapts:
        return None
    (engine,) = engines
    together = engine.method.sync.due(engine.ex.step)
    return Redeals(engine.redeal, size, here.group, here.recorder, accumulate=settings.accumulate, together=together)
