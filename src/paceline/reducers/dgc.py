"""The largest entries of a gradient that waits, momentum and all."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.knobs import knob
from paceline.parts import KEEPS, Comm, Part, Reduced
from paceline.reducers.topk import TopK, dense
from paceline.reducers.warmup import Warmup
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class DGC(TopK):
    """u = m·u + g; v = v + u; the largest entries of v travel, and there both v and u start again from zero.

    The momentum m is applied here, before the choice, so that what waits gathers speed as it would have in SGD; the
    optimizer must have none. u is forgotten where v was sent (momentum factor masking): it would push on with a
    direction that is out of date. Vectors, and matrices where all of v would be fewer bytes, send all of it and forget
    no u, which is SGD. Two vectors as large as the gradients are kept on each worker.
    """

    name: ClassVar[str] = "dgc"
    paper: ClassVar[str] = "Lin et al., Deep Gradient Compression, ICLR 2018"
    formula: ClassVar[str] = "(W−1)·8·Σ max(1, ⌈ratio·numel⌉) for matrices, at most 2·4·n·(W−1)/W, as for the rest"
    gives: ClassVar[frozenset[str]] = frozenset({KEEPS, "corrects itself"})
    needs: ClassVar[dict[str, str]] = {
        "optimizer:SGD": "it puts SGD's momentum into what it sends; use torch.optim.SGD with momentum=0, or topk"
    }
    refuses: ClassVar[dict[str, str]] = {
        "optimizer:momentum": "it applies the momentum itself, before it chooses what to send; "
        "set momentum=0 in the optimizer and give dgc's own knob momentum=",
        "differences": "it adds momentum to gradients, and these are differences of weights; use topk",
    }

    ratio: float = knob(0.001, "share of a matrix's entries that travel", above=0.0, high=1.0)
    momentum: float = knob(0.9, "m, the optimizer's momentum, applied here instead", low=0.0, high=1.0)
    nesterov: bool = knob(False, "Nesterov's momentum")
    clip: float = knob(0.0, "largest norm of a tensor's gradient: clip/√W on each worker; 0: any", low=0.0)
    warmup: int = knob(
        400, "how long the ratio falls to its value, in four stages; 0: it does not", unit="steps", low=0
    )

    def recipe(self) -> dict[str, Part]:
        return {"reducer": Warmup(of=self, steps=self.warmup, schedule="ratio") if self.warmup else self}

    def kind(self, name: str, p: Tensor) -> Hashable:
        return p.dim() > 1

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        u, v = self._gathered(b, self._clipped(b, x.float(), comm.world))
        sent = Reduced(await comm.mean(v)) if self._whole(b) else await super().mean(b, v, comm)
        left = sent.left()
        if left is not None:
            u.masked_fill_(left == 0, 0.0)  # v is zero where it was sent
        elif (b.index, "v") in self.state:
            left = torch.zeros_like(v)
        self.state[b.index, "u"] = u
        if left is not None:
            self.state[b.index, "v"] = left
        return Reduced(sent.mean.to(x.dtype), lambda: left)

    def _gathered(self, b: Bucket, g: Tensor) -> tuple[Tensor, Tensor]:
        """The new u and v, both vectors of their own."""
        u, v = self.state.get((b.index, "u")), self.state.get((b.index, "v"))
        if self.nesterov:
            u = (g if u is None else u + g) * self.momentum
            return u, u + g if v is None else v + u + g
        u = g.clone() if u is None else torch.add(g, u, alpha=self.momentum)
        return u, u.clone() if v is None else v + u

    def _clipped(self, b: Bucket, g: Tensor, world: int) -> Tensor:
        """Tensor by tensor, in place: W independent gradients of norm clip/√W add up to one of norm clip."""
        for s in b.slots if self.clip else ():
            part = g[s.start : s.stop]
            norm = torch.linalg.vector_norm(part, dtype=torch.float64)  # squares of large values do not fit fp32
            part.mul_((self.clip / world**0.5 / norm).clamp(max=1.0).float())
        return g

    def _whole(self, b: Bucket) -> bool:
        return self.ratio == 1.0 or b.slots[0].param.dim() < 2

    def sends(self, b: Bucket, world: int) -> int:
        return dense(b, world) if self._whole(b) else super().sends(b, world)
