"""What was not sent now is sent later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from paceline.knobs import knob
from paceline.parts import KEEPS, Comm, Reduced, Reducer
from paceline.reducers.topk import TopK
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class ErrorFeedback(Reducer):
    """Send C(g + e); keep e = (g + e) - what this worker really sent.

    e is this worker's own, in true gradient units (a loss scale is taken out before), in fp32 whatever the gradients
    are, and it is staged: a step that does not count leaves it as it was. Biased reducers need it. Unbiased ones must
    not have it: their noise would be fed back and grow.
    """

    name: ClassVar[str] = "error_feedback"
    paper: ClassVar[str] = "Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019"
    formula: ClassVar[str] = "as the reducer inside"
    gives: ClassVar[frozenset[str]] = frozenset({KEEPS})
    refuses: ClassVar[dict[str, str]] = {
        "unbiased": "an unbiased reducer is right on average already; fed back, its noise would grow; use it alone",
        "corrects itself": "it carries its own leftovers already; use it alone",
    }

    of: Reducer = knob(TopK(), "the reducer whose leftovers are kept")

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        e: Tensor | None = self.state.get((b.index, "e"))
        corrected = x.float() + (0.0 if e is None else e)  # always a vector of its own: what is left may be made of it
        reduced = await self.of.mean(b, corrected, comm)
        left = reduced.left()
        if left is not None:
            self.state[b.index, "e"] = left
        return Reduced(reduced.mean.to(x.dtype), lambda: left)

    def sends(self, b: Bucket, world: int) -> int:
        return self.of.sends(b, world)
