"""Error feedback: what a reducer did not send in this step is added to the gradient of the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Reduced, Reducer
from paceline.knobs import knob
from paceline.reducers._memory import Spares, lend
from paceline.reducers.topk import TopK
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


@register
@dataclass(kw_only=True)
class ErrorFeedback(Reducer):
    """Send C(g + e); keep e = (g + e) - what this worker really sent.

    Each worker has its own e, in true gradient units (a loss scale is taken out before) and in fp32 whatever the type
    of the gradients. It is staged: a step that does not count leaves it unchanged. Biased reducers need error feedback.
    Unbiased ones are refused, unless anyway=True: their noise is fed back and may grow.
    """

    name: ClassVar[str] = "error_feedback"
    paper: ClassVar[str] = "Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019"
    formula: ClassVar[str] = "as the reducer inside"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.KEEPS_LEFTOVERS, Fact.CORRECTS_ITSELF})
    refuses: ClassVar[dict[Fact, str]] = {
        Fact.UNBIASED: "an unbiased reducer is right on average already, and its noise may grow if it is fed back; "
        "use it alone, or say anyway=True",
        Fact.CORRECTS_ITSELF: "it carries its own leftovers already; use it alone",
    }

    of: Reducer = knob(TopK(), "the reducer whose leftovers are kept")
    anyway: bool = knob(False, "feed back the noise of an unbiased reducer as well")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._spares = Spares()
        if self.anyway:
            vars(self)["refuses"] = {fact: why for fact, why in self.refuses.items() if fact != Fact.UNBIASED}

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        e: Tensor | None = self.state.get((b.index, "e"))
        corrected = self._spares.take(self.state, b, "e", x)  # the reducer may turn it into the leftover in place
        if e is None:
            corrected.copy_(x)
        else:
            torch.add(x, e, out=corrected)
        lend(self.of, b, x)
        reduced = await self.of.mean(b, corrected, comm)
        left = reduced.left()
        if left is None and e is not None:
            left = torch.zeros_like(e)  # everything was sent, e with it
        if left is not None:
            left[b.n :] = 0.0  # the padding belongs to no parameter, and is not saved
            self.state[b.index, "e"] = left
        return Reduced(reduced.mean.to(x.dtype), lambda: left)

    def flush(self, b: Bucket) -> Tensor | None:
        return self.state.get((b.index, "e"))

    def recut(self) -> None:
        self._spares.clear()

    def sends(self, b: Bucket, world_size: int) -> int:
        return self.of.sends(b, world_size)
