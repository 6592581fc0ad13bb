"""Less compression while gradients change fast, more while they do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Reduced, Reducer
from paceline.core.regime import Regime, check_rate_is_seen
from paceline.knobs import knob
from paceline.reducers._memory import Spares
from paceline.reducers._policy import Dial, Policy, numbers
from paceline.reducers.error_feedback import ErrorFeedback
from paceline.reducers.powersgd import PowerSGD
from paceline.registry import register
from paceline.telemetry.events import Choice

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket

_KNOWN = [f.name for f in dataclasses.fields(Regime)]


@register
@dataclass(kw_only=True)
class Accordion(Policy):
    """Turns a knob of the reducer inside, for each layer: to `low` compression in critical regimes, else to `high`.

    Mean gradients are summed up over windows. Where the norm of that sum differs from the window's before by a share of
    `threshold` or more, the next window is critical; so are the first two, which have nothing to compare, and a window
    from the step on in which the learning rate falls. Every large matrix has a regime and a bucket of its own, because
    the reducer inside has one setting for a bucket; everything else shares both. A bucket of which both settings send
    the same has no regime. Each worker keeps a vector as large as the gradients, and error feedback inside keeps its
    own across changes.
    """

    name: ClassVar[str] = "accordion"
    paper: ClassVar[str] = "Agarwal et al., Accordion, MLSys 2021"
    formula: ClassVar[str] = "as the reducer inside at that setting; at a window's end 16·(W−1)/W for each bucket"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.KEEPS_LEFTOVERS})  # gradients are summed up in true units

    of: Reducer = knob(ErrorFeedback(of=PowerSGD()), "the reducer whose knob is turned")
    turn: str = knob("", "that knob's name; empty: the first number among the innermost reducer's")
    low: float = knob(0.0, "its value in critical regimes, for low compression; 0: its own", low=0.0)
    high: float = knob(0.0, "its value elsewhere, for high compression; 0: a quarter of low", low=0.0)
    threshold: float = knob(0.5, "η: critical is a norm that changes by this share of itself; 0: any", low=0.0)
    window: int = knob(100, "means in a window, in the paper those of 10 epochs", unit="steps", low=1)
    fall: float = knob(0.0, "share that the learning rate may lose unnoticed, for smooth schedules", low=0.0, high=1.0)
    smallest: int = knob(1024, "matrices with fewer elements share a bucket with the rest", unit="elements", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._spares = Spares()
        self._told: dict[str, int] = {}  # by parameter: how many decisions telemetry has heard of
        innermost = next(part for part in self.of.parts() if len(list(part.parts())) == 1)
        name = self.turn or next(iter(numbers(innermost)), "")
        self._dial = Dial(self, self.of, name, purpose="turned", instead="wrap powersgd, topk or another that has one")
        self._dial.check_low_and_high(self.of, self._value(critical=True), self._value(critical=False))

    def check(self, optimizer: Optimizer) -> None:
        check_rate_is_seen(self.name, optimizer)

    def kind(self, name: str, p: Tensor) -> Hashable:
        return name if p.dim() > 1 and p.numel() >= self.smallest else "", super().kind(name, p)

    def choose(self, b: Bucket) -> Reducer:
        return self._at(critical=self._regime(b).critical)

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        if not self._matters(b, comm.world_size):
            return await super().mean(b, x, comm)
        regime = self._regime(b)
        reduced = await self._at(critical=regime.critical).mean(b, x, comm)
        total = self._spares.take(self.state, b, "sum", x)
        total.copy_(reduced.mean)
        if regime.steps:
            total.add_(self.state[b.index, "sum"])
        total[b.n :] = 0.0
        self.state[b.index, "sum"] = total
        regime = regime.end()
        if regime.steps >= self.window:
            norm = torch.linalg.vector_norm(total, dtype=torch.float64).reshape(1)
            # Equal everywhere but for the last bits, which differ between processors: all decide by the same number.
            regime = regime.judge(float(await comm.mean(norm)), threshold=self.threshold)
        self._remember(b, regime)
        return reduced

    async def mine(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        if self._matters(b, comm.world_size):
            return await Reducer.mine(self, b, x, comm)  # of the whole mean, whose norm is asked for
        return await super().mine(b, x, comm)

    def sends(self, b: Bucket, world_size: int) -> int:
        ends = self._matters(b, world_size) and self._regime(b).steps + 1 >= self.window
        return super().sends(b, world_size) + (2 * 8 * (world_size - 1) // world_size if ends else 0)

    def recut(self) -> None:
        self._spares.clear()

    def news(self, step: int) -> Iterator[Choice]:
        for name, told in self._told.items():
            if (decisions := self.state.real.get((name, "decisions"), told)) != told:
                self._told[name] = decisions
                critical, ratio = (self.state.real[name, known] for known in ("critical", "ratio"))
                yield self._dial.choice(step, name, self._value(critical=critical), critical=critical, ratio=ratio)

    def _value(self, *, critical: bool) -> float:
        """The knob's value in this regime."""
        low = self.low or self._dial.value(self.of)
        if critical:
            return self._dial.plain(low)
        return self._dial.plain(self.high or self._dial.legal(max(low / 4, self._dial.least)))

    def _at(self, *, critical: bool) -> Reducer:
        """The reducer inside as it is in this regime."""
        return self._dial.at(self.of, self._value(critical=critical))

    def _matters(self, b: Bucket, world_size: int) -> bool:
        """Do the two settings differ for this bucket?"""
        low, high = (self._at(critical=critical).sends(b, world_size) for critical in (True, False))
        return low != high

    def _regime(self, b: Bucket) -> Regime:
        """What is known of the bucket's parameters and of this step's learning rate."""
        name = next((s.name for s in b.slots if (s.name, "steps") in self.state), None)
        regime = Regime() if name is None else Regime(**{known: self.state[name, known] for known in _KNOWN})
        if (b.index, "sum") not in self.state:  # a parameter took the place of one of this name
            regime = dataclasses.replace(regime, steps=0)
        return regime.begin(b.rate, window=self.window, fall=self.fall)

    def _remember(self, b: Bucket, regime: Regime) -> None:
        """Stage a regime for each parameter, so that it can be found again in any other cut."""
        for s in b.slots:
            self._told.setdefault(s.name, self.state.get((s.name, "decisions"), 0))
            for known in _KNOWN:
                self.state[s.name, known] = getattr(regime, known)
