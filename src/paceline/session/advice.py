"""How many workers is this job good for? From the noise of its gradients and from where its time goes.

[Note: goodput] Goodput is throughput times statistical efficiency (Pollux, Qiao et al., OSDI 2021): progress in a
second. With W workers and B samples to a step

    step(W, B)    = c·B/W + e                     c: a worker's seconds for a sample, e: exposed communication of a step
    efficiency(B) = n/(n + B)                     n: the gradient noise scale; what a sample of a batch of B is worth
    goodput(W, B) = B/step(W, B) · efficiency(B)

What is measured at one number of workers is carried to others by this model: computing is shared out, and what a step
waits for others stays as it was measured, except that one worker waits for nobody. Waiting for a worker that is slow by
itself counts as communication. For each W one batch is best: B = √(e·n·W/c).

A worker *pays* while it adds at least half of what an average one of those before it does:
W·(goodput(W + 1)/goodput(W) − 1) ≥ 1/2. Nothing is said of more than sixteen times the workers that were measured: the
smaller a worker's part of a batch, the more of its time is no computing at all, and one measurement does not show that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.engine import Engine

PAYS = 0.5  # of an average worker's goodput
FAR = 16  # times the workers there are: as far as the model is carried
_ENOUGH = 10  # measurements and laps below which nothing is said


def efficiency(noise_scale: float, batch: float) -> float:
    """What a sample of such a batch is worth beside one of a tiny batch, from 0 to 1."""
    return noise_scale / (noise_scale + batch)


@dataclass(frozen=True, kw_only=True)
class GoodputModel:
    """The model of [Note: goodput]."""

    sample_s: float  # c
    exposed_s: float  # e
    noise_scale: float  # n, in samples

    def goodput(self, world_size: int, batch: float) -> float:
        """Samples a second, each counted as what it is worth beside one of a tiny batch."""
        step_s = self.sample_s * batch / world_size + self._exposed_s(world_size)
        return batch / step_s * efficiency(self.noise_scale, batch)

    def best_batch(self, world_size: int) -> float:
        """The batch of the best goodput, of a sample for each worker at least."""
        best = math.sqrt(self._exposed_s(world_size) * self.noise_scale * world_size / self.sample_s)
        return max(best, float(world_size))

    def pays(self, world_size: int, batch: float | None = None) -> bool:
        """Does the last of so many workers pay? batch: as it is; None: the best one for each number of workers."""
        before, now = (
            self.goodput(w, self.best_batch(w) if batch is None else batch) for w in (world_size - 1, world_size)
        )
        return (world_size - 1) * (now / before - 1) >= PAYS

    def most_workers(self, limit: int, batch: float | None = None) -> int:
        """The largest number of workers, up to a limit, of which the last one pays."""
        limit = limit if batch is None else min(limit, int(batch))
        return max((w for w in range(2, limit + 1) if self.pays(w, batch)), default=1)

    def _exposed_s(self, world_size: int) -> float:
        return self.exposed_s if world_size > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    """How many workers and which batch a job is good for, and the numbers that this rests on."""

    world_size: int
    unknown: str = ""  # why nothing can be said; empty: the rest is there
    batch: float = 0.0  # samples of all workers in a step
    noise_scale: float = 0.0  # in samples
    measurements: int = 0
    compute_s: float = 0.0  # of a step, on this worker
    exposed_s: float = 0.0  # of a step: waiting for other workers
    workers: int = 0  # the most of whom the last one pays, at this batch; 0: not known
    workers_any_batch: int = 0  # the most, if the batch grows along; 0: not known
    best_batch: float = 0.0  # for so many

    @property
    def samples_per_s(self) -> float:
        """The throughput of all workers."""
        return self.batch / (self.compute_s + self.exposed_s)

    @property
    def efficiency(self) -> float:
        """What a sample of this batch is worth, beside one of a tiny batch."""
        return efficiency(self.noise_scale, self.batch)

    @property
    def workers_to_add(self) -> int:
        """How many workers to take in, or below zero to let go, at this batch. For whoever can act on it."""
        return self.workers - self.world_size if self.workers else 0

    def __str__(self) -> str:
        if self.unknown:
            return f"no advice: {self.unknown}"
        rests = (
            f"noise scale {self.noise_scale:.0f} samples, {self.samples_per_s:.3g} samples/s, a step of "
            f"{self.compute_s * 1e3:.3g} ms computing and {self.exposed_s * 1e3:.3g} ms waiting"
        )
        now = f"a batch of {self.batch:.0f} has {self.efficiency:.0%} efficiency"
        if not self.workers:
            return f"{now}; one worker does not show what waiting for others would cost ({rests})"
        here = f"at this batch workers pay up to {self._counted(self.workers)}"
        free = f"up to {self._counted(self.workers_any_batch)} with a batch of {self.best_batch:.0f}"
        return f"{now}; {here}, {free}; there are {self.world_size} ({rests})"

    def _counted(self, workers: int) -> str:
        return f"{workers} or more" if workers >= FAR * self.world_size else str(workers)


def advise(engine: Engine) -> Advice:
    """What can be said of this engine's job by now."""
    world_size, noise, batch = engine.group.world_size, engine.method.balance.noise, engine.window.batch
    laps = sorted(engine.recorder.laps, key=lambda lap: lap.compute_s + lap.wait_s)
    laps = laps[: math.ceil(len(laps) * 0.9)]  # without the longest: a compilation, an evaluation, a checkpoint
    why = engine.noise.why_not()
    if not why and not engine.noise.every:
        why = "nothing is measured; prepare(advice=20) does so in every 20th step"
    if not why and (batch is None or not laps):
        why = "no loader was given to prepare, and nobody else counts samples"
    if not why and min(noise.seen, len(laps)) < _ENOUGH:
        why = f"{noise.seen} measurements in {engine.ex.step} steps are too few; {_ENOUGH} are needed"
    if not why and not 0 < noise.scale < math.inf:
        lost = "the gradient itself is lost in its noise" if noise.scale else "the gradients have no noise"
        why = f"{lost}, by {noise.seen} measurements"
    if why:
        return Advice(world_size=world_size, unknown=why)
    assert batch is not None
    batches = engine.window.accumulate
    total = batch.total * batches
    compute_s = sum(lap.compute_s for lap in laps) / len(laps) * batches
    exposed_s = sum(lap.wait_s for lap in laps) / len(laps) * batches
    model = GoodputModel(sample_s=compute_s * world_size / total, exposed_s=exposed_s, noise_scale=noise.scale)
    several, limit = world_size > 1, FAR * world_size  # one alone does not show what waiting costs
    free = model.most_workers(limit)
    return Advice(
        world_size=world_size,
        batch=total,
        noise_scale=noise.scale,
        measurements=noise.seen,
        compute_s=compute_s,
        exposed_s=exposed_s,
        workers=model.most_workers(limit, total) if several else 0,
        workers_any_batch=free if several else 0,
        best_batch=model.best_batch(free) if several else 0.0,
    )
