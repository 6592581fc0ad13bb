"""All workers write into the same weights without locks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from paceline.comm import host_memory as sharing
from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.errors import MethodError, UsageError
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class Hogwild(Sync):
    """Lock-free SGD on shared memory: the workers of one host have one set of weights between them.

    Each worker, at its own pace, reads w as it is, computes its gradient g, and does w ← w − η·g in place, without a
    lock. When two workers write an element at the same moment, one update may be lost; with sparse gradients that is
    rare, and Embedding(sparse=True) writes only the rows it used. Each worker has its own momentum and Adam moments.

    The memory is made at the first step, from worker 0's weights; nothing is sent after that.
    """

    name: ClassVar[str] = "hogwild"
    paper: ClassVar[str] = "Niu, Recht, Ré, Wright, Hogwild!, NIPS 2011"
    formula: ClassVar[str] = "0"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.REPLICAS_AGREE})  # there is only one set of weights
    needs: ClassVar[dict[Fact, str]] = {
        Fact.WHOLE_PARAMETERS: "all workers write all weights; use the layout replicated",
        Fact.EXACT_MEAN: "nothing is sent, so there is nothing to compress; leave the reducer out",
    }
    is_async: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._homes: dict[int, list[int]] = {}  # bucket -> the address of each of its parameters

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
        """Make the parameters of all workers views of one memory. All call it together; only the first call acts."""
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
        """Wait until every worker has made its last step, so that all see the same weights."""
        self._share(ex)
        ex.comm.sum(torch.zeros(1)).wait()
