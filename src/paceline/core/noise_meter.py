"""Measuring the noise of gradients in some steps: two norms and a sum of three numbers.

What goes into [Note: noise scale] (noise.py) is there anyway: a worker's own gradient when it is about to be sent, and
the mean when it has landed. Each is read once more for its norm, every K steps, and not at all if it is not asked for.
The three numbers are summed over the workers beside the optimizer's step and read when the next exchange begins, so no
step waits for them, all workers hear the same, and a step that does not count is not heard.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.facts import Fact
from paceline.core.noise import sampled
from paceline.core.vote import LateNumbers

if TYPE_CHECKING:
    from paceline.comm.protocol import Handle
    from paceline.core.bucket import Bucket
    from paceline.core.engine import Engine


class NoiseMeter:
    """The measurements of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.due = False  # this step is measured
        self._backwards = 0
        self._samples = 0.0  # of this worker, in the backward under way
        self._squares: list[Tensor] = []  # of the buckets of the backward under way
        self._units: list[Tensor] = []  # square over samples, of each of this worker's units
        self._mean: Tensor | None = None  # this worker's part of the mean's square
        self._asked: tuple[Handle | LateNumbers, float] | None = None  # the sum under way, and the step's samples

    @property
    def every(self) -> int:
        """How many steps lie between two measurements; 0: nobody asks."""
        engine = self.engine
        return 0 if self.why_not() else engine.method.balance.measures_noise() or engine.options.measure_noise

    def why_not(self) -> str:
        """Say why gradients cannot be measured here; empty if they can."""
        engine = self.engine
        if engine.idle:
            return "one worker without micro-batches has one gradient a step, and noise shows between two"
        if Fact.GRADIENTS_AGREE not in engine.ex.facts:
            return f"with {engine.method.sync.name} a worker's gradients are not those of the step that all make"
        if Fact.CLOSE_MEAN not in engine.ex.facts:
            return f"the mean that {engine.method.reducer.name} estimates has another norm than the mean itself"
        return ""

    # ------------------------------------------------------------------------------------------------ in a step

    def begin(self, *, first: bool) -> None:
        """A backward begins. first: the first one of its step."""
        if first:
            self.forget()
            self.due = bool(every := self.every) and self.engine.ex.step % every == 0
        if self.due:
            batch = self.engine.window.batch
            self._backwards += 1
            self._samples = batch.weight if batch else 1.0
            self._squares.clear()

    def take(self, b: Bucket) -> None:
        """Have a bucket take its gradients, and look at them: what is new, not the sum of the window."""
        if not self.due:
            b.take()
        elif b.holds:
            self._squares += [_square(g) for g in b.fresh()]
            b.take()
        else:
            b.take()
            self._squares.append(_square(b.flat[: b.n]))

    def backward_ended(self) -> None:
        """All of this backward's gradients have been taken."""
        if self.due and self._samples and self._squares:
            self._units.append(_total(self._squares) / self._samples)

    def landed(self) -> None:
        """The means are here, and the user has not seen them yet."""
        if not self.due:
            return
        buckets = [b for b in self.engine.buckets if b.active]
        if Fact.WHOLE_GRADIENTS in self.engine.ex.facts:
            whole = _total([_square(b.flat[: b.n]) for b in buckets])
            self._mean = whole / self.engine.group.world_size  # all have it, and it is going to be summed
        else:
            ids = {id(b) for b in buckets}
            shards = [s for s in self.engine.method.layout.shards() if id(s.bucket) in ids]
            self._mean = _total([s.norm(2.0, torch.float32).double().square() for s in shards])

    def made(self) -> None:
        """The step counts: sum the numbers over the workers."""
        if self.due and self._mean is not None:
            self._ask(self._mean)
        self.forget()

    def forget(self) -> None:
        """The step is over, one way or the other."""
        self.due, self._backwards, self._mean = False, 0, None
        self._squares.clear()
        self._units.clear()

    def _ask(self, mean: Tensor) -> None:
        engine, window = self.engine, self.engine.window
        totals, world_size = window.totals, engine.group.world_size
        n = sum(totals)
        if not n:
            return
        # What an arriving gradient was multiplied by, [Note: weights] in window.py, is taken out again.
        reference, whole = (1.0, n) if window.summed else (totals[0], 1.0)
        parts = _total(self._units) * (reference**2 / (world_size**2 * n))
        mean = mean / whole**2
        if (scale := engine.ex.loss_scale()) is not None:
            parts, mean = (x / scale.to(x).square() for x in (parts, mean))
        if self._backwards != len(totals):  # a batch in several backwards, or a step in several exchanges
            parts = parts * math.nan
        device = engine.buckets[0].device
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
        numbers[0], numbers[1], numbers[2] = parts.to(device), float(len(self._units)), mean.to(device)
        handle = engine.ex.comm.sum(numbers)
        self._asked = (LateNumbers(handle.wait()) if numbers.is_cuda else handle), n

    def read(self) -> None:
        """Tell the balance what the last measured step has shown."""
        if self._asked is None:
            return
        (asked, samples), self._asked = self._asked, None
        numbers = asked.numbers() if isinstance(asked, LateNumbers) else asked.wait().tolist()
        parts, units, mean = numbers
        balance = self.engine.method.balance
        if (sample := sampled(parts, mean, units, samples)) is not None:
            balance.hear(sample)
            balance.state.commit()


def _square(x: Tensor) -> Tensor:
    """The sum of the squares of all elements, in double precision from a norm in single at least."""
    real = torch.view_as_real(x) if x.is_complex() else x
    norm: Tensor = torch.linalg.vector_norm(real, dtype=torch.promote_types(real.dtype, torch.float32))
    return norm.double().square()


def _total(squares: list[Tensor]) -> Tensor:
    return (
        torch.stack([x.to(squares[0].device) for x in squares]).sum()
        if squares
        else torch.zeros((), dtype=torch.float64)
    )
