"""State in the host's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from paceline.offload.copies import CopyStreams
from paceline.offload.vectors import Triple


class InMemory:
    """Vectors that are in memory at all times."""

    def __init__(self, streams: CopyStreams, n: int, dtype: torch.dtype) -> None:
        self.n, self.dtype = n, dtype
        # Pages take no memory before they are written: moments of a bucket that is never stepped cost nothing.
        self._all = Triple(*(streams.host_vector(n, dtype) for _ in Triple._fields))

    def take(self) -> Triple:
        return self._all

    def give(self, *, changed: bool) -> None:
        pass

    def show(self, here: slice) -> Triple:
        return self._all.cut(here)

    @contextlib.contextmanager
    def at_hand(self, *, changed: bool) -> Iterator[Triple]:
        yield self._all
