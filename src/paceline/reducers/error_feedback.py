"""What was not sent now is sent later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from paceline.knobs import knob
from paceline.parts import KEEPS, Comm, Reduced, Reducer
from paceline.reducers._memory import lend
from paceline.reducers.topk import TopK
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket


@register
@dataclass(kw_only=True)
class ErrorFeedback(Reducer):
    """Send C(g + e); keep e = (g + e) - what this worker really sent.

    e is this worker's own, in true gradient units (a loss scale is taken out before), in fp32 whatever the gradients
    are, and it is staged: a step that does not count leaves it as it was. Biased reducers need it. Unbiased ones should
    not have it, unless asked: their noise is fed back and may grow.
    """

    name: ClassVar[str] = "error_feedback"
    paper: ClassVar[str] = "Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019"
    formula: ClassVar[str] = "as the reducer inside"
    gives: ClassVar[frozenset[str]] = frozenset({KEEPS, "corrects itself"})
    refuses: ClassVar[dict[str, str]] = {
        "unbiased": "an unbiased reducer is right on average already; fed back, its noise may grow; use it alone, or "
        "say anyway=True",
        "corrects itself": "it carries its own leftovers already; use it alone",
    }

    of: Reducer = knob(TopK(), "the reducer whose leftovers are kept")
    anyway: bool = knob(False, "feed back the noise of an unbiased reducer as well")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._before: dict[int, Tensor | None] = {}  # bucket -> the e before this one
        if self.anyway:
            vars(self)["refuses"] = {fact: why for fact, why in self.refuses.items() if fact != "unbiased"}

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        e: Tensor | None = self.state.get((b.index, "e"))
        corrected = self._spare(b, x, e)  # what is left may be made of it
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
            left[b.n :] = 0.0  # what is behind the gradients is nobody's, and is not saved
            self.state[b.index, "e"] = left
        return Reduced(reduced.mean.to(x.dtype), lambda: left)

    def _spare(self, b: Bucket, x: Tensor, e: Tensor | None) -> Tensor:
        """A vector to work in: the e before this one, if the commit has let it go. See _memory.py for why."""
        spare, self._before[b.index] = self._before.get(b.index), None if x.is_cuda else e
        if spare is None or spare is e or spare is self.state.real.get((b.index, "e")) or spare.shape != x.shape:
            return torch.empty_like(x, dtype=torch.float32)
        return spare

    def sends(self, b: Bucket, world: int) -> int:
        return self.of.sends(b, world)
