"""Does the step count? On a GPU the optimizer is told by a tensor, and the host hears of it one step later.

[Note: verdict on the device] On a GPU the sum of the workers' votes is a tensor on the device, and reading it would
make the host wait for all that was enqueued before it. Where the optimizer takes the verdict as a tensor (`found_inf`
of torch's fused optimizers), nothing is read in the step: the optimizer skips on the device, and the numbers travel to
the host meanwhile, to be read in the next step (`LateReading`, vote.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.vote import NOT_FINITE, LateReading, not_finite

if TYPE_CHECKING:
    from paceline.core.engine import Engine


class DeviceVerdict:
    """The verdict on one engine's steps, where the host does not wait for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unread: tuple[LateReading, bool] | None = None  # the verdict on the last step, and: on this worker alone

    def possible(self) -> bool:
        """Can the optimizer skip by a tensor, with nothing of the step staged that the host would have to undo?"""
        engine = self._engine
        wanted = engine.options.device_verdict
        if wanted is None:
            wanted = any(b.flat.is_cuda for b in engine.buckets)
        guard, vote, ex = engine.guard, engine.vote, engine.ex
        return (
            wanted
            and not engine.redeal.asks
            and guard.mode != "raise"
            and vote.late == 0
            and (not engine.exchanged or (ex.exact_everywhere and vote.ballot is not None))
            and ex.loss_scale() is None
            and (guard.mode == "off" or takes_found_inf(engine.optimizer))
            and not any(part.state.staged for part in engine.parts)
        )

    def step(self, do: Callable[[], Any]) -> Any:
        """Make the optimizer's step, skipped on the device if gradients are not finite."""
        engine = self._engine
        engine.guard.name_unused(engine.buckets)
        bad = self._of_this_worker() if not engine.exchanged else self._of_all()
        if bad is None:
            return do()
        optimizer: Any = engine.optimizer
        optimizer.found_inf, optimizer.grad_scale = bad.to(torch.float32), None
        alone = not engine.exchanged
        try:
            return do()
        finally:
            del optimizer.found_inf, optimizer.grad_scale
            if not alone:
                engine.buffers.give_back_where(bad)
            engine.buffers.keep()

    def _of_this_worker(self) -> Tensor | None:
        """Gradients that no other worker sees: are they not finite? None: nothing to look at."""
        engine, rank = self._engine, self._engine.group.rank
        if engine.guard.mode == "off":
            return None
        bad = not_finite(s.param for b in engine.buckets for s in b.slots)
        if bad is not None:
            reading = LateReading(bad.reshape(1).double(), lambda found: {rank: NOT_FINITE} if found[0] else {})
            self._unread = reading, True
        return bad

    def _of_all(self) -> Tensor | None:
        """Are any worker's gradients not finite? None: the guard is off."""
        engine, ballot = self._engine, self._engine.vote.ballot
        assert ballot is not None
        self._unread = ballot.read_late(), False
        return ballot.any_bad() if engine.guard.mode != "off" else None

    def read(self) -> None:
        """Hear whether the last step counted, where the device decided. One that did not is said and not counted."""
        if self._unread is None:
            return
        engine = self._engine
        (reading, alone), self._unread = self._unread, None
        if not (bad := reading.bad()):
            engine.guard.counted()
            return
        step = engine.ex.step - 1
        if not alone:
            engine.ex.step = step
            engine.sizes.take_back()
        engine.guard.skipped(step, bad, alone=alone)


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Does every group step by a fused kernel, which skips on the device where `found_inf` says so?"""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )
