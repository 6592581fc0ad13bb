"""What the optimizer remembers of a bucket's parameters: averaged over the workers, or forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange


async def average(b: Bucket, ex: Exchange) -> None:
    """Exactly: there is nothing to correct a moment by later."""
    known = ex.optimizer.state
    names = {name for state in known.values() for name, x in state.items() if _is_moment(x)}
    for name in sorted(names):  # the same on every worker, though some may lack one: it counts as zero there
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
    moments = [x for s in b.slots for x in ex.optimizer.state.get(s.param, {}).values() if _is_moment(x)]
    if moments:
        torch._foreach_zero_(moments)


def _is_moment(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.is_floating_point()
