"""A round ends at a deadline, and whatever each worker has finished by then counts, weighed by samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim import Optimizer

from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.knobs import knob
from paceline.registry import register
from paceline.syncs import _mirror

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange
    from paceline.core.open_window import Finished

_SHARES = 8  # micro-batches of an even share, where no size is given: a worker's speed shows to an eighth
ONE_MICRO_BATCH = 1e-3  # a deadline in ms that has always passed: every round is one micro-batch of every worker


@register
@dataclass(kw_only=True)
class AnyBatch(Sync):
    """Anytime Minibatch: until the deadline T worker i takes micro-batches, b_i samples, then all make one step.

    g = Σ_i Σ_s ∇f(x, s) / Σ_i b_i, exactly, however different the b_i are; x ← the mirror step by g. A worker begins no
    micro-batch that would end after T if it took as long as the others of its round, and finishes at least one.

    deadline_ms=0: T follows from what all have measured, T ← (T + batch_size / Σ_i (b_i / s_i)) / 2 with s_i the
    seconds of worker i's round, so that a round has about batch_size samples, whoever is fast.
    """

    name: ClassVar[str] = "any_batch"
    paper: ClassVar[str] = "Ferdinand et al., Anytime Minibatch, ICLR 2019; Eshraghi & Liang, DABMD, ICML 2020"
    formula: ClassVar[str] = "as the reducer, and 32·(W−1), once a round"
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.REPLICAS_AGREE, Fact.GRADIENTS_AGREE})
    refuses: ClassVar[dict[Fact, str]] = {
        Fact.GATHERS_IN_FORWARD: "workers run forward at different times and in different numbers; use zero2"
    }
    open_ended: ClassVar[bool] = True
    limit: ClassVar[dict[str, Any]] = {"deadline_ms": ONE_MICRO_BATCH}

    deadline_ms: float = knob(
        0.0, "T: how long a round takes; 0: as long as batch_size samples need, found while training", unit="ms", low=0
    )
    micro: int = knob(
        0, "of a micro-batch, what a worker takes at a time; 0: an eighth of its even share", unit="samples", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._said = False

    def check(self, optimizer: Optimizer) -> None:
        _mirror.check(optimizer, self.name)

    def micro_batch(self, batch: int, world_size: int) -> int:
        return self.micro or max(1, batch // (world_size * _SHARES))

    @property
    def deadline(self) -> float:
        """T in seconds. Nothing is known at first: then a round is one micro-batch."""
        return self.deadline_ms / 1e3 or float(self.state.get("deadline", 0.0))

    def closes(self, elapsed: float, usual: float) -> bool:
        return elapsed + usual > self.deadline

    def learn(self, everyone: Sequence[Finished], asked_for: float, ex: Exchange) -> None:
        ex.recorder.log({"deadline_ms": self.deadline * 1e3, "round_samples": sum(one.samples for one in everyone)})
        if self.deadline_ms:
            self._say_late(everyone, ex)
            return
        pace = sum(one.samples / one.seconds for one in everyone if one.seconds > 0)
        before = self.state.get("deadline")
        if before is None or not pace:  # the first round is a warm-up
            self.state["deadline"] = before or 0.0
        else:
            wanted = asked_for / pace
            self.state["deadline"] = (before + min(wanted, 2 * before)) / 2 if before else wanted

    def _say_late(self, everyone: Sequence[Finished], ex: Exchange) -> None:
        late = [(one.seconds, rank) for rank, one in enumerate(everyone) if one.seconds > self.deadline]
        late = [(seconds, rank) for seconds, rank in late if everyone[rank].batches == 1]
        if not late or self._said:
            return
        self._said = True
        seconds, rank = max(late)
        if ex.rank == 0:
            print(
                f"paceline: deadline_ms={self.deadline_ms:g} is shorter than one micro-batch of worker {rank} "
                f"({seconds * 1e3:.3g} ms): it counts late, and the others wait for it",
                file=sys.stderr,
                flush=True,
            )

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        await ex.keep(b)

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        if Fact.WHOLE_PARAMETERS not in ex.facts:
            _mirror.refuse(ex.optimizer, self.name)
        return _mirror.apply(step, ex.optimizer)
