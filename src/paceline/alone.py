"""A Comm for a world of one."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from paceline.comm import Op


class Here(Op):
    """What is there already: nobody is kept waiting, and the coroutine goes on."""

    def __await__(self) -> Generator[Op, None, Tensor]:
        return self.wait()
        yield self


class Alone:
    """A world of one: everything is already agreed."""

    rank, world, sent = 0, 1, 0

    def mean(self, x: Tensor) -> Here:
        return Here(lambda: x)

    sum = scatter_mean = alltoall = mean

    def gather(self, x: Tensor) -> Here:
        return Here(lambda: x[None])

    def swap(self, x: Tensor, peer: int) -> Here:
        return Here(lambda: x)

    def broadcast(self, x: Tensor, root: int = 0) -> Here:
        return Here(lambda: x)

    def shift(self, x: Tensor, by: int) -> Here:
        return Here(lambda: x)

    def agree(self, what: str, text: str) -> None:
        pass
