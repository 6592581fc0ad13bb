"""The global batch follows the noise of the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.balances._step_size import GrowingStep, LrRule
from paceline.core.parts import StepSize
from paceline.knobs import knob
from paceline.registry import register

_ENOUGH = 5  # measurements before the first change


@register
@dataclass(kw_only=True)
class AdaptiveBatch(GrowingStep):
    """Double the batch while the gradient noise scale is above twice the batch, and halve it when it is far below.

    A step takes m of the loader's batches (of `accumulate` of them), low <= m <= high. With B the noise scale and b the
    samples of one of these, m is doubled when aim·B >= 2·m·b and halved when slack·aim·B < m·b. So m is low times a
    power of two, or what halving and the bounds make of one, and does not go there and back by chance: between the two
    thresholds lies a factor of 2·slack.
    """

    name: ClassVar[str] = "adaptive_batch"
    paper: ClassVar[str] = "McCandlish et al., An Empirical Model of Large-Batch Training, 2018"

    aim: float = knob(1.0, "the batch to aim at, as a share of the noise scale", above=0.0)
    slack: float = knob(1.5, "how far the noise scale must fall below the batch before this is halved", low=1.0)
    hold: int = knob(50, "the least between two changes", unit="steps", low=1)
    lr_rule: LrRule = knob(
        "adascale", "the rate's factor for k times the smallest batch: the measured gain, √k, k or 1"
    )

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
