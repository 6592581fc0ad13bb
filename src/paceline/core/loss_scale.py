"""GradScaler: in the middle of a window it has nothing to do, and a step it leaves out is not left out everywhere.

[Note: loss scale] A GradScaler multiplies the loss by a scale it changes as it goes. A part that keeps something of
one step for a later one must not mix scales, so for such a method gradients are brought to their true size before
the sync sees them and back to scale after (exchange.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from paceline.core.engine import Engine
from paceline.errors import UsageError


def refuse_unknown(what: str) -> None:
    """Refuse fp16 autocast under a method that must know the GradScaler, if it was not handed over."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            raise _unknown(f"{what} under fp16 autocast")


def _unknown(what: str) -> UsageError:
    return UsageError(
        f"{what} needs to know your GradScaler",
        why="it keeps gradients while their scale changes, or others must hear of a step the scaler leaves out",
        do="pass it along: model, optimizer, loader, scaler = prepare(model, optimizer, loader, scaler)",
    )


_theirs: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # by the optimizer's id: no scaler was handed over


def watch_unknown(engine: Engine) -> None:
    """Have a GradScaler that was not handed over refused where it steps this engine's optimizer, if it must be known.

    On an overflow such a scaler does not call `optimizer.step` at all, on one worker alone perhaps.
    """
    _theirs[id(engine.optimizer)] = engine
    step = torch.amp.GradScaler.step

    def checked(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        mine = _theirs.get(id(optimizer))
        if mine is not None and mine.optimizer is optimizer and self.is_enabled() and (why := needs_scaler(mine)):
            raise _unknown(why)
        return step(self, optimizer, *args, **kwargs)

    if step.__name__ != checked.__name__:
        torch.amp.GradScaler.step = checked  # type: ignore[method-assign]


def needs_scaler(engine: Engine) -> str:
    """Say what must know a GradScaler; empty if nothing must."""
    if engine.idle:
        return ""
    if engine.window.accumulate > 1:
        return "a step of several micro-batches"
    if engine.method.balance.adapts:
        return engine.method.balance.name
    if engine.noise.every:
        return "advice="
    if engine.options.cuts:
        return "micro_batch"
    alone = not engine.method.sync.due(engine.ex.step)
    return "this method" if engine.ex.keeps or alone else ""


def current(scaler: Any) -> Callable[[], Tensor | None]:
    """The scale that a GradScaler uses at the moment, for the exchange; None before its first use."""
    return lambda: scaler._scale


def wrap(engine: Engine, scaler: Any) -> None:
    """In the middle of a window there is nothing to unscale, to check or to step."""
    optimizer = engine.optimizer
    step, unscale, update = scaler.step, scaler.unscale_, scaler.update

    def paced_step(opt: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if opt is not optimizer:
            return step(opt, *args, **kwargs)
        if not engine.will_step:
            return opt.step()
        engine.agree_by_hand()
        engine.asked, engine.by_hand.trusts = False, True
        made = engine.ex.step
        try:
            result = step(opt, *args, **kwargs)
        finally:
            engine.by_hand.trusts = False
        if not engine.asked:
            engine.left_out()
        elif engine.ex.step == made and engine.gave_up:  # a worker whose backward raised has not unscaled anything
            scaler._per_optimizer_states.pop(id(optimizer), None)
        return result

    def paced_unscale(opt: torch.optim.Optimizer) -> None:
        if opt is not optimizer:
            unscale(opt)
        elif engine.will_step:
            engine.agree_by_hand()
            unscale(opt)
            engine.by_hand.note()

    def paced_update(*args: Any, **kwargs: Any) -> None:
        if scaler._per_optimizer_states:  # something was checked since the last update
            update(*args, **kwargs)
            _agree(engine, scaler)

    scaler.step, scaler.unscale_, scaler.update = paced_step, paced_unscale, paced_update


def _agree(engine: Engine, scaler: Any) -> None:
    """Workers that train alone have scales of their own. Where all of them meet, they take the smallest."""
    sync, made = engine.method.sync, engine.ex.step - 1
    if engine.idle or made < 0 or sync.due(made) or not sync.meets(made) or scaler._scale is None:
        return
    own = torch.stack([scaler._scale.double().reshape(()), scaler._growth_tracker.double().reshape(())])
    smallest = engine.comm.all_gather(own).wait().amin(0)
    scaler._scale.copy_(smallest[0])
    scaler._growth_tracker.copy_(smallest[1])
