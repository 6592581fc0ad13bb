"""A round ends at a deadline; each worker steps by what it has finished, and averages its weights with neighbours'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.core.facts import Fact
from paceline.knobs import knob
from paceline.registry import register
from paceline.syncs.any_batch import ONE_MICRO_BATCH, AnyBatch
from paceline.syncs.gossip import Gossip, Graph, mixed

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class AnyBatchGossip(AnyBatch):
    """DABMD: rounds as under any_batch; worker i makes a mirror step of its own, and r averages with neighbours follow.

    gᵢ = (W / Σⱼ bⱼ)·Σ_s ∇f(xᵢ, s) over its own bᵢ samples, none of them perhaps; yᵢ = argmin ⟨gᵢ, y⟩ + D_ψ(y, xᵢ)/η;
    xᵢ ← Σⱼ Mᵢⱼ·yⱼ, r times, with the doubly stochastic M of gossip's graphs. r = 1 is the paper's first version, more
    its second. The mean of all weights steps by the mean over all samples of the round, as Anytime Minibatch weighs
    them: a worker's gradient counts bᵢ, not one.
    """

    name: ClassVar[str] = "any_batch_gossip"
    paper: ClassVar[str] = "Eshraghi & Liang, Distributed Any-Batch Mirror Descent (DABMD), ICML 2020"
    formula: ClassVar[str] = "r times n·s (ring 2·n·s, W = 2: n·s; full 2·n·s·(W−1)/W), and 32·(W−1), once a round"
    gives: ClassVar[frozenset[Fact]] = frozenset()
    needs: ClassVar[dict[Fact, str]] = Gossip.needs
    refuses: ClassVar[dict[Fact, str]] = Gossip.refuses
    acts_after_step: ClassVar[bool] = True
    limit: ClassVar[dict[str, Any]] = {"graph": "full", "deadline_ms": ONE_MICRO_BATCH}

    graph: Graph = knob("exponential", "whose weights are averaged: one other's, both neighbours', or everyone's")
    rounds: int = knob(1, "r: averages with neighbours after a step; more brings workers closer together", low=1)

    def due(self, step: int) -> bool:
        return False

    def meets(self, step: int) -> bool:
        return True

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        w = b.weights()
        for k in range(self.rounds):
            w = await mixed(self.graph, ex.step * self.rounds + k, w, ex)
        b.write(w)
