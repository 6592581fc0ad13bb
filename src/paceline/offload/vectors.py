"""What the state of an offloaded bucket consists of, wherever it lies."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Triple(NamedTuple):
    """The master of the parameters and Adam's two moments."""

    p: Tensor
    m: Tensor
    v: Tensor

    def cut(self, here: slice) -> Triple:
        """Give a stretch of each."""
        return Triple(*(x[here] for x in self))


class Vectors(Protocol):
    """The three vectors of one bucket. A thread that works on them takes them, and gives them back."""

    n: int
    dtype: torch.dtype

    def take(self) -> Triple:
        """Have the vectors in memory until they are given back. One thread at a time may have them."""

    def give(self, *, changed: bool) -> None:
        """Give the vectors back. changed: they were written into."""

    def show(self, here: slice) -> Triple:
        """Give a stretch of the vectors as tensors that stay the same objects, as keys of an optimizer's state must.

        They have elements only inside `at_hand`.
        """

    def at_hand(self, *, changed: bool) -> AbstractContextManager[Triple]:
        """Have the vectors in memory inside the context. changed: they are written into."""
