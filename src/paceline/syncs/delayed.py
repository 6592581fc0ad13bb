"""Apply the gradients of some steps ago, so that the newest ones have time to travel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.core.pipeline import Task
from paceline.errors import UsageError
from paceline.knobs import knob
from paceline.registry import register

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class Delayed(Sync):
    """Bounded staleness without a server: the mean gradient of step t is applied in step t + s.

    G_t = mean(gᵢ(w_t)),  w_{t+1} = w_t − η·G_{t−s}. Its bytes can travel during s steps of computing, and no worker can
    apply G_{t−s} before all have sent their gradients: no worker is ever more than s steps ahead of another. The first
    s steps apply nothing. All workers apply the same means in the same order, so replicas agree.

    The weights have changed since the gradient was computed: correction="scale" applies G/(1 + s); "dc" (Zheng et al.,
    DC-ASGD, 2017) applies G + λ·G⊙G⊙(w_t − w_{t−s}), where G⊙G stands for the diagonal of the Hessian.

    The vote on a step's gradients is read together with their mean, s steps later: a gradient that is not finite is
    sent as zero, and the mean that it is part of is not applied.

    The s means under way are part of the state. At an evaluation, a checkpoint and the end they arrive and stay queued,
    and training continues as if it had not been interrupted; the last s means of a run are not applied.
    """

    name: ClassVar[str] = "delayed"
    paper: ClassVar[str] = "Ho et al., More effective distributed ML via a stale synchronous parallel server, NIPS 2013"
    formula: ClassVar[str] = "as the reducer"
    # KEEPS_LEFTOVERS: the queue holds gradients in true units, without the loss scale.
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.REPLICAS_AGREE, Fact.KEEPS_LEFTOVERS})
    needs: ClassVar[dict[Fact, str]] = {
        Fact.WHOLE_GRADIENTS: "whole means are queued on every worker; use the layout replicated"
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
        slot = ex.step % self.staleness  # a ring buffer: this slot holds the mean of s steps ago
        mean, then = (b.index, f"mean {slot}"), (b.index, f"weights {slot}")
        if mean in self.state.staged:
            raise UsageError(
                f"{self.name}: a second backward in step {ex.step}",
                why="the first one's gradients have left, and p.grad is the mean of an earlier step",
                do="use accumulate= or paceline.no_sync(optimizer); after a step left out, call optimizer.zero_grad()",
            )
        if Fact.EXACT_MEAN not in ex.method.reducer.facts():
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
        for s in b.slots:  # this step's gradient was sent; p.grad becomes the mean of s steps ago, where it is used
            s.param.grad = None
        # After a load the engine does not know which parameters were used s steps ago: those with a mean that is not 0.
        b.bind([s.param.requires_grad and bool(s.view.any()) for s in b.slots])

    def _corrected(self, g: Tensor, b: Bucket, w_then: Tensor | None) -> Tensor:
        if self.correction == "scale":
            return g / (1 + self.staleness)
        if self.correction == "dc" and w_then is not None:
            return g + self.lam * g.square() * b.weights().sub_(w_then)
        return g

    def _one_at_a_time(self, ex: Exchange) -> None:
        """Finish the means under way and commit the reducer's state, before the reducer gets the next gradient.

        A reducer with state (leftovers, the last Q, scratch vectors) can handle one gradient of a bucket at a time. Its
        state is committed whether or not this step counts, because those means have arrived.
        """
        if self._land():
            for part in ex.method.reducer.parts():
                part.state.commit()

    def _land(self) -> bool:
        """Replace the means under way by their values, and return whether there were any.

        Nothing is staged: a mean is the same value before and after it arrives.
        """
        flying = {key: task for key, task in self.state.real.items() if isinstance(task, Task)}
        self.state.real |= {key: task.finish() for key, task in flying.items()}
        return bool(flying)

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        return None if self.staleness and self._last != ex.step else step()

    def settle(self, ex: Exchange) -> None:
        self._one_at_a_time(ex)

    def flush(self, b: Bucket) -> Tensor | None:
        queued = [x for key, x in self.state.real.items() if key[0] == b.index and key[1].startswith("mean")]
        return sum(queued[1:], start=queued[0].clone()) if queued else None


async def _mean(b: Bucket, x: Tensor, ex: Exchange) -> Tensor:
    mean = await ex.mean(b, x)
    return mean if mean is x else mean.clone()
