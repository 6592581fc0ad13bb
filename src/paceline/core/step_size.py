"""How large a step is and at which learning rate: what the balance says, and the optimizer around which it is done.

[Note: batches to a step] A balance that wants a larger batch has the window take more of the loader's batches: the same
batches in the same order, added up and exchanged once. Batches of another size from the loader would need memory on
every worker that nobody has looked for, loader processes that have read ahead would be wrong by their depth, and the
samples of an epoch would be dealt otherwise. This takes effect with the next batch and costs nothing but the smaller
parts in which a worker computes.

[Note: rate] A learning rate is multiplied around the optimizer's own step alone, and put back after it. Schedulers read
and write `group["lr"]` before and after, so all of them work as they are; none ever sees the factor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from paceline.core.parts import StepSize

if TYPE_CHECKING:
    from paceline.core.engine import Engine

_SCHEDULE = "schedule"  # in the balance's memory: the steps of the user's schedule that have been made


@contextlib.contextmanager
def scaled_rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Inside, every group's learning rate is multiplied by this: [Note: rate]."""
    if factor == 1.0:
        yield
        return
    groups = [group for group in optimizer.param_groups if "lr" in group]
    before = [group["lr"] for group in groups]
    scaled = [lr * factor for lr in before]
    for group, lr in zip(groups, scaled, strict=True):
        group["lr"] = lr
    try:
        yield
    finally:
        for group, old, lr in zip(groups, before, scaled, strict=True):
            if group["lr"] is lr:  # else the optimizer sets its rate itself
                group["lr"] = old


class StepSizes:
    """The sizes of one engine's steps, as its balance wants them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduled = 0  # steps of the user's schedule that the last call of step() was worth
        self._before: dict[Any, Any] | None = None  # the balance's memory before the last step

    def begin(self) -> None:
        """The last backward of a step begins: its learning rate is known from here on."""
        engine = self.engine
        engine.noise.read()
        if engine.method.balance.adapts:
            engine.ex.rate = engine.method.balance.rate(self._size())

    def _size(self) -> StepSize:
        totals = self.engine.window.totals
        return StepSize(
            multiple=len(totals) / self.engine.options.accumulate,
            samples=sum(totals),
            units=len(totals) * self.engine.group.world_size,
            rate=sum(self.engine.rates()),
        )

    def made(self) -> None:
        """The step counts: the balance may choose the next one's size."""
        balance = self.engine.method.balance
        self.scheduled = 1
        if not balance.adapts:
            return
        self._before = dict(balance.state.real)
        size = self._size()
        done = balance.state.get(_SCHEDULE, 0.0)
        now = done + balance.counts(size)
        balance.state[_SCHEDULE] = now
        balance.made(size)
        balance.state.commit()
        self.scheduled = math.floor(now + 1e-6) - math.floor(done + 1e-6)

    def take_back(self) -> None:
        """The last step did not count, as is heard only now: [Note: verdict on the device], device_verdict.py."""
        if self._before is not None:
            self.engine.method.balance.state.real = self._before
            self._before = None
