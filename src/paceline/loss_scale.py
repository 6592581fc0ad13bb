"""GradScaler: in the middle of a window it has nothing to do, and a step it leaves out is not left out everywhere.

[Note: loss scale] A GradScaler multiplies the loss by a scale it changes as it goes. A part that keeps something of
one step for a later one must not mix scales, so for such a method gradients are brought to their true size before
the sync sees them and back to scale after (exchange.py).
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.engine import Engine
from paceline.errors import UsageError


def refuse_unknown(what: str) -> None:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            raise UsageError(
                f"{what} under fp16 autocast needs to know your GradScaler",
                why="it keeps gradients while their scale changes, or others must hear of a step the scaler leaves out",
                do="pass it along: model, optimizer, loader, scaler = prepare(model, optimizer, loader, scaler)",
            )


def wrap(engine: Engine, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """In the middle of a window there is nothing to unscale, to check or to step."""
    step, unscale, update = scaler.step, scaler.unscale_, scaler.update
    engine.ex.loss_scale = lambda: scaler._scale

    def paced_step(opt: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if opt is not optimizer:
            return step(opt, *args, **kwargs)
        if not engine.window.closing:
            return opt.step()
        engine.asked = False
        result = step(opt, *args, **kwargs)
        if not engine.asked:
            engine.left_out()
        return result

    def paced_unscale(opt: torch.optim.Optimizer) -> None:
        if opt is not optimizer or engine.window.closing:
            unscale(opt)

    def paced_update(*args: Any, **kwargs: Any) -> None:
        if scaler._per_optimizer_states:  # something was checked since the last update
            update(*args, **kwargs)

    scaler.step, scaler.unscale_, scaler.update = paced_step, paced_unscale, paced_update
