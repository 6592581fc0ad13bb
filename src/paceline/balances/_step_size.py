"""What balances have in common that change the size of a step or its learning rate.

[Note: learning-rate rules] A step of k ordinary batches has less noise, and may be longer. By how much is a rule:

    none      not at all
    sqrt      √k: keeps the noise of a step; the usual rule for Adam and its like
    linear    k: k steps in one (Goyal et al., 2017); the usual rule for SGD while the noise is large
    adascale  the measured gain between 1 and k: Noise.gain, noise.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch.optim import Optimizer

from paceline.balances.even import Even
from paceline.core.facts import Fact
from paceline.core.noise import Noise
from paceline.core.parts import Balance, Speed, StepSize
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.telemetry.events import Choice

LrRule = Literal["adascale", "sqrt", "linear", "none"]


def rate_of(rule: LrRule, size: StepSize, grown: float, noise: Noise) -> float:
    """The factor of the learning rate where a step has grown so many times: [Note: learning-rate rules]."""
    if rule == "adascale":
        return noise.gain(size.samples / grown, size.samples) if size.samples else 1.0
    return {"none": 1.0, "sqrt": math.sqrt(grown), "linear": grown}[rule]


def check_rate(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose groups have no learning rate to multiply."""
    if not all("lr" in group for group in optimizer.param_groups):
        raise MethodError(
            f"{name} multiplies the learning rate, and {type(optimizer).__name__} has none",
            why="no 'lr' is in its param_groups",
            do="use an optimizer with a learning rate, or lr_rule='none' where the balance has that knob",
        )


@dataclass(kw_only=True)
class SizedStep(Balance):
    """A balance that changes the size of a step, and leaves each worker's share of a batch to the balance inside."""

    adapts: ClassVar[bool] = True
    needs: ClassVar[dict[Fact, str]] = {
        Fact.GRADIENTS_AGREE: "it looks at the gradients that all workers step by; use the sync every_step",
        Fact.CLOSE_MEAN: "it compares norms, and what is not sent is missing in them; use the reducer exact or half",
    }

    of: Balance = knob(Even(), "how many samples of each batch a worker takes")

    def shares(self, speeds: Sequence[Speed], batch: int) -> list[int]:
        return self.of.shares(speeds, batch)

    def measures_speed(self) -> bool:
        return self.of.measures_speed()

    def due(self, batch: int) -> bool:
        return self.of.due(batch)

    def worth(self, before_s: float, after_s: float) -> bool:
        return self.of.worth(before_s, after_s)

    def check_batch(self, batch: int, world_size: int) -> None:
        self.of.check_batch(batch, world_size)

    every: int = knob(20, "between two measurements of the noise", unit="steps", low=1)

    def measures_noise(self) -> int:
        return self.every

    def check_several(self, units: int) -> None:
        """Refuse a job whose steps are made of one gradient."""
        if units < 2:
            raise MethodError(
                f"{self.name} needs two workers, or two micro-batches to a step",
                why="noise shows in the difference of gradients, and here a step has one",
                do="start more workers, or give accumulate=2",
            )


@dataclass(kw_only=True)
class GrowingStep(SizedStep):
    """A balance whose steps take from `low` to `high` times as many batches as `accumulate` has it.

    The learning rate is that of `low`. A step of k times as many batches is made with it times a factor by `lr_rule`,
    and counts k steps of the schedule, so that this ends at the same sample: paceline.scheduled_steps.
    """

    low: int = knob(1, "the smallest batch", unit="loader batches", low=1)
    high: int = knob(16, "the largest batch", unit="loader batches", low=1)
    lr_rule: LrRule = knob("linear", "the rate's factor for k times the smallest batch: the measured gain, √k, k or 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._told = self.low  # what telemetry has heard of
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

    def measures_noise(self) -> int:
        return self.every if self.low < self.high else 0

    def multiple(self) -> int:
        return int(self.state.get("multiple", self.low))

    def rate(self, size: StepSize) -> float:
        return rate_of(self.lr_rule, size, self._grown(size), self.noise)

    def counts(self, size: StepSize) -> float:
        return self._grown(size)

    def news(self, step: int) -> Iterator[Choice]:
        if (multiple := self.multiple()) != self._told:
            self._told, critical = multiple, bool(self.state.get("critical"))
            yield Choice(
                t=time.monotonic(),
                step=step,
                layer="",
                knob="loader batches",
                value=multiple,
                critical=critical,
                ratio=self.state.get("ratio"),
            )

    def _grown(self, size: StepSize) -> float:
        """How many times the smallest batch. The last step of an epoch may be smaller, and counts as that."""
        return max(size.multiple / self.low, 1.0)
