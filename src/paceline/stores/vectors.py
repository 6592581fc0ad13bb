"""What the state of a bucket that is away consists of, wherever it lies."""

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
        return Triple(*(x[here] for x in self))


class Vectors(Protocol):
    """The three vectors of one bucket. Who works on them takes them and gives them back, from whatever thread."""

    n: int
    dtype: torch.dtype

    def take(self) -> Triple:
        """At hand, for one at a time, until they are given back."""

    def give(self, *, changed: bool) -> None: ...

    def show(self, here: slice) -> Triple:
        """A stretch of them, as tensors that stay the same objects: the optimizer's state is keyed by such. Inside
        `at_hand` they have elements.
        """

    def at_hand(self, *, changed: bool) -> AbstractContextManager[Triple]: ...
