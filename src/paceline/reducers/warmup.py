"""No compression, or less of it, in the first steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.core.parts import Reducer
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.reducers._policy import Dial, Policy
from paceline.reducers.exact import Exact
from paceline.reducers.half import Half
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket

_EXACT = Exact()


@register
@dataclass(kw_only=True)
class Warmup(Policy):
    """The exact mean for the first steps, when gradients are large and change fast; then the reducer inside.

    With `schedule`, the name of one of its knobs, the reducer inside is used from the first step on, and that knob
    moves to its own value by equal factors, one for each stage. It begins at `start`, or one factor below the upper end
    of its range: with 4 stages a ratio of 0.1 % is 25 %, 6.3 %, 1.6 % and 0.4 % before. With one stage it is `start`
    and then its own value. A whole number is rounded; a choice is the nearest legal one.

    The schedule counts the steps that were committed, which are the same on all workers.
    """

    name: ClassVar[str] = "warmup"
    paper: ClassVar[str] = "Lin et al., Deep Gradient Compression, ICLR 2018"
    formula: ClassVar[str] = "2·n·s·(W−1)/W at first, or as the reducer inside at that knob; then as the reducer inside"

    steps: int = knob(100, "how long the mean is exact, or the schedule", unit="steps", low=1)
    of: Reducer = knob(Half(), "the reducer after that")
    schedule: str = knob("", "a knob inside that changes in these steps; empty: the mean is exact in them")
    stages: int = knob(4, "values the scheduled knob takes before its own", low=1)
    start: float = knob(0.0, "the scheduled knob's first value; 0: a factor below the upper end of its range", low=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule:
            self._prepare()

    def choose(self, b: Bucket) -> Reducer:
        if b.step >= self.steps:
            return self.of
        return self._dial.at(self.of, self._value(b.step)) if self.schedule else _EXACT

    def _value(self, step: int) -> float:
        """The scheduled knob's value, which depends on the step alone."""
        final = self._dial.value(self.of)
        stage = step * self.stages // self.steps
        start, t = self.start, stage / self.stages
        if not start:  # not the upper end itself, which would be no compression at all
            start, t = self._dial.most, (stage + 1) / (self.stages + 1)
        return self._dial.legal(start * (final / start) ** t)

    def _prepare(self) -> None:
        """Find the range of the scheduled knob, and raise if it cannot be scheduled."""
        self._dial = Dial(
            self, self.of, self.schedule, purpose="scheduled", instead="leave schedule empty: exact at first"
        )
        if not self.start and not self._dial.most:
            raise MethodError(f"{self.name}: {self.schedule!r} has no upper end to come from", do="give start=")
        self._dial.check(self.of, self._value(0))
