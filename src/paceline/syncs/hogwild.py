"""All workers write into the same weights, and nobody asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from paceline import sharing
from paceline.errors import MethodError, UsageError
from paceline.parts import Sync
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.exchange import Exchange


@register
@dataclass(kw_only=True)
class Hogwild(Sync):
    """Lock-free SGD on shared memory: the workers of one host have one set of weights between them.

    Each worker, at its own pace: read w as it is, compute its gradient g, w ← w − η·g in place, without a lock. What
    two workers write at the same moment may lose one of them; where gradients are sparse they rarely meet, and
    Embedding(sparse=True) touches only the rows it used. Momentum and Adam's moments are each worker's own.

    The memory is made at the first step, from worker 0's weights; nothing is sent after that.
    """

    name: ClassVar[str] = "hogwild"
    paper: ClassVar[str] = "Niu, Recht, Ré, Wright, Hogwild!, NIPS 2011"
    formula: ClassVar[str] = "0"
    gives: ClassVar[frozenset[str]] = frozenset({"replicas agree"})  # they are one
    needs: ClassVar[dict[str, str]] = {
        "whole parameters": "all workers write all weights; use the layout replicated",
        "exact mean": "nothing is sent, so there is nothing to compress; leave the reducer out",
    }
    own_pace: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._homes: dict[int, list[int]] = {}  # bucket -> where each of its parameters lies

    def due(self, step: int) -> bool:
        return False

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        self._share(ex)
        for b in ex.buckets:
            for s, home in zip(b.slots, self._homes[b.index], strict=True):
                if s.param.data_ptr() != home:
                    raise UsageError(
                        f"{self.name}: parameter {s.name} has left the shared memory",
                        why="it was given other storage: model.to(...), or param.data = ...",
                        do="convert the model before paceline.prepare; copy new values into it (param.data.copy_)",
                    )
        return step()

    @torch.no_grad()
    def _share(self, ex: Exchange) -> None:
        """Once, all workers together: their parameters become views of one memory."""
        new = [b for b in ex.buckets if b.index not in self._homes]
        if not new:
            return
        if any(b.flat.is_cuda for b in new):
            raise MethodError(
                f"{self.name} cannot share weights on a GPU",
                why="each process has its own, and writes without a lock are for a CPU's memory",
                do="train on the CPU, or use async_average or local_sgd",
            )
        if not sharing.together(ex.comm):
            raise MethodError(
                f"{self.name} needs all workers on one host",
                why="they are on several, or in several network or process namespaces: there is no memory between them",
                do="use async_average, delayed or parameter_server",
            )
        for b in new:
            x = sharing.shared(b.weights().to(b.flat.dtype), ex.comm)
            for s, view in zip(b.slots, b.views(x), strict=True):
                s.param.data = view
            self._homes[b.index] = [s.param.data_ptr() for s in b.slots]

    def settle(self, ex: Exchange) -> None:
        """All have made their last step: what they see now is what all will see."""
        self._share(ex)
        ex.comm.sum(torch.zeros(1)).wait()
