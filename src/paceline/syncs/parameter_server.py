"""The weights live with servers: push a gradient, pull the weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.ballot import finite
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.parts import Sync
from paceline.registry import register
from paceline.serving.client import Client
from paceline.serving.server import OPTIMIZERS
from paceline.telemetry import Note

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange

_ELEMENTWISE = f"servers step ranges of the weights by {', '.join(OPTIMIZERS)}"
_OTHERS = [cls.__name__ for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, Optimizer)]


@register
@dataclass(kw_only=True)
class ParameterServer(Sync):
    """Server s holds range s of all weights w and the optimizer's state. Worker i at clock c: push gᵢ, pull w.

    sequential: the server waits for everybody's gᵢ of clock c and makes one step by their mean: as every_step.
    bounded: each push is a step of its own, with 1/W of the learning rate, at once; who is more than τ clocks ahead
    of the slowest waits, so what is read has every update older than c − τ (stale synchronous parallel, Ho et al.,
    2013). eventual: nobody ever waits.

    A server is a process, started by a worker and gone with it. The optimizer's own step is not made at the worker: its
    options (learning rate, ...) travel with the push. A gradient that is not finite is not pushed; the clock goes on.
    """

    name: ClassVar[str] = "parameter_server"
    paper: ClassVar[str] = "Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014"
    formula: ClassVar[str] = "n·s to the servers, and as much back"
    needs: ClassVar[dict[str, str]] = {
        "whole parameters": "a worker reads all weights; use the layout replicated",
        "exact mean": "gradients go to the servers whole; leave the reducer exact",
    }
    refuses: ClassVar[dict[str, str]] = {
        f"optimizer:{name}": f"not {name}: {_ELEMENTWISE}" for name in _OTHERS if name not in OPTIMIZERS
    }
    own_pace: ClassVar[bool] = True
    limit: ClassVar[dict[str, Any]] = {"consistency": "sequential"}

    servers: int = knob(1, "processes that share the weights; server s runs beside worker s mod W", low=1, high=1024)
    consistency: Literal["sequential", "bounded", "eventual"] = knob(
        "sequential", "whom a worker waits for: everybody in every step, those more than `delay` behind, nobody"
    )
    delay: int = knob(4, "τ, of bounded: how far the fastest may be ahead of the slowest", unit="steps", low=0)
    scale: Literal["none", "age"] = knob(
        "none", "age: a push whose worker missed k rounds of updates since it read counts 1/(1+k)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._client: Client | None = None
        self._missed: Counter[int] = Counter()  # so many updates by others: how often

    def due(self, step: int) -> bool:
        return False

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        if not finite(p for group in ex.optimizer.param_groups for p in group["params"]):
            result = _hidden(step, ex.optimizer)
            self._open(ex).pass_over()
            self._pull(ex)
            return result
        vars(ex.optimizer)["_opt_called"] = True  # as an LR scheduler's mark on `step` would note
        return Optimizer.profile_hook_step(lambda _: self._exchange(ex))(ex.optimizer)  # with the step hooks around it

    def _exchange(self, ex: Exchange) -> None:
        ex.recorder.sent += self._open(ex).push()
        self._missed[self._pull(ex)] += 1

    @torch.no_grad()
    def _pull(self, ex: Exchange, *, settles: bool = False) -> int:
        client, began = self._open(ex), time.perf_counter()
        weights, missed = client.pull(f"the pull of step {ex.step}", settles=settles)
        ex.recorder.wait_s += time.perf_counter() - began
        client.ranges.write(weights)
        if settles and ex.rank == 0:
            self.state.update(client.remembered(weights))
            self.state.commit()
        return missed

    def _open(self, ex: Exchange) -> Client:
        """At the first step the servers are started, and worker 0 tells them where to begin."""
        if self._client is None:
            if (kind := type(ex.optimizer)) not in OPTIMIZERS.values():
                raise MethodError(f"{self.name} does not go together with {kind.__name__}", why=_ELEMENTWISE)
            self._client = Client(ex, self.servers)
            if ex.rank == 0:
                knobs = {"consistency": self.consistency, "delay": self.delay, "scale": self.scale}
                self._client.begin(self.state, ex.world, **knobs)
        self._client.ranges.check(ex)
        return self._client

    async def centre(self, b: Bucket, ex: Exchange) -> Tensor:
        return b.weights()  # `settle` has made them everybody's

    def settle(self, ex: Exchange) -> None:
        """All have pushed all there is, and read the same; worker 0 remembers what the servers do, for a checkpoint."""
        ex.comm.sum(torch.zeros(1)).wait()
        if self._client is not None:
            self._pull(ex, settles=True)
            self._tell(ex)
        ex.comm.sum(torch.zeros(1)).wait()  # nobody goes on, and no server goes away, before all have read

    def _tell(self, ex: Exchange) -> None:
        """How stale this worker's gradients were, since the last time."""
        if pushes := self._missed.total():
            shown = ", ".join(f"{missed}: {times}" for missed, times in sorted(self._missed.items()))
            text = f"updates by others that a push had missed, and how often: {shown}"
            ex.recorder.emit(Note(t=time.monotonic(), text=text))
            ex.recorder.log({"staleness": sum(missed * times for missed, times in self._missed.items()) / pushes})
            self._missed.clear()


def _hidden(step: Callable[[], Any], optimizer: Optimizer) -> Any:
    """The step is made, and finds no gradient: a warning is given, and nothing else happens."""
    held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    try:
        for p, _ in held:
            p.grad = None
        return step()
    finally:
        for p, grad in held:
            p.grad = grad
