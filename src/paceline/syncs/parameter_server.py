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

from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.core.vote import finite
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.registry import register
from paceline.server.client import ServerClient
from paceline.server.server import OPTIMIZERS
from paceline.telemetry.events import Note

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange

_ELEMENTWISE = f"servers step ranges of the weights by {', '.join(OPTIMIZERS)}"


@register
@dataclass(kw_only=True)
class ParameterServer(Sync):
    """Server s holds range s of all weights w and the optimizer's state. Worker i at clock c: push gᵢ, pull w.

    sequential: the server waits for all gᵢ of clock c and makes one step by their mean: as every_step.
    bounded: each push is a step of its own, with 1/W of the learning rate, at once; a worker more than τ clocks ahead
    of the slowest waits, so what is read has every update older than c − τ (stale synchronous parallel, Ho et al.,
    2013). eventual: no worker ever waits.

    A server is a process, started by a worker and gone with it. The optimizer's own step is not made at the worker: its
    options (learning rate, ...) travel with the push. A gradient that is not finite is not pushed; the clock goes on.
    """

    name: ClassVar[str] = "parameter_server"
    paper: ClassVar[str] = "Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014"
    formula: ClassVar[str] = "n·s to the servers, and as much back"
    needs: ClassVar[dict[Fact, str]] = {
        Fact.WHOLE_PARAMETERS: "a worker reads all weights; use the layout replicated",
        Fact.EXACT_MEAN: "gradients go to the servers whole; leave the reducer exact",
    }
    is_async: ClassVar[bool] = True
    limit: ClassVar[dict[str, Any]] = {"consistency": "sequential"}

    servers: int = knob(1, "processes that share the weights; server s runs beside worker s mod W", low=1, high=1024)
    consistency: Literal["sequential", "bounded", "eventual"] = knob(
        "sequential", "which workers are waited for: all in every step, those more than `delay` behind, none"
    )
    delay: int = knob(4, "τ, of bounded: how far the fastest may be ahead of the slowest", unit="steps", low=0)
    scale: Literal["none", "age"] = knob(
        "none", "age: a push whose worker missed k rounds of updates since it read counts 1/(1+k)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._client: ServerClient | None = None
        self._missed: Counter[int] = Counter()  # number of updates by others that a push had missed -> how often

    def check(self, optimizer: Optimizer) -> None:
        if (kind := type(optimizer)) not in OPTIMIZERS.values():
            raise MethodError(f"{self.name} does not go together with {kind.__name__}", why=_ELEMENTWISE)

    def due(self, step: int) -> bool:
        return False

    def meets(self, step: int) -> bool:
        return self.consistency == "sequential"

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        if self._client is not None:
            self._client.ranges.check_unwritten()
        if not finite(p for group in ex.optimizer.param_groups for p in group["params"]):
            result = _hidden(step, ex.optimizer)
            self._open(ex).pass_over()
            self._pull(ex)
            return result
        vars(ex.optimizer)["_opt_called"] = True  # the mark by which an LR scheduler knows that a step was made
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

    def _open(self, ex: Exchange) -> ServerClient:
        """The client; at the first step the servers are started, and worker 0 tells them where to begin."""
        if self._client is None:
            ahead = {"sequential": 0, "bounded": self.delay, "eventual": None}[self.consistency]
            self._client = ServerClient(ex, self.servers, ahead=ahead)
            if ex.rank == 0:
                knobs = {"consistency": self.consistency, "delay": self.delay, "scale": self.scale}
                self._client.begin(self.state, ex.world_size, **knobs)
        self._client.ranges.check(ex)
        return self._client

    async def centre(self, b: Bucket, ex: Exchange) -> Tensor:
        return b.weights()  # `settle` has made them equal on all workers

    def settle(self, ex: Exchange) -> None:
        """Wait until all have pushed and read the same weights; worker 0 keeps the servers' state for a checkpoint."""
        if self._client is not None:
            self._client.ranges.check_unwritten()
        ex.comm.sum(torch.zeros(1)).wait()
        if self._client is not None:
            self._pull(ex, settles=True)
            self._tell(ex)
        ex.comm.sum(torch.zeros(1)).wait()  # no worker goes on, and no server ends, before all have read

    def _tell(self, ex: Exchange) -> None:
        """Report how stale this worker's gradients were since the last report."""
        if pushes := self._missed.total():
            shown = ", ".join(f"{missed}: {times}" for missed, times in sorted(self._missed.items()))
            text = f"updates by others that a push had missed, and how often: {shown}"
            ex.recorder.emit(Note(t=time.monotonic(), text=text))
            ex.recorder.log({"staleness": sum(missed * times for missed, times in self._missed.items()) / pushes})
            self._missed.clear()


def _hidden(step: Callable[[], Any], optimizer: Optimizer) -> Any:
    """Make the optimizer's step without any gradient, so that its hooks run and no weight changes."""
    held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    try:
        for p, _ in held:
            p.grad = None
        return step()
    finally:
        for p, grad in held:
            p.grad = grad
