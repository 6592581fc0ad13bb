"""Hundreds of steps alone, and Nesterov's momentum between agreements."""

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
class DiLoCo(LocalSGD):
    """Local SGD whose anchor steps by SGD with Nesterov momentum: v ← μ·v + Δ,  x ← x − η·(Δ + μ·v).

    Δ is the anchor minus the workers' mean weights, so it points where a gradient would. Meant for AdamW as the inner
    optimizer (the paper: H = 500, lr 4e-4, betas 0.9 and 0.95, weight decay 0.1). With fragments and a delay it is
    Streaming DiLoCo (Douillard et al., 2025).
    """

    name: ClassVar[str] = "diloco"
    paper: ClassVar[str] = "Douillard et al., DiLoCo, 2023"

    limit: ClassVar[dict[str, Any]] = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}

    every: int = knob(500, "H: steps alone between two agreements", low=1)
    outer_lr: float = knob(0.7, "η: the outer learning rate", above=0.0)
    outer_momentum: float = knob(0.9, "μ: the outer momentum", low=0.0, high=0.999)

    def outer(self, b: Bucket, x: Tensor, delta: Tensor, ex: Exchange) -> Tensor:
        old = self.state.get((b.index, "v"))
        v = delta.clone() if old is None else torch.add(delta, old, alpha=self.outer_momentum)
        self.state[b.index, "v"] = v
        return x.sub(delta.add(v, alpha=self.outer_momentum), alpha=self.outer_lr)
