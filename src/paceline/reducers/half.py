"""Half the bytes: the mean taken in 16-bit floating point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from paceline.knobs import knob
from paceline.parts import Comm, Reduced, Reducer
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket

LARGEST = 2.0**15


@register
@dataclass(kw_only=True)
class Half(Reducer):
    """Round to 16 bits, average, widen again.

    fp16 keeps 11 bits of precision up to 65504, bf16 8 bits over fp32's range. What is too large for fp16 is cut at
    32768 (a sum is rounded on its way, and must fit too) rather than turned into infinity, and is part of the
    leftover like the rounding.
    """

    name: ClassVar[str] = "half"
    paper: ClassVar[str] = "Micikevicius et al., Mixed Precision Training, ICLR 2018 (storage); torch's fp16 hook"
    formula: ClassVar[str] = "2·n·2·(W−1)/W"
    gives: ClassVar[frozenset[str]] = frozenset({"elementwise", "leftover"})
    tolerance: ClassVar[float] = 2.0**-7  # bf16 sums are rounded as they go

    dtype: Literal["fp16", "bf16"] = knob("fp16", "which 16-bit format travels")

    async def mean(self, b: Bucket, x: Tensor, comm: Comm) -> Reduced:
        narrow = self._narrow(x)
        mean = (await comm.mean(narrow)).to(x.dtype)
        return Reduced(mean, lambda: x - self._narrow(x).to(x.dtype))

    def _narrow(self, x: Tensor) -> Tensor:
        if self.dtype == "bf16":
            return x.to(torch.bfloat16)
        return x.clamp(-LARGEST, LARGEST).to(torch.float16)

    def sends(self, b: Bucket, world: int) -> int:
        return 2 * 2 * b.flat.numel() * (world - 1) // world
