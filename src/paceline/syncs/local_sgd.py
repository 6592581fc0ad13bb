"""Workers train alone for some steps, then average their changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.core.pipeline import Task
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.registry import register
from paceline.syncs import _moments

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class LocalSGD(Sync):
    """H steps alone, then all workers move the common anchor x by the mean of their differences, and continue from it.

    Δᵢ = x − wᵢ,  x ← x − mean(Δᵢ),  wᵢ ← x. Differences from the anchor are averaged, not weights, so any reducer can
    send them, and error feedback works in the same unit. BatchNorm's running averages are averaged along with them.

    Streaming: with fragments the buckets take turns, so that the bytes are spread over the H steps. With a delay they
    travel while training goes on. The training done meanwhile is kept when they arrive: w ← x + (w − w as it was
    sent); or mixed, as in Streaming DiLoCo: w ← mix·w + (1 − mix)·x.
    """

    name: ClassVar[str] = "local_sgd"
    paper: ClassVar[str] = "Stich, Local SGD converges fast and communicates little, ICLR 2019"
    formula: ClassVar[str] = "as the reducer, once in H steps"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.DIFFERENCES})
    acts_before_step: ClassVar[bool] = True
    acts_after_step: ClassVar[bool] = True
    limit: ClassVar[dict[str, Any]] = {"every": 1}
    needs: ClassVar[dict[Fact, str]] = {
        Fact.WHOLE_PARAMETERS: "workers train whole replicas between two agreements; use the layout replicated"
    }

    every: int = knob(8, "H: steps alone between two agreements; more saves bytes, and costs accuracy", low=1)
    momentum: Literal["local", "mean", "reset"] = knob(
        "local", "the optimizer's momentum at an agreement: stays with its worker, is averaged, or starts anew"
    )
    fragments: int = knob(1, "parts of the model that take turns within the H steps", low=1)
    delay: int = knob(0, "steps of training while the differences travel", unit="steps", low=0)
    late: Literal["keep", "mix"] = knob("keep", "what was trained during the delay: kept, or mixed with the anchor")
    mix: float = knob(0.5, "with late='mix': how much of a worker's own weights stays", low=0.0, high=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flying: dict[int, Task[Tensor]] = {}  # bucket -> the mean of its differences, under way
        self._sent: dict[int, Tensor] = {}  # bucket -> this worker's weights when its difference was sent
        for knob_, value in (("fragments", self.fragments), ("delay", self.delay + 1)):
            if value > self.every:
                raise MethodError(
                    f"{self.name}: {knob_}={getattr(self, knob_)} does not fit into every={self.every}",
                    why="each part of the model is sent and has arrived once in every H steps",
                    do=f"choose {knob_} <= {self.every - (knob_ == 'delay')}, or a larger every",
                )

    def due(self, step: int) -> bool:
        return False

    def agrees(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    async def before_step(self, b: Bucket, ex: Exchange) -> None:
        if (b.index, "x") not in self.state:
            self.state[b.index, "x"] = await ex.start(b)

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        now = self._since(b, ex, ex.step + 1)
        if now == 0:
            self._flying[b.index] = Task(self._way(b, ex))
        if now == self.delay and b.index in self._flying:
            await self._arrive(b, ex)

    def _since(self, b: Bucket, ex: Exchange, step: int) -> int:
        """How many steps ago this bucket's turn began, when so many have been made."""
        turn = b.index * self.fragments // len(ex.buckets) * self.every // self.fragments
        return (step + turn) % self.every

    async def _way(self, b: Bucket, ex: Exchange) -> Tensor:
        w = self._sent[b.index] = b.weights(self._sent.get(b.index))
        return await ex.mean(b, self.state[b.index, "x"] - w)

    async def _arrive(self, b: Bucket, ex: Exchange) -> None:
        delta = await self._flying.pop(b.index)
        x = self.state[b.index, "x"] = self.outer(b, self.state[b.index, "x"], delta, ex)
        if self.delay and self.late == "keep":
            b.write(b.weights().add_(x - self._sent[b.index]))
        else:
            b.write(b.weights().lerp_(x, 1.0 - self.mix) if self.delay else x)
        if self.momentum == "mean":
            await _moments.average(b, ex)
        elif self.momentum == "reset":
            _moments.reset(b, ex)

    def recut(self) -> None:
        self._sent.clear()

    def outer(self, b: Bucket, x: Tensor, delta: Tensor, ex: Exchange) -> Tensor:
        """The new anchor: one step of the outer optimizer, with the mean difference as its gradient."""
        return x - delta

    async def centre(self, b: Bucket, ex: Exchange) -> Tensor:
        if (b.index, "x") not in self.state:
            return b.weights()
        x: Tensor = self.state[b.index, "x"]
        if self._since(b, ex, ex.step) or self.delay:
            return x
        # All stand on the anchor, and what they have beside it the user has written since: weights that were clamped.
        return x + await ex.exact(b.weights() - x)

    def settle(self, ex: Exchange) -> None:
        """Wait for the means under way and apply them early, on all workers alike."""
        for b in ex.buckets:
            if b.index in self._flying:
                Task(self._arrive(b, ex)).finish()
