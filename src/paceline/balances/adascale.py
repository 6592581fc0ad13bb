"""A large batch with the learning rate of a small one, by a measured gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from paceline.balances._step_size import SizedStep, check_rate
from paceline.core.parts import StepSize
from paceline.knobs import knob
from paceline.registry import register


@register
@dataclass(kw_only=True)
class AdaScale(SizedStep):
    """Multiply the learning rate by the gain r of a batch S times as large as that which the rate was chosen for.

        r = (σ²/base + μ²)/(σ²/batch + μ²)     from 1 (no noise) to S = batch/base (nothing but noise)

    with μ² = |G|² and σ² = tr(Σ) of one sample's gradient, moving averages of what is measured in every `every`-th
    step. A step counts r steps of the schedule: paceline.scheduled_steps says how often to call scheduler.step(). The
    gain is 1 until the first measurement.
    """

    name: ClassVar[str] = "adascale"
    paper: ClassVar[str] = "Johnson et al., AdaScale SGD, ICML 2020"

    base: float = knob(
        0.0, "the batch for which rate and schedule were chosen; 0: one worker's micro-batch", unit="samples", low=0.0
    )

    def check(self, optimizer: Optimizer) -> None:
        check_rate(self.name, optimizer)

    def check_world(self, world_size: int, accumulate: int) -> None:
        self.check_several(world_size * accumulate)

    def rate(self, size: StepSize) -> float:
        return self.noise.gain(self.base or size.samples / size.units, size.samples) if size.samples else 1.0

    def counts(self, size: StepSize) -> float:
        return self.rate(size)
