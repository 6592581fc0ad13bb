"""Local SGD with a second, slow momentum on the averaged changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from paceline.knobs import knob
from paceline.registry import register
from paceline.syncs.local_sgd import LocalSGD

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class SlowMo(LocalSGD):
    """Local SGD with a slow momentum u for the anchor: u ← β·u + Δ/γ,  x ← x − α·γ·u.

    γ is the optimizer's learning rate at that moment, so that u is in units of gradients and stays right when a
    schedule changes the learning rate.
    """

    name: ClassVar[str] = "slowmo"
    paper: ClassVar[str] = "Wang et al., SlowMo, ICLR 2020"

    limit: ClassVar[dict[str, Any]] = {"every": 1, "beta": 0.0}

    every: int = knob(48, "H: steps alone between two agreements", low=1)
    beta: float = knob(0.5, "β: how much of the slow momentum stays", low=0.0, high=0.999)
    alpha: float = knob(1.0, "α: the slow learning rate", above=0.0)

    def outer(self, b: Bucket, x: Tensor, delta: Tensor, ex: Exchange) -> Tensor:
        lr = {p: float(group["lr"]) for group in ex.optimizer.param_groups for p in group["params"]}
        gamma = [lr.get(s.param, 0.0) for s in b.slots]  # zero: another parameter has taken its place
        u = delta.clone()
        torch._foreach_mul_(b.views(u), [1.0 / g if g else 0.0 for g in gamma])
        if (b.index, "u") in self.state:
            u.add_(self.state[b.index, "u"], alpha=self.beta)
        self.state[b.index, "u"] = u
        way = u.clone()
        torch._foreach_mul_(b.views(way), gamma)
        return x.sub(way, alpha=self.alpha)
