"""Each worker averages its weights with a few others instead of with all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.core.pipeline import Task
from paceline.knobs import knob
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange

Graph = Literal["exponential", "full", "ring", "shift_one"]
_NAIVE = (
    "weights travel whole between neighbours, and what is rounded off weights does not fade as what is rounded off "
    "gradients does: naive compression of them needs tracked copies; use the sync gossip_lowbit, or the reducer exact"
)


@register
@dataclass(kw_only=True)
class Gossip(Sync):
    """Every worker steps by its own gradient and averages its weights with its neighbours': wᵢ ← Σⱼ Mᵢⱼ·wⱼ − η·gᵢ.

    M is doubly stochastic in every step and for every number of workers, also odd ones. So the mean of all weights
    steps by the mean gradient, whatever the graph is, and averaging alone brings all weights to their mean.

    exponential: one message a step, from the worker 2ᵏ places back, k counting up; after ⌈log₂ W⌉ steps every worker's
    weights have reached every other. ring: both neighbours. shift_one (BAGUA's): the lower half of the workers in pairs
    with the upper half, shifted by one in each step; an odd number of workers cannot form pairs, so there weights are
    passed around the ring, at all distances in turn. full: all workers, by all-reduce.

    With overlap the weights at the end of a step are sent during the next forward and backward, and the change is added
    before the optimizer steps (D-PSGD, BAGUA): w ← w + (average − w as it was sent). Without overlap the average
    replaces w after the optimizer's step (adapt, then combine), and the step waits for it.
    """

    name: ClassVar[str] = "gossip"
    paper: ClassVar[str] = "Lian et al., D-PSGD, NIPS 2017; Assran et al., ICML 2019 (exponential); Gan et al., BAGUA"
    formula: ClassVar[str] = "n·s; ring 2·n·s (W = 2: n·s); full 2·n·s·(W−1)/W; once in `every` steps"
    acts_before_step: ClassVar[bool] = True
    acts_after_step: ClassVar[bool] = True
    limit: ClassVar[dict[str, Any]] = {"graph": "full", "overlap": False}
    needs: ClassVar[dict[Fact, str]] = {
        Fact.WHOLE_PARAMETERS: "workers average whole replicas; use the layout replicated",
        Fact.EXACT_MEAN: _NAIVE,
    }
    refuses: ClassVar[dict[Fact, str]] = {Fact.LEFTOVER: _NAIVE, Fact.KEEPS_LEFTOVERS: _NAIVE}

    graph: Graph = knob("exponential", "whose weights are averaged: one other's, both neighbours', or everyone's")
    every: int = knob(1, "steps between two averages; more saves bytes, and workers drift further apart", low=1)
    overlap: bool = knob(True, "weights travel during the next forward and backward, and arrive a step later")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sent: dict[int, Tensor] = {}  # bucket -> the weights as they were sent
        self._flying: dict[int, Task[Tensor]] = {}  # bucket -> the average they become part of

    def due(self, step: int) -> bool:
        return False

    def meets(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    async def before_step(self, b: Bucket, ex: Exchange) -> None:
        if b.index in self._flying:
            await self._arrive(b)

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        if (ex.step + 1) % self.every:
            return
        w = self._sent[b.index] = b.weights(self._sent.get(b.index))
        average = Task(mixed(self.graph, ex.step // self.every, w, ex))
        if self.overlap:
            self._flying[b.index] = average
        else:
            b.write(await average)

    async def _arrive(self, b: Bucket) -> None:
        """Add what the average changed; if the weights are still as they were sent, this overwrites them by it."""
        average = await self._flying.pop(b.index)
        b.write(b.weights().add_(average - self._sent[b.index]))

    def recut(self) -> None:
        self._sent.clear()

    def settle(self, ex: Exchange) -> None:
        for b in ex.buckets:
            if b.index in self._flying:
                Task(self._arrive(b)).finish()


async def mixed(graph: Graph, turn: int, w: Tensor, ex: Exchange) -> Tensor:
    """Σⱼ Mᵢⱼ·wⱼ: this worker's average with its neighbours of this turn."""
    comm = ex.comm
    if graph == "full":
        return await comm.mean(w.clone())
    if graph == "shift_one" and ex.world_size % 2 == 0:
        way = [comm.swap(w, *peers(graph, turn, ex.rank, ex.world_size))]
    elif graph == "ring":
        way = [comm.shift(w, by) for by in (1, -1)[: ex.world_size - 1]]  # of two workers each is both neighbours
    else:
        way = [comm.shift(w, distance(graph, turn, ex.world_size))]
    total = w
    for one in way:
        total = total + await one
    return total / (1 + len(way))


def distance(graph: Graph, turn: int, world_size: int) -> int:
    """How many ranks back around the ring the single peer of this turn is."""
    if graph == "exponential":
        return 1 << turn % max(1, (world_size - 1).bit_length())
    return 1 + turn % max(1, world_size - 1)


def peers(graph: Graph, turn: int, rank: int, world_size: int) -> list[int]:
    """The workers whose weights worker `rank` averages with its own, all with equal weight."""
    if graph == "full":
        return [r for r in range(world_size) if r != rank]
    if graph == "ring":
        return sorted({(rank - 1) % world_size, (rank + 1) % world_size} - {rank})
    if graph == "shift_one" and world_size % 2 == 0:
        half = world_size // 2
        return [half + (turn + rank) % half if rank < half else (rank - half - turn) % half]
    return [r for r in [(rank - distance(graph, turn, world_size)) % world_size] if r != rank]


def mixing(graph: Graph, turn: int, world_size: int) -> Tensor:
    """The matrix M of one turn: row i holds the weights of worker i's average."""
    M = torch.zeros(world_size, world_size, dtype=torch.float64)
    for rank in range(world_size):
        those = [rank, *peers(graph, turn, rank, world_size)]
        M[rank, those] = 1 / len(those)
    return M
