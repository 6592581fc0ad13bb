"""Every worker trains a replica of its own, drawn towards a centre that moves with all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.core.pipeline import Task
from paceline.errors import MethodError
from paceline.knobs import knob
from paceline.registry import register
from paceline.syncs._averaging import correction, largest_alpha, next_centre

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange

_CHANGED = 2.0  # a learning rate that has changed by this factor since the last start is another one


@register
@dataclass(kw_only=True)
class SMA(Sync):
    """Synchronous model averaging. In every step, with the weights from before the optimizer's update:

    cⱼ = α·(wⱼ − z);  wⱼ ← update(wⱼ) − cⱼ;  z' ← z + Σⱼ cⱼ + μ·(z − z_prev);  z_prev ← z;  z ← z'

    The centre z is what is evaluated and saved. The batch of a replica stays small, the learning rate is not scaled by
    their number. cⱼ does not depend on this step's gradient: it travels while forward and backward compute. Any reducer
    may carry it: a replica gives up the whole of cⱼ at once, and what error feedback keeps of it reaches z later.

    A restart puts the replicas onto z and ends z's momentum: where the learning rate has halved or doubled since the
    last one (a schedule that moves a little in every step must not hold the replicas at z for ever), or on `restarts`.
    """

    name: ClassVar[str] = "sma"
    paper: ClassVar[str] = "Koliousis et al., Crossbow, VLDB 2019"
    formula: ClassVar[str] = "as the reducer, once in τ steps"
    acts_before_step: ClassVar[bool] = True
    acts_after_step: ClassVar[bool] = True
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.DIFFERENCES})
    needs: ClassVar[dict[Fact, str]] = {
        Fact.WHOLE_PARAMETERS: "every worker trains a whole replica; use the layout replicated"
    }

    alpha: float = knob(0.0, "α: how strongly a replica is drawn to the centre; 0: 1/W", low=0.0, high=1.0)
    mu: float = knob(0.9, "μ: the centre's momentum, the paper's; 0: none", low=0.0, high=0.999)
    every: int = knob(1, "τ: steps from one correction to the next", unit="steps", low=1)
    restart: Literal["off", "lr"] = knob("off", "lr: replicas start again from the centre when the rate changes")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._c: dict[int, Tensor] = {}  # bucket -> this replica's correction
        self._flying: dict[int, Task[Tensor]] = {}  # bucket -> the sum of everyone's, on its way
        self._again, self._restart_at = False, -1

    def due(self, step: int) -> bool:
        return False

    def agrees(self, step: int) -> bool:
        return (step + 1) % self.every == 0

    def restarts(self) -> None:
        """The replicas start again from the centre after the next step: for an accuracy that has stalled. Every worker
        must call it.
        """
        self._again = True

    def weight(self, world_size: int) -> float:
        """α, refused where the distance between centre and replicas would grow from step to step."""
        alpha, most = self.alpha or 1.0 / world_size, largest_alpha(world_size, self.mu)
        if alpha >= most:
            raise MethodError(
                f"{self.name}: alpha={self.alpha:g} is too much for {world_size} workers",
                why=f"the centre moves by the sum of {world_size} corrections, and would swing further in every step",
                do=f"choose alpha below {most:.3g}, or 0 for 1/{world_size}",
            )
        return alpha

    async def before_step(self, b: Bucket, ex: Exchange) -> None:
        if ex.world_size > 1 and (b.index, "z") not in self.state:
            self.state[b.index, "z"] = self.state[b.index, "z_prev"] = await ex.start(b)
        self._start(b, ex, ex.step)

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        if self.restart == "lr":
            lr = sum(float(group["lr"]) for group in ex.optimizer.param_groups)
            last = self.state.setdefault("lr", lr)
            if max(lr, last) >= _CHANGED * min(lr, last) and lr != last:
                self.state["lr"], self._again = lr, True
        if self._again:
            ex.comm.agree(f"a restart at step {ex.step}", "yes")  # else the workers' centres would differ
            self._again, self._restart_at = False, ex.step
        return step()

    async def on_step(self, b: Bucket, ex: Exchange) -> None:
        if ex.world_size == 1:
            return  # a world of one has no other replica
        if self.agrees(ex.step):
            total = await self._flying.pop(b.index) if b.index in self._flying else self.state[b.index, "total"]
            z, z_prev = self.state[b.index, "z"], self.state[b.index, "z_prev"]
            self.state[b.index, "z"] = next_centre(z, z_prev, total, self.mu)
            self.state[b.index, "z_prev"] = z
            self.state.pop((b.index, "total"), None)
            b.write(b.weights().sub_(self._c.pop(b.index)))
        if self._restart_at == ex.step:
            self.state[b.index, "z_prev"] = self.state[b.index, "z"]
            b.write(self.state[b.index, "z"])
        self._start(b, ex, ex.step + 1)

    def _start(self, b: Bucket, ex: Exchange, step: int) -> None:
        """Start the correction of this step, if it has one and none is under way. After a settle its sum is known."""
        if ex.world_size == 1 or not self.agrees(step) or b.index in self._c:
            return
        c = self._c[b.index] = correction(b.weights(), self.state[b.index, "z"], self.weight(ex.world_size))
        if (b.index, "total") not in self.state:
            b.step = step  # reducers seed their random numbers and count their schedules by it
            self._flying[b.index] = Task(self._sum(b, c.clone(), ex))

    async def _sum(self, b: Bucket, c: Tensor, ex: Exchange) -> Tensor:
        total = await ex.mean(b, c) * ex.world_size
        total[b.n :] = 0.0  # a reducer's estimate may leave something in the padding behind the weights
        return total

    async def centre(self, b: Bucket, ex: Exchange) -> Tensor:
        return self.state[b.index, "z"] if (b.index, "z") in self.state else b.weights()

    def recut(self) -> None:
        """A correction that is not applied yet was made for other buckets; the next step makes another."""
        self._c.clear()
        for key in [key for key in self.state if isinstance(key, tuple) and key[1] == "total"]:
            del self.state[key]

    def settle(self, ex: Exchange) -> None:
        """Wait for the sums under way and keep them in the state: the next step applies them."""
        for b in ex.buckets:
            if b.index in self._flying:
                self.state[b.index, "total"] = self._flying.pop(b.index).finish()
        for part in ex.method.parts():
            part.state.commit()  # with the reducer's leftovers: these sums are not part of a step that could still fail
