"""The optimizer's moments of a bucket's parameters: averaged over the workers, or reset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


async def average(b: Bucket, ex: Exchange) -> None:
    """Average the moments exactly, without the reducer: an error in a moment could not be corrected later."""
    known = ex.optimizer.state
    names = {name for state in known.values() for name, x in state.items() if _is_moment(x)}
    for name in sorted(names):  # the same on every worker; a parameter without this moment counts as zero
        flat = torch.zeros_like(b.flat)
        pairs = [
            (known[s.param][name], view)
            for s, view in zip(b.slots, b.views(flat), strict=True)
            if _is_moment(known.get(s.param, {}).get(name))
        ]
        here, there = [x for x, _ in pairs], [view for _, view in pairs]
        if pairs:
            torch._foreach_copy_(there, here)
        await ex.exact(flat)
        if pairs:
            torch._foreach_copy_(here, there)


def reset(b: Bucket, ex: Exchange) -> None:
    """Set all moments of the bucket's parameters to zero."""
    moments = [x for s in b.slots for x in ex.optimizer.state.get(s.param, {}).values() if _is_moment(x)]
    if moments:
        torch._foreach_zero_(moments)


def _is_moment(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.is_floating_point()
