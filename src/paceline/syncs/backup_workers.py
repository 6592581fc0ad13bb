"""Each update is made of the first K of N gradients, so that no worker waits for the slowest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.core.facts import Fact
from paceline.core.parts import Sync
from paceline.errors import MethodError, UsageError
from paceline.knobs import knob
from paceline.registry import register
from paceline.syncs._message import GradientMessage
from paceline.syncs._rounds import Rounds
from paceline.telemetry.events import Note

if TYPE_CHECKING:
    from paceline.core.bucket import Bucket
    from paceline.core.exchange import Exchange


@register
@dataclass(kw_only=True)
class BackupWorkers(Sync):
    """Synchronous SGD with b backup workers: of N workers, the first K = N − b gradients make the update.

    w_{r+1} = w_r − η·Σ cᵢ·gᵢ / Σ cᵢ over the K that came first; [Note: rounds] in _rounds.py says how. A late worker
    catches up: it applies the updates made meanwhile with its own optimizer, and so has the same weights and moments as
    all others at that version. Its gradient, now of age τ (in updates), is dropped as in the paper; or it is used in
    the next round, with cᵢ = 1/(1 + τ) (late="weigh"), or with cᵢ = 1 as gᵢ + λ·gᵢ⊙gᵢ⊙(w_now − w_then) (late="dc").

    A gradient that is not finite is not offered, and its worker goes on with the next. `ages` counts this worker's
    gradients by their age when they were used, `dropped` counts those that were not used.
    """

    name: ClassVar[str] = "backup_workers"
    paper: ClassVar[str] = "Chen et al., Revisiting distributed synchronous SGD, 2016"
    formula: ClassVar[str] = "2·(n·s + 4·(parameters + 1))·(W−1)/W an update"
    needs: ClassVar[dict[Fact, str]] = {
        Fact.WHOLE_PARAMETERS: "every worker applies every update; use the layout replicated",
        Fact.EXACT_MEAN: "gradients of some workers are added to zeros of the others; leave the reducer out",
    }
    is_async: ClassVar[bool] = True
    background: ClassVar[bool] = True
    limit: ClassVar[dict[str, Any]] = {"backups": 0}

    backups: int = knob(1, "b: gradients an update does not wait for; 0 is every_step", unit="workers", low=0)
    late: Literal["drop", "weigh", "dc"] = knob(
        "drop", "a gradient that came too late: dropped, weighed by 1/(1 + age), or corrected by DC-ASGD"
    )
    lam: float = knob(0.04, "λ: with late='dc', how much of g⊙g⊙(w − w_then) is added", low=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ages: Counter[int] = Counter()
        self.dropped = 0
        self._open: tuple[Rounds, GradientMessage] | None = None
        self._stretch = self._version = 0  # the number of `settle` calls; updates applied since the last of them
        self._step: Callable[[], Any] | None = None  # the optimizer's own, for updates that come after the last step

    def due(self, step: int) -> bool:
        return not self.backups

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        await ex.keep(b)

    def ready(self, ex: Exchange) -> None:
        """Called before a gradient is offered; tests override it to fix the order of arrivals."""

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        if not self.backups or ex.world_size == 1:
            return step()
        rounds, message = self._opened(ex)
        if not message.fits():
            raise UsageError(
                f"{self.name}: parameters were added or thawed between two updates",
                why="workers are at different steps, and their gradients must be of one length",
                do="enter paceline.consensus() on all workers before parameters change",
            )
        g = message.pack()
        if not bool(torch.stack(g.aminmax()).isfinite().all()):
            return step()  # reports the bad gradient: the engine skips the update itself
        self._step, version, w = step, self._version, message.weights() if self.late == "dc" else None
        self.ready(ex)
        while True:
            while rounds.joined > self._version:
                self._advance(step, ex)
            age = self._version - version
            if age and self.late == "drop":
                self.dropped += 1
                break
            rounds.offer(self._version, self._aged(message, age, w) if age else g)
            if self._advance(step, ex):
                self.ages[age] += 1
                break
        return None

    def _aged(self, message: GradientMessage, age: int, w_then: Tensor | None) -> Tensor:
        """A weighted or corrected copy of the gradient; the original is kept, as it may be late once more."""
        g = message.vector.clone()
        x, c = g[: message.n], 1.0 / (1 + age) if self.late == "weigh" else 1.0
        if w_then is not None:
            x.add_(x.square() * (message.weights() - w_then), alpha=self.lam)
        x.mul_(c)
        g[-1] = c
        return g

    def _advance(self, step: Callable[[], Any], ex: Exchange) -> bool:
        """Wait for the update of this version and apply it; return whether this worker's gradient is in it."""
        began = time.perf_counter()
        rounds, message = self._opened(ex)
        update = rounds.take(self._version)
        ex.recorder.wait_s += time.perf_counter() - began
        message.unpack(update.total)
        step()
        self._version += 1
        return update.mine

    def settle(self, ex: Exchange) -> None:
        """Bring all workers to the newest version. Rounds no longer wait for a worker that is here already."""
        if not self.backups or ex.world_size == 1:
            return
        rounds, _ = self._opened(ex)
        rounds.end()
        last = int(ex.comm.all_gather(torch.tensor([self._version])).wait().max())
        while self._version < last:
            self._advance(self._step or (lambda: type(ex.optimizer).step(ex.optimizer)), ex)
        rounds.close(last)
        self._open, self._stretch, self._version = None, self._stretch + 1, 0
        text = ", ".join(f"{n} of age {age}" for age, n in sorted(self.ages.items())) or "none"
        ex.recorder.emit(Note(t=time.monotonic(), text=f"staleness: gradients used {text}; {self.dropped} dropped"))

    async def centre(self, b: Bucket, ex: Exchange) -> Tensor:
        return await ex.comm.broadcast(b.weights())

    def _opened(self, ex: Exchange) -> tuple[Rounds, GradientMessage]:
        if self.backups >= ex.world_size:
            raise MethodError(f"{self.name}: backups={self.backups}, but there are only {ex.world_size} workers")
        if self._open is None:
            message = GradientMessage(ex)
            self._open = Rounds(ex.background, self._stretch, ex.world_size - self.backups, message.vector), message
        return self._open
