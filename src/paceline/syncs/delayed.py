"""Apply the gradients of some steps ago, so that today's may take their time on the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from paceline.errors import UsageError
from paceline.knobs import knob
from paceline.parts import KEEPS, Sync
from paceline.pipeline import Task
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange


@register
@dataclass(kw_only=True)
class Delayed(Sync):
    """Bounded staleness without a server: the mean gradient of step t is applied in step t + s.

    G_t = mean(gᵢ(w_t)),  w_{t+1} = w_t − η·G_{t−s}. Its bytes have s steps of computing to travel in, and nobody can
    apply G_{t−s} before all have sent theirs: no worker is ever more than s steps ahead of another. The first s steps
    apply nothing. All workers apply the same means in the same order, so replicas agree.

    For what has changed since: correction="scale" applies G/(1 + s); "dc" (Zheng et al., DC-ASGD, 2017) goes by
    G + λ·G⊙G⊙(w_t − w_{t−s}), where G⊙G stands for the diagonal of the Hessian.

    What workers say of a step's gradients is read together with its mean, s steps later: one that is not finite counts
    as zero on the wire, and the mean it went into is not applied.

    The s means under way are part of the state. At an evaluation, a checkpoint and the end they arrive and stay queued:
    training goes on from there as if nothing had been; the last s means of a run are not applied.
    """

    name: ClassVar[str] = "delayed"
    paper: ClassVar[str] = "Ho et al., More effective distributed ML via a stale synchronous parallel server, NIPS 2013"
    formula: ClassVar[str] = "as the reducer"
    gives: ClassVar[frozenset[str]] = frozenset({"replicas agree", KEEPS})  # the queue, and it is not at the loss scale
    needs: ClassVar[dict[str, str]] = {
        "whole gradients": "whole means are queued on every worker; use the layout replicated"
    }
    limit: ClassVar[dict[str, Any]] = {"staleness": 0}

    staleness: int = knob(1, "s: steps between a gradient and its update; 0 is every_step", unit="steps", low=0)
    correction: Literal["none", "scale", "dc"] = knob(
        "none", "for the age of a gradient: none, 1/(1 + age), or by the way the weights have gone since (DC-ASGD)"
    )
    lam: float = knob(0.04, "λ: with correction='dc', how much of G⊙G⊙(w − w_then) is added", low=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last = -1  # the last step in which something was old enough to be applied

    def lag(self) -> int:
        return self.staleness

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        if not self.staleness:
            await ex.keep(b)
            return
        slot = ex.step % self.staleness  # a ring: what was put here s steps ago is taken out now
        mean, then = (b.index, f"mean {slot}"), (b.index, f"weights {slot}")
        if mean in self.state.staged:
            raise UsageError(
                f"{self.name}: a second backward in step {ex.step}",
                why="the first one's gradients have left, and p.grad is the mean of an earlier step",
                do="use accumulate= or paceline.hold(optimizer); after a step left out, call optimizer.zero_grad()",
            )
        if "exact mean" not in ex.method.reducer.facts():
            self._one_at_a_time(ex)
        old, w_then = self.state.get(mean), self.state.get(then)
        self.state[mean] = Task(_mean(b, b.flat.clone(), ex))
        if self.correction == "dc":
            self.state[then] = b.weights()
        if old is None:
            b.flat.zero_()
            return
        self._last = ex.step
        b.flat.copy_(self._corrected(await old if isinstance(old, Task) else old, b, w_then))
        for s in b.slots:  # today's is on its way; the engine binds what somebody used s steps ago
            s.param.grad = None
        b.bind([s.param.requires_grad and bool(s.view.any()) for s in b.slots])  # it has not heard who, after a load

    def _corrected(self, g: Tensor, b: Bucket, w_then: Tensor | None) -> Tensor:
        if self.correction == "scale":
            return g / (1 + self.staleness)
        if self.correction == "dc" and w_then is not None:
            return g + self.lam * g.square() * b.weights().sub_(w_then)
        return g

    def _one_at_a_time(self, ex: Exchange) -> None:
        """A reducer with a memory (leftovers, the last Q, scratch vectors) has one gradient of a bucket in hand at a
        time: the one before is brought to its end first. That it came is a fact, whether this step counts or not.
        """
        if self._land():
            for part in ex.method.reducer.parts():
                part.state.commit()

    def _land(self) -> bool:
        """What is on its way arrives and stays queued. A mean is the same, be it on its way or here: nothing staged."""
        flying = {key: task for key, task in self.state.real.items() if isinstance(task, Task)}
        self.state.real |= {key: task.finish() for key, task in flying.items()}
        return bool(flying)

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        return None if self.staleness and self._last != ex.step else step()

    def settle(self, ex: Exchange) -> None:
        self._one_at_a_time(ex)


async def _mean(b: Bucket, x: Tensor, ex: Exchange) -> Tensor:
    mean = await ex.mean(b, x)
    return mean if mean is x else mean.clone()
