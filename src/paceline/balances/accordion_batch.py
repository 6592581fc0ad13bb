"""Small batches while gradients change fast, large ones from then on."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from paceline.balances._step_size import GrowingStep
from paceline.core.noise import NoiseSample
from paceline.core.parts import StepSize
from paceline.core.regime import Regime, check_rate_is_seen
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.registry import register

_KNOWN = [f.name for f in dataclasses.fields(Regime)]


@register
@dataclass(kw_only=True)
class AccordionBatch(GrowingStep):
    """Take `low` batches to a step in critical regimes, and `high` from the first window on that is not critical.

    The batch only grows, as in the paper. A window is critical if the norm of its gradient differs from that of the one
    before by a share of `threshold` or more; so are the first two, and a window from a step on in which the learning
    rate falls. That norm is the root of the mean |G|² over the window, as it is measured without the noise of the
    batches. (The paper sums up the gradients of ten epochs, in which this noise cancels; here no worker keeps such a
    vector.)
    """

    name: ClassVar[str] = "accordion_batch"
    paper: ClassVar[str] = "Agarwal et al., Accordion, MLSys 2021"

    high: int = knob(8, "the batch outside of critical regimes", unit="loader batches", low=1)
    threshold: float = knob(0.5, "η: critical is a norm that changes by this share of itself; 0: any", low=0.0)
    window: int = knob(100, "steps of which one norm is taken, in the paper those of 10 epochs", unit="steps", low=1)
    fall: float = knob(0.0, "share that the learning rate may lose unnoticed, for smooth schedules", low=0.0, high=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every > self.window:
            raise MethodError(
                f"{self.name}: every={self.every} is above window={self.window}",
                why="a window without a measurement has no norm",
                do=f"give every={self.window} or less",
            )

    def check(self, optimizer: Optimizer) -> None:
        super().check(optimizer)
        check_rate_is_seen(self.name, optimizer)

    def hear(self, sample: NoiseSample) -> None:
        super().hear(sample)
        for name, value in (("squares", sample.square), ("heard", 1)):
            self.state[name] = self.state.get(name, 0) + value

    def made(self, size: StepSize) -> None:
        known = {name: self.state[name] for name in _KNOWN if name in self.state}
        regime = Regime(**known).begin(size.rate, window=self.window, fall=self.fall).end()
        if regime.steps >= self.window and (heard := self.state.get("heard", 0)):
            square = self.state["squares"] / heard
            regime = regime.judge(math.sqrt(max(square, 0.0)), threshold=self.threshold)
            self.state["squares"], self.state["heard"] = 0.0, 0
            if not regime.critical:
                self.state["multiple"] = self.high
        for name in _KNOWN:
            self.state[name] = getattr(regime, name)
