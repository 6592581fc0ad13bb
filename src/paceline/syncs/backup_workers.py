"""An update is made of the first gradients to come: K of N. Nobody waits for the slowest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.errors import MethodError, UsageError
from paceline.knobs import knob
from paceline.parts import Sync
from paceline.registry import register
from paceline.syncs._message import Message
from paceline.syncs._rounds import Rounds
from paceline.telemetry import Note

if TYPE_CHECKING:
    from paceline.bucket import Bucket
    from paceline.exchange import Exchange


@register
@dataclass(kw_only=True)
class BackupWorkers(Sync):
    """Synchronous SGD with b backup workers: of N workers, the first K = N − b gradients make the update.

    w_{r+1} = w_r − η·Σ cᵢ·gᵢ / Σ cᵢ over the K that came first; [Note: rounds] in _rounds.py says how. Who comes later
    catches up: it applies the updates made meanwhile, with its own optimizer, and so has the same weights and moments
    as everybody at that version. Its gradient, now of age τ (in updates), is dropped as in the paper; or it comes in
    the next round, with cᵢ = 1/(1 + τ) (late="weigh"), or (late="dc") with cᵢ = 1 as gᵢ + λ·gᵢ⊙gᵢ⊙(w_now − w_then).

    A gradient that is not finite is not offered, and its worker goes on with the next. `ages` counts this worker's
    gradients by their age when they were used, `dropped` those that were not.
    """

    name: ClassVar[str] = "backup_workers"
    paper: ClassVar[str] = "Chen et al., Revisiting distributed synchronous SGD, 2016"
    formula: ClassVar[str] = "2·(n·s + 4·(parameters + 1))·(W−1)/W an update"
    needs: ClassVar[dict[str, str]] = {
        "whole parameters": "every worker applies every update; use the layout replicated",
        "exact mean": "gradients of some workers are summed with zeros of the others, exactly; leave the reducer out",
    }
    own_pace: ClassVar[bool] = True
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
        self._open: tuple[Rounds, Message] | None = None
        self._stretch = self._version = 0  # from one settling to the next; updates applied in it
        self._step: Callable[[], Any] | None = None  # the optimizer's own, for updates that come after the last step

    def due(self, step: int) -> bool:
        return not self.backups

    async def on_grad(self, b: Bucket, ex: Exchange) -> None:
        await ex.keep(b)

    def ready(self, ex: Exchange) -> None:
        """A gradient is about to be offered. For those who write the order of arrivals themselves."""

    def apply(self, step: Callable[[], Any], ex: Exchange) -> Any:
        if not self.backups or ex.world == 1:
            return step()
        rounds, message = self._opened(ex)
        if not message.fits():
            raise UsageError(
                f"{self.name}: parameters were added or thawed between two updates",
                why="workers are at different steps, and their gradients must be of one length",
                do="enter paceline.agreed() on all workers before parameters change",
            )
        g = message.pack()
        if not bool(torch.stack(g.aminmax()).isfinite().all()):
            return step()  # which only says so: the engine has left it out
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

    def _aged(self, message: Message, age: int, w_then: Tensor | None) -> Tensor:
        """The gradient as it is sent when it is late; the next time it may be later still."""
        g = message.vector.clone()
        x, c = g[: message.n], 1.0 / (1 + age) if self.late == "weigh" else 1.0
        if w_then is not None:
            x.add_(x.square() * (message.weights() - w_then), alpha=self.lam)
        x.mul_(c)
        g[-1] = c
        return g

    def _advance(self, step: Callable[[], Any], ex: Exchange) -> bool:
        """Wait for the update of this version and apply it; is this worker's gradient in it?"""
        began = time.perf_counter()
        rounds, message = self._opened(ex)
        update = rounds.take(self._version)
        ex.recorder.wait_s += time.perf_counter() - began
        message.unpack(update.total)
        step()
        self._version += 1
        return update.mine

    def settle(self, ex: Exchange) -> None:
        """All meet at the newest version. A worker that is here already is no longer waited for."""
        if not self.backups or ex.world == 1:
            return
        rounds, _ = self._opened(ex)
        rounds.end()
        last = int(ex.comm.gather(torch.tensor([self._version])).wait().max())
        while self._version < last:
            self._advance(self._step or (lambda: type(ex.optimizer).step(ex.optimizer)), ex)
        rounds.close(last)
        self._open, self._stretch, self._version = None, self._stretch + 1, 0
        text = ", ".join(f"{n} of age {age}" for age, n in sorted(self.ages.items())) or "none"
        ex.recorder.emit(Note(t=time.monotonic(), text=f"staleness: gradients used {text}; {self.dropped} dropped"))

    async def centre(self, b: Bucket, ex: Exchange) -> Tensor:
        return await ex.comm.broadcast(b.weights())

    def _opened(self, ex: Exchange) -> tuple[Rounds, Message]:
        if self.backups >= ex.world:
            raise MethodError(
                f"{self.name}: backups={self.backups}, but there are only {ex.world} workers: nobody would be left"
            )
        if self._open is None:
            message = Message(ex)
            self._open = Rounds(ex.background, self._stretch, ex.world - self.backups, message.vector), message
        return self._open
