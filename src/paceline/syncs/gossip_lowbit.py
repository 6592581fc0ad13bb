"""Gossip in eight bits: neighbours keep copies of each other, and only what has changed travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from paceline.kernels import add_bytes, encode_bytes
from paceline.knobs import knob
from paceline.parts import KEEPS, Sync
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange

_OWN = "it has its own quantiser, whose rounding the copies make up for, and asks no reducer; use the reducer exact"


@register
@dataclass(kw_only=True)
class GossipLowbit(Sync):
    """A ring in which every worker keeps a copy ŵ of itself and of both neighbours, and sends Q of how its own falls
    short. All who hold a copy add the same bytes to it: copies of one worker are bitwise equal wherever they are.

    After the optimizer's step from w to x, with m = 1/3 (two workers: one neighbour, m = 1/2):

    bagua (DCD-PSGD): z = x − ŵ + m·Σⱼ(ŵⱼ − ŵ), which on three or more is BAGUA's x + L/3 + R/3 − 5/3·ŵ;
    all copies ŵ ← ŵ + Q(z), and w ← ŵ: what is trained on is what the neighbours know.

    choco (CHOCO-SGD): z = x − ŵ; ŵ ← ŵ + Q(z); w ← x + γ·m·Σⱼ(ŵⱼ − ŵ): nothing of x is rounded, and what was not
    said of it stays in the next z.

    Q: a byte for each element, 256 levels from the smallest to the largest of z, as in the reducer int8. Before the
    first step, and in a ring of another size, neighbours give each other their weights whole.
    """

    name: ClassVar[str] = "gossip_lowbit"
    paper: ClassVar[str] = "Gan et al., BAGUA; Tang et al., DCD-PSGD, NIPS 2018; Koloskova et al., CHOCO-SGD, ICML 2019"
    formula: ClassVar[str] = "2·(n + 8) (W = 2: n + 8), once in `every` steps"
    needs: ClassVar[dict[str, str]] = {
        "whole parameters": "workers average whole replicas; use the layout replicated",
        "exact mean": _OWN,
    }
    refuses: ClassVar[dict[str, str]] = {"leftover": _OWN, KEEPS: _OWN}

    rule: Literal["bagua", "choco"] = knob("bagua", "train on the copy that others have of one, or on own weights")
    gamma: float = knob(0.5, "γ of choco: how far towards the neighbours; too far, and rounding grows", above=0, high=1)
    every: int = knob(1, "steps between two exchanges; more saves bytes, and workers drift further apart", low=1)

    def due(self, step: int) -> bool:
        return False

    async def before_step(self, b: Bucket, ex: Exchange) -> None:
        if self.state.get("world") != ex.world:
            self.state.clear()  # copies of other neighbours
            self.state["world"] = ex.world
        if (b.index, "own") not in self.state:
            w = self.state[b.index, "own"] = b.weights()
            for who, copy in zip(_near(ex), await _hear(w, ex), strict=True):
                self.state[b.index, who] = copy

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        if (ex.step + 1) % self.every or ex.world == 1:
            return
        x = b.weights()
        z = x - self.state[b.index, "own"]
        if self.rule == "bagua":
            z += self._pull(b, ex)
        said = encode_bytes(z[None])[0]
        heard = await _hear(said, ex)
        for who, coded in zip(("own", *_near(ex)), (said, *heard), strict=True):
            copy = add_bytes(self.state[b.index, who].clone(), coded[None], factor=1.0, keep=True)
            copy[b.n :] = 0.0  # the levels need not have a zero; what is behind the weights is not saved
            self.state[b.index, who] = copy
        b.write(self.state[b.index, "own"] if self.rule == "bagua" else x.add_(self._pull(b, ex), alpha=self.gamma))

    def _pull(self, b: Bucket, ex: Exchange) -> Tensor:
        """m·Σⱼ(ŵⱼ − ŵ): from this worker's copy to the average of all it has."""
        own, near = self.state[b.index, "own"], [self.state[b.index, who] for who in _near(ex)]
        pull: Tensor = sum(near) / (1 + len(near)) - own * (len(near) / (1 + len(near)))
        return pull


def _near(ex: Exchange) -> tuple[str, ...]:
    return ("left", "right")[: ex.world - 1]  # of two workers each is both neighbours of the other


async def _hear(x: Tensor, ex: Exchange) -> list[Tensor]:
    """The left neighbour's x and the right one's. Both are on their way before either is waited for."""
    way = [ex.comm.shift(x, by) for by in (1, -1)[: ex.world - 1]]
    return [await one for one in way]
