"""Between two steps: go on by another method, or with other workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import consensus, transfer
from paceline.core.facts import Fact
from paceline.errors import MethodError, UsageError

if TYPE_CHECKING:
    from paceline.comm.group import Group
    from paceline.core.engine import Engine
    from paceline.core.parts import Parts


def check_between_steps(engine: Engine, what: str) -> None:
    """Refuse to do something that must not happen in the middle of a step."""
    if not engine.idle:
        engine.settle()
    if engine.exchanged or engine.window.several or engine.window.micro:
        raise UsageError(
            f"{what} was called in the middle of a step",
            why="gradients have been added up or exchanged, and would be lost",
            do="after optimizer.step(); with accumulate=N, if paceline.will_step(optimizer) was true before",
        )


def method(engine: Engine, new: Parts) -> None:
    """Go on by another method. All workers must call it, with the same method.

    Where the workers' weights differ they become the consensus; what the parts have kept back of gradients is added to
    the next ones; then the new parts begin anew. The layout stays.
    """
    check_between_steps(engine, "Engine.change")
    engine.comm.agree("the next method", str(new.config()))
    old = engine.method
    if new.layout.config() != old.layout.config():
        raise MethodError(
            f"the layout cannot change from {old.layout.name} to {new.layout.name} while training",
            why="parameters, gradients and optimizer state lie where the layout put them",
            do="save a checkpoint and load it with the other layout",
        )
    for sync in (old.sync, new.sync):
        if sync.is_async:
            raise MethodError(
                f"{sync.name} cannot be taken up or left while training",
                why="its workers keep their own pace, so there is no step between which all could change",
                do="save a checkpoint and load it with the other method",
            )
    _agree_on_weights(engine)
    for b in engine.buckets:
        kept = [x for part in old.parts() if (x := part.flush(b)) is not None]
        if (before := engine.ex.carry.take(b)) is not None:
            kept.append(before)
        if kept:
            engine.ex.carry.put(b, sum(kept[1:], start=kept[0].clone()))
    new.layout = old.layout
    with engine.cut_anew(parts=False):
        engine.ex.use(new)
        engine.settle_in()
        if engine.overlap.on:
            engine.gradient_hooks.cross(engine)


def group(engine: Engine, new: Group) -> None:
    """Go on with the workers of another group. Old and new members call it.

    Where the workers' weights differ they become the consensus; every worker gets the mean of what the workers' parts
    remember, so its mean over the workers stays what it was; joiners get everything from a member.
    """
    luggage = pack_up(engine)
    engine.group.become(new)
    unpack(engine, luggage)


def pack_up(engine: Engine) -> transfer.Luggage:
    """The first half of `group`, with the old group: everything in a form that any group can go on from."""
    check_between_steps(engine, "Engine.regroup")
    if engine.method.sync.is_async and engine.group.world_size > 1:
        raise MethodError(
            f"{engine.method.sync.name} cannot go on with other workers",
            why="its workers keep their own pace, so there is no step between which all could change",
            do="save a checkpoint and load it on the other workers",
        )
    if not engine.idle:
        _agree_on_weights(engine)
        engine.method.layout.collect(engine.ex)
    luggage = transfer.pack(engine)
    engine.forget_cut()
    return luggage


def unpack(engine: Engine, luggage: transfer.Luggage) -> None:
    """The second half of `group`, with the new group."""
    engine.sent_before = 0
    engine.window.renumber()
    engine.settle_in()
    luggage = transfer.share(engine, luggage)
    engine.refresh()
    transfer.unpack(engine, luggage)
    engine.over(made=False)


def _agree_on_weights(engine: Engine) -> None:
    """Where the workers' weights differ, all take the consensus, and of the optimizer's state the mean."""
    if Fact.REPLICAS_AGREE not in engine.ex.facts and engine.group.world_size > 1:
        consensus.adopt(engine)
        transfer.average_optimizer(engine)
