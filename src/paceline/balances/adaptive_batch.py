"""The global batch follows the noise of the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from paceline.balances._step_size import LrRule, SizedStep, check_rate, rate_of
from paceline.core.parts import StepSize
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.registry import register

_ENOUGH = 5  # measurements before the first change


@register
@dataclass(kw_only=True)
class AdaptiveBatch(SizedStep):
    """Double the batch while the gradient noise scale is above twice the batch, and halve it when it is far below.

    A step takes m of the loader's batches (of `accumulate` of them), low <= m <= high. With B the noise scale and b the
    samples of one of these, m is doubled when aim·B >= 2·m·b and halved when slack·aim·B < m·b. So m is low times a
    power of two, or high itself, and never goes there and back by chance: between the two lies a factor of 2·slack.

    The learning rate is that of `low`; a step of m is made with it times a factor by `lr_rule`, and counts m/low steps of
    the schedule, so that this ends at the same sample: paceline.scheduled_steps.
    """

    name: ClassVar[str] = "adaptive_batch"
    paper: ClassVar[str] = "McCandlish et al., An Empirical Model of Large-Batch Training, 2018"

    low: int = knob(1, "the smallest batch", unit="loader batches", low=1)
    high: int = knob(16, "the largest batch", unit="loader batches", low=1)
    aim: float = knob(1.0, "the batch to aim at, as a share of the noise scale", above=0.0)
    slack: float = knob(1.5, "how far the noise scale must fall below the batch before this is halved", low=1.0)
    hold: int = knob(50, "the least between two changes", unit="steps", low=1)
    every: int = knob(10, "between two measurements of the noise", unit="steps", low=1)
    lr_rule: LrRule = knob("adascale", "the rate's factor for a batch k times `low`: the measured gain, √k, k or 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise MethodError(
                f"{self.name}: low={self.low} is above high={self.high}",
                why="the batch stays between the two",
                do=f"give low={self.high}, high={self.low}",
            )

    def check(self, optimizer: Optimizer) -> None:
        if self.lr_rule != "none":
            check_rate(self.name, optimizer)

    def check_world(self, world_size: int, accumulate: int) -> None:
        if self.low < self.high:
            self.check_several(world_size * accumulate * self.low)

    def measures(self) -> int:
        return self.every if self.low < self.high else 0

    def multiple(self) -> int:
        return int(self.state.get("multiple", self.low))

    def rate(self, size: StepSize) -> float:
        return rate_of(self.lr_rule, size, self._grown(size), self.noise)

    def counts(self, size: StepSize) -> float:
        return self._grown(size)

    def made(self, size: StepSize) -> None:
        m, held = self.multiple(), self.state.get("held", 0) + 1
        self.state["held"] = held
        if held < self.hold or self.noise.seen < _ENOUGH or size.multiple != m:  # an epoch's last step may be smaller
            return
        wanted = self.aim * self.noise.scale
        changed = min(2 * m, self.high) if wanted >= 2 * size.samples else m
        if self.slack * wanted < size.samples:
            changed = max(math.ceil(m / 2), self.low)
        if changed != m:
            self.state["multiple"], self.state["held"] = changed, 0

    def _grown(self, size: StepSize) -> float:
        """How many times the smallest batch. The last step of an epoch may be smaller, and counts as that."""
        return max(size.multiple / self.low, 1.0)
