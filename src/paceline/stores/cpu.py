"""State in the host's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from paceline.stores.lanes import Lanes
from paceline.stores.vectors import Triple


class InMemory:
    """Vectors that are always at hand."""

    def __init__(self, lanes: Lanes, n: int, dtype: torch.dtype) -> None:
        self.n, self.dtype = n, dtype
        self._all = Triple(*(lanes.vector(n, dtype) for _ in Triple._fields))  # pages nobody writes cost nothing

    def take(self) -> Triple:
        return self._all

    def give(self, *, changed: bool) -> None:
        pass

    def show(self, here: slice) -> Triple:
        return self._all.cut(here)

    @contextlib.contextmanager
    def at_hand(self, *, changed: bool) -> Iterator[Triple]:
        yield self._all
