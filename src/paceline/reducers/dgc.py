"""The largest entries of the accumulated gradient are sent, with the momentum applied before the choice."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Part, Reduced
from paceline.knobs import knob
from paceline.reducers.topk import TopK, dense
from paceline.reducers.warmup import Warmup
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@register
@dataclass(kw_only=True)
class DGC(TopK):
    """Top-k with momentum: u = m·u + g; v = v + u; the largest entries of v are sent, and there v and u become zero.

    The momentum m is applied here, before the choice, so that entries not yet sent build up momentum as they would in
    SGD; the optimizer must have none. u is set to zero where v was sent (momentum factor masking): it would push on in
    an outdated direction. Vectors, and matrices where sending all of v takes fewer bytes, send all of v and keep u,
    which is SGD. Each worker keeps two vectors as large as the gradients.
    """

    name: ClassVar[str] = "dgc"
    paper: ClassVar[str] = "Lin et al., Deep Gradient Compression, ICLR 2018"
    formula: ClassVar[str] = "(W−1)·8·Σ max(1, ⌈ratio·numel⌉) for matrices, at most 2·4·n·(W−1)/W, as for the rest"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.KEEPS_LEFTOVERS, Fact.CORRECTS_ITSELF})
    needs: ClassVar[dict[Fact, str]] = {
        Fact.SGD: "it puts SGD's momentum into what it sends; use torch.optim.SGD with momentum=0, or topk"
    }
    refuses: ClassVar[dict[Fact, str]] = {
        Fact.MOMENTUM: "it applies the momentum itself, before it chooses what to send; "
        "set momentum=0 in the optimizer and give dgc's own knob momentum=",
        Fact.DIFFERENCES: "it adds momentum to gradients, and these are differences of weights; use topk",
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
        u, v = self._gathered(b, self._clipped(b, x.float(), comm.world_size))
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
        """The new u and v, in memory that they share with no other vector."""
        u, v = self.state.get((b.index, "u")), self.state.get((b.index, "v"))
        if self.nesterov:
            u = (g if u is None else u + g) * self.momentum
            return u, u + g if v is None else v + u + g
        u = g.clone() if u is None else torch.add(g, u, alpha=self.momentum)
        return u, u.clone() if v is None else v + u

    def _clipped(self, b: Bucket, g: Tensor, world_size: int) -> Tensor:
        """Clip each tensor of g in place to norm clip/√W: W independent gradients of that norm add up to norm clip."""
        for s in b.slots if self.clip else ():
            part = g[s.start : s.stop]
            norm = torch.linalg.vector_norm(part, dtype=torch.float64)  # squares of large values overflow fp32
            part.mul_((self.clip / world_size**0.5 / norm).clamp(max=1.0).float())
        return g

    def _whole(self, b: Bucket) -> bool:
        """Whether all entries of this bucket are sent: vectors, and everything at ratio 1."""
        return self.ratio == 1.0 or b.slots[0].param.dim() < 2

    def flush(self, b: Bucket) -> Tensor | None:
        return self.state.get((b.index, "v"))

    def sends(self, b: Bucket, world_size: int) -> int:
        return dense(b, world_size) if self._whole(b) else super().sends(b, world_size)
