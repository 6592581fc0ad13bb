"""No compression, or less of it, in the first steps."""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from paceline import knobs
from paceline.comm.protocol import Comm
from paceline.core.parts import Part, Reduced, Reducer
from paceline.errors import MethodError, nearest
from paceline.knobs import knob
from paceline.reducers._memory import vectors
from paceline.reducers.exact import Exact
from paceline.reducers.half import Half
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket

_EXACT = Exact()


@register
@dataclass(kw_only=True)
class Warmup(Reducer):
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

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        return await self._now(b).mean(b, x, comm)

    async def mine(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        return await self._now(b).mine(b, x, comm)

    def sends(self, b: Bucket, world_size: int) -> int:
        return self._now(b).sends(b, world_size)

    def _now(self, b: Bucket) -> Reducer:
        if b.step >= self.steps:
            return self.of
        return _turned(self.of, self.schedule, self._value(b.step)) if self.schedule else _EXACT

    def _value(self, step: int) -> float:
        """The scheduled knob's value, which depends on the step alone."""
        final = getattr(_owner(self.of, self.schedule), self.schedule)
        stage = step * self.stages // self.steps
        start, t = self.start, stage / self.stages
        if not start:  # not the upper end itself, which would be no compression at all
            start, t = self._high, (stage + 1) / (self.stages + 1)
        value: float = start * (final / start) ** t
        if self._legal:
            return min(self._legal, key=lambda choice: abs(math.log(choice / value)))
        return round(value) if isinstance(final, int) else value

    def _prepare(self) -> None:
        """Find the range of the scheduled knob, and raise if it cannot be scheduled."""
        owner = _owner(self.of, self.schedule)
        if owner is None:
            numbers = [name for part in self.of.parts() for name in _numbers(part)]
            raise MethodError(
                f"{self.name}: {self.of.name} has no knob {self.schedule!r} that could be scheduled",
                why="a schedule goes from one positive number to another",
                do=nearest(self.schedule, numbers) if numbers else "leave schedule empty: exact at first",
            )
        field = next(f for f in dataclasses.fields(owner) if f.name == self.schedule)
        self._legal: tuple[float, ...] = knobs.choices(knobs.kinds(type(owner))[field.name])
        self._high: float = max(self._legal) if self._legal else field.metadata.get("high") or 0.0
        if not self.start and not self._high:
            raise MethodError(f"{self.name}: {self.schedule!r} has no upper end to come from", do="give start=")
        for part in _turned(self.of, self.schedule, self._value(0)).parts():
            knobs.check(part)


def _numbers(part: Part) -> list[str]:
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return [name for name, v in values.items() if type(v) in (int, float) and v > 0]


def _owner(part: Part, name: str) -> Part | None:
    """The outermost part that has the knob."""
    return next((p for p in part.parts() if name in _numbers(p)), None)


def _turned(part: Any, name: str, value: float) -> Any:
    """A copy of the part with the knob at another value, which shares the part's state and scratch vectors.

    The part itself is not changed, because exchanges of other buckets may be under way.
    """
    vectors(part)  # created before the copy, so that the copy shares them
    turned = copy.copy(part)
    if name in _numbers(part):
        setattr(turned, name, value)
        return turned
    inside = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    where = next(k for k, inner in inside.items() if isinstance(inner, Part) and _owner(inner, name))
    setattr(turned, where, _turned(inside[where], name, value))
    return turned
