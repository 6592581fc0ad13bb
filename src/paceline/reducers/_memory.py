"""Vectors to put a mean into, the same ones in every step.

Memory fresh from the system costs a CPU more than a dozen passes over it. A GPU's allocator keeps what was freed: there
each is made when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.parts import Reducer

if TYPE_CHECKING:
    from paceline.bucket import Bucket


def scratch(reducer: Reducer, b: Bucket, like: Tensor) -> Tensor:
    """This reducer's vector for this bucket, with whatever is in it."""
    if like.is_cuda:
        return torch.empty_like(like)
    known, key = vectors(reducer), (b.index, like.dtype)
    if key not in known or known[key].shape != like.shape:
        known[key] = torch.empty_like(like)
    return known[key]


def lend(reducer: Reducer, b: Bucket, x: Tensor) -> None:
    """From now on it is x, which its owner does not need any more: the mean is then made where the gradients were."""
    if not x.is_cuda:
        vectors(reducer)[b.index, x.dtype] = x


def vectors(reducer: Reducer) -> dict[Any, Tensor]:
    """All of them; a copy of the reducer that is made from now on has the same."""
    known: dict[Any, Tensor] = vars(reducer).setdefault("_scratch", {})
    return known
