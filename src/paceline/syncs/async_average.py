"""Workers step at their own pace while an average of all weights travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from paceline.comm.protocol import Handle
from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.knobs import knob
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange

_WHOLE = "the average of weights travels whole: nothing makes up later for what is rounded off; use the reducer exact"


class BucketRound(NamedTuple):
    """A bucket's part of a round: its weights when the round began, and their average over the workers to come."""

    b: Bucket
    snapshot: Tensor
    average: Handle


@register
@dataclass(kw_only=True)
class AsyncAverage(Sync):
    """Workers step alone, each as fast as it can; beside that, rounds of averaging run one after the other.

    In a round every worker sends a snapshot s of its weights w, when it comes to it, and goes on training. Between two
    later steps it finds that the average has arrived: w ← w + (mean(s) − s). The differences added sum up to zero over
    the workers, so no step that anyone made meanwhile is lost, or counted twice. Nothing touches the weights but the
    thread that trains, between its steps.

    A worker begins its part of the next round `every` own steps after the last at the earliest, and waits for a round
    once it has made `age` steps since its snapshot: the fast are that much ahead of the slow in a round, not more.

    To stop is agreed on in the rounds themselves: each carries, beside the weights, how many workers want to. One that
    does keeps taking part, without training, until a round says that all do. All see it in the same round, whoever came
    first, and all take its average: there they agree, bit for bit.
    """

    name: ClassVar[str] = "async_average"
    paper: ClassVar[str] = "Gan et al., BAGUA (asynchronous model average), VLDB 2021"
    formula: ClassVar[str] = "2·n·s·(W−1)/W, once in `every` steps at most"
    acts_after_step: ClassVar[bool] = True
    is_async: ClassVar[bool] = True
    background: ClassVar[bool] = True
    limit: ClassVar[dict[str, Any]] = {"warmup": 1 << 30}
    needs: ClassVar[dict[Fact, str]] = {
        Fact.WHOLE_PARAMETERS: "workers train whole replicas; use the layout replicated",
        Fact.EXACT_MEAN: _WHOLE,
    }
    refuses: ClassVar[dict[Fact, str]] = {Fact.LEFTOVER: _WHOLE, Fact.KEEPS_LEFTOVERS: _WHOLE}

    every: int = knob(8, "own steps from one snapshot to the next, at least", unit="steps", low=1)
    age: int = knob(32, "own steps since the snapshot after which a worker waits for the round", unit="steps", low=1)
    warmup: int = knob(0, "steps at first in which all gradients are agreed on", unit="steps", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._round: list[BucketRound] = []  # under way
        self._since = 0  # own steps since this worker's last snapshot
        self._landed: list[tuple[Bucket, Tensor]] = []  # the average of the last round

    def due(self, step: int) -> bool:
        return step < self.warmup

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        await ex.keep(b)

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        if b.index or self.due(ex.step):  # once a step, for all buckets
            return
        self._since += 1
        if self._round and (self._since >= self.age or self.arrived([f.average for f in self._round], self._since)):
            ex.recorder.log({"average_age": self._since})
            self._land(ex)
        if not self._round and self._since >= self.every:
            self._begin(ex, stop=False)

    def arrived(self, averages: Sequence[Handle], age: int) -> bool:
        """Is the round through? The only thing here that the clock decides."""
        return all(one.done() for one in averages)

    def _begin(self, ex: Exchange, *, stop: bool) -> None:
        for b in ex.buckets:
            ex.about(b)
            s = b.weights()
            x = s.clone()
            x[b.n] = float(stop)  # the first element behind the weights
            self._round.append(BucketRound(b, s, ex.background.mean(x)))
        self._since = 0

    def _land(self, ex: Exchange) -> bool:
        """Wait for the round and take what it brings; was it the one in which all want to stop?"""
        averages = [f.average.wait() for f in self._round]
        stop = float(averages[0][self._round[0].b.n]) > 1 - 0.5 / ex.world_size  # a mean of ones may be rounded
        for f, x in zip(self._round, averages, strict=True):
            f.b.write(x if stop else f.b.weights().add_(x - f.snapshot))
        self._landed = [] if stop else [(f.b, x) for f, x in zip(self._round, averages, strict=True)]
        self._round.clear()
        return stop

    async def centre(self, b: Bucket, ex: Exchange) -> Tensor:
        return b.weights()  # settled: all have the same

    def latest(self, b: Bucket) -> Tensor | None:
        return next((x for one, x in self._landed if one is b), None)

    def settle(self, ex: Exchange) -> None:
        """Stop, at the same round on all workers. Training may go on after it."""
        if ex.world_size == 1 or not ex.buckets:
            return
        stopped = False
        while not stopped:
            if not self._round:
                self._begin(ex, stop=True)
            stopped = self._land(ex)
        self._since = 0
