"""Vectors that are reused in every step: for means, and for what is remembered.

On a CPU, fresh memory from the system costs more than a dozen passes over it. A GPU's allocator keeps freed memory, so
there each vector is allocated when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.parts import Reducer
from paceline.core.state import State

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket


def scratch(reducer: Reducer, b: Bucket, like: Tensor) -> Tensor:
    """This reducer's scratch vector for this bucket, uninitialised."""
    if like.is_cuda:
        return torch.empty_like(like)
    known, key = vectors(reducer), (b.index, like.dtype)
    if key not in known or known[key].shape != like.shape:
        known[key] = torch.empty_like(like)
    return known[key]


def lend(reducer: Reducer, b: Bucket, x: Tensor) -> None:
    """Use x as this bucket's scratch vector from now on, so that the mean is written where the gradients were.

    The caller must not need the content of x any more.
    """
    if not x.is_cuda:
        vectors(reducer)[b.index, x.dtype] = x


def vectors(reducer: Reducer) -> dict[Any, Tensor]:
    """All scratch vectors of a reducer, shared with every copy of it that is made after this call."""
    known: dict[Any, Tensor] = vars(reducer).setdefault("_scratch", {})
    return known


class Spares:
    """Vectors to make the next values of a part's state in: those of the step before last, if they are free by now."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], Tensor | None] = {}  # the value of the step before

    def take(self, state: State, b: Bucket, slot: str, like: Tensor) -> Tensor:
        """An fp32 vector for the new value of state[b.index, slot], uninitialised."""
        key = b.index, slot
        last: Tensor | None = state.get(key)
        spare = self._before.get(key)
        self._before[key] = None if like.is_cuda else last
        if spare is None or spare is last or spare is state.real.get(key) or spare.shape != like.shape:
            return torch.empty_like(like, dtype=torch.float32)
        return spare

    def clear(self) -> None:
        """Forget all of them, because buckets are going to be cut anew."""
        self._before.clear()
