"""Gossip in eight bits: neighbours keep copies of each other, and only what has changed travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.kernels import add_bytes, encode_bytes
from paceline.knobs import knob
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange

_OWN = "it has its own quantiser, whose rounding the copies make up for, and asks no reducer; use the reducer exact"


@register
@dataclass(kw_only=True)
class GossipLowbit(Sync):
    """A ring in which every worker keeps copies ŵ of its own and both neighbours' weights, and sends only Q(z), the
    quantized correction of its own copy. Every holder of that copy adds the same bytes to it, so the copies of one
    worker are bitwise equal everywhere.

    After the optimizer's step from w to x, with m = 1/3 (two workers: one neighbour, m = 1/2):

    bagua (DCD-PSGD): z = x − ŵ + m·Σⱼ(ŵⱼ − ŵ), which on three or more is BAGUA's x + L/3 + R/3 − 5/3·ŵ;
    all copies ŵ ← ŵ + Q(z), and w ← ŵ: a worker trains on the weights that its neighbours have of it.

    choco (CHOCO-SGD): z = x − ŵ; ŵ ← ŵ + Q(z); w ← x + γ·m·Σⱼ(ŵⱼ − ŵ): x is not rounded, and what Q(z) lacks is part
    of the next z.

    Q: a byte for each element, 256 levels from the smallest to the largest of z, as in the reducer int8. Before the
    first step, and when the number of workers has changed, neighbours send each other their whole weights.
    """

    name: ClassVar[str] = "gossip_lowbit"
    paper: ClassVar[str] = "Gan et al., BAGUA; Tang et al., DCD-PSGD, NIPS 2018; Koloskova et al., CHOCO-SGD, ICML 2019"
    formula: ClassVar[str] = "2·(n + 8) (W = 2: n + 8), once in `every` steps"
    acts_before_step: ClassVar[bool] = True
    acts_after_step: ClassVar[bool] = True
    needs: ClassVar[dict[Fact, str]] = {
        Fact.WHOLE_PARAMETERS: "workers average whole replicas; use the layout replicated",
        Fact.EXACT_MEAN: _OWN,
    }
    refuses: ClassVar[dict[Fact, str]] = {Fact.LEFTOVER: _OWN, Fact.KEEPS_LEFTOVERS: _OWN}

    rule: Literal["bagua", "choco"] = knob("bagua", "train on the copy that others have of one, or on own weights")
    gamma: float = knob(0.5, "γ of choco: how far towards the neighbours; too far, and rounding grows", above=0, high=1)
    every: int = knob(1, "steps between two exchanges; more saves bytes, and workers drift further apart", low=1)

    def due(self, step: int) -> bool:
        return False

    def meets(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    async def before_step(self, b: Bucket, ex: Exchange) -> None:
        if self.state.get("world_size") != ex.world_size:
            self.state.clear()  # the copies are of other neighbours
            self.state["world_size"] = ex.world_size
        if (b.index, "own") not in self.state:
            w = self.state[b.index, "own"] = b.weights()
            for who, copy in zip(_near(ex), await _hear(w, ex), strict=True):
                self.state[b.index, who] = copy

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        if (ex.step + 1) % self.every or ex.world_size == 1:
            return
        x = b.weights()
        z = x - self.state[b.index, "own"]
        if self.rule == "bagua":
            z += self._pull(b, ex)
        said = encode_bytes(z[None])[0]
        heard = await _hear(said, ex)
        for who, coded in zip(("own", *_near(ex)), (said, *heard), strict=True):
            copy = add_bytes(self.state[b.index, who].clone(), coded[None], factor=1.0, keep=True)
            copy[b.n :] = 0.0  # zero may not be among the levels, and the padding is not saved
            self.state[b.index, who] = copy
        b.write(self.state[b.index, "own"] if self.rule == "bagua" else x.add_(self._pull(b, ex), alpha=self.gamma))

    def _pull(self, b: Bucket, ex: Exchange) -> Tensor:
        """The difference m·Σⱼ(ŵⱼ − ŵ) between the average of all copies and this worker's own copy."""
        own, near = self.state[b.index, "own"], [self.state[b.index, who] for who in _near(ex)]
        pull: Tensor = sum(near) / (1 + len(near)) - own * (len(near) / (1 + len(near)))
        return pull


def _near(ex: Exchange) -> tuple[str, ...]:
    return ("left", "right")[: ex.world_size - 1]  # of two workers each is both neighbours of the other


async def _hear(x: Tensor, ex: Exchange) -> list[Tensor]:
    """The left neighbour's x and the right one's. Both transfers start before either is waited for."""
    way = [ex.comm.shift(x, by) for by in (1, -1)[: ex.world_size - 1]]
    return [await one for one in way]
