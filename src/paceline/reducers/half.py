"""Half the bytes: the mean taken in 16-bit floating point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from paceline.comm.protocol import Comm
from paceline.core.facts import Fact
from paceline.core.parts import Reduced, Reducer
from paceline.knobs import knob
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket

LARGEST = 2.0**15


@register
@dataclass(kw_only=True)
class Half(Reducer):
    """Round to 16 bits, average, widen again.

    fp16 keeps 11 bits of precision up to 65504, bf16 8 bits over fp32's range. Values too large for fp16 are clamped to
    32768 (partial sums are fp16 too, and must fit) rather than turned into infinity; what is cut off is part of the
    leftover, like the rounding error.
    """

    name: ClassVar[str] = "half"
    paper: ClassVar[str] = "Micikevicius et al., Mixed Precision Training, ICLR 2018 (storage); torch's fp16 hook"
    formula: ClassVar[str] = "2·n·2·(W−1)/W"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.ELEMENTWISE, Fact.LEFTOVER, Fact.CLOSE_MEAN})
    tolerance: ClassVar[float] = 2.0**-7  # every partial sum is rounded to bf16

    dtype: Literal["fp16", "bf16"] = knob("fp16", "which 16-bit format travels")

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        narrow = self._narrow(x)
        mean = (await comm.mean(narrow)).to(x.dtype)
        return Reduced(mean, lambda: x - self._narrow(x).to(x.dtype))

    def _narrow(self, x: Tensor) -> Tensor:
        if self.dtype == "bf16":
            return x.to(torch.bfloat16)
        return x.clamp(-LARGEST, LARGEST).to(torch.float16)

    def sends(self, b: Bucket, world_size: int) -> int:
        return 2 * 2 * b.flat.numel() * (world_size - 1) // world_size
