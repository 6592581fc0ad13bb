"""Shares by measured speed: all workers end their backward together."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.facts import Fact
from paceline.core.parts import Balance, Speed
from paceline.errors import DataError, UsageError
from paceline.knobs import knob
from paceline.registry import register

_HALVINGS = 100  # of the interval in which the time is looked for: far below the time of one sample


@register
@dataclass(kw_only=True)
class Measured(Balance):
    """Each worker's share of the global batch follows its speed, so that nobody waits for the slowest.

    Worker i takes t_i(b) = per_step_i + per_sample_i · b seconds for b samples (core/step_time.py). The shares are

        minimize  max_i t_i(b_i)   over   Σ b_i = batch,   least ≤ b_i ≤ most_i

    in whole samples: at the time T all workers are busy but those at a bound, b_i = ⌊(T − per_step_i) / per_sample_i⌋,
    and the few samples that are left over go one by one to whoever is done with one more the soonest.
    """

    name: ClassVar[str] = "measured"
    paper: ClassVar[str] = (
        "Chen et al., LB-BSP: Semi-dynamic load balancing, SoCC 2020; Nie et al., Cannikin: Optimal adaptive "
        "distributed DNN training over heterogeneous clusters, Middleware 2024"
    )
    needs: ClassVar[Mapping[Fact, str]] = {
        Fact.REPLICAS_AGREE: "where workers step by their own gradients in between, the samples of one that takes few "
        "would count more than others; use a sync whose workers step by the mean of all, as every_step",
    }
    every: int = knob(4, "how often the workers tell each other their speeds", unit="batches", low=1)
    gain: float = knob(
        0.05, "shares change if a step is predicted to become shorter by this part of it", low=0.0, high=1.0
    )
    least: int = knob(1, "no worker takes fewer", unit="samples", low=1)
    most: int = knob(0, "no worker takes more; 0: as many as its speed allows", unit="samples", low=0)

    def measures_speed(self) -> bool:
        return True

    def due(self, batch: int) -> bool:
        return batch % self.every == 0

    def worth(self, before_s: float, after_s: float) -> bool:
        return before_s - after_s > self.gain * before_s

    def check_batch(self, batch: int, world_size: int) -> None:
        if batch < world_size * self.least:
            raise UsageError(
                f"a global batch of {batch} for {world_size} workers, of whom each takes {self.least} or more",
                why="a share must not become zero, or a worker would compute for nothing",
                do=f"raise batch_size to {world_size * self.least} or more, or use fewer workers",
            )
        if self.most and not self.least <= self.most:
            raise UsageError(f"measured: most={self.most} is below least={self.least}", do="raise it, or leave it out")
        if self.most and batch > world_size * self.most:
            raise UsageError(
                f"a global batch of {batch} for {world_size} workers, of whom none takes more than {self.most}",
                do=f"raise most to {-(-batch // world_size)} or more, or lower batch_size",
            )

    def shares(self, speeds: Sequence[Speed], batch: int) -> list[int]:
        least = min(self.least, batch // len(speeds))  # the last batch of an epoch may be small
        most = [min(speed.most, self.most or batch) for speed in speeds]
        self._check_room(most, least, batch)

        def done(time: float) -> list[int]:
            fit = (int(max(time - speed.per_step, 0.0) / speed.per_sample) for speed in speeds)
            return [min(max(b, least), limit) for b, limit in zip(fit, most, strict=True)]

        low, high = 0.0, max(speed.seconds(batch) for speed in speeds)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(done(middle)) <= batch else (low, middle)
        shares = done(low)
        soonest = [(speed.seconds(b + 1), rank) for rank, (speed, b) in enumerate(zip(speeds, shares, strict=True))]
        heapq.heapify(soonest)
        while sum(shares) < batch:
            rank = heapq.heappop(soonest)[1]
            if shares[rank] < most[rank]:
                shares[rank] += 1
                heapq.heappush(soonest, (speeds[rank].seconds(shares[rank] + 1), rank))
        return shares

    def _check_room(self, most: list[int], least: int, batch: int) -> None:
        if full := [rank for rank, limit in enumerate(most) if limit < max(least, 1)]:
            raise DataError(
                f"worker {full[0]} has room for {most[full[0]]} samples, and must take {max(least, 1)}",
                why="its memory is full before the batch is there",
                do="free memory there, use a smaller model or a layout that shards it, or leave that worker out",
            )
        if sum(most) < batch:
            raise DataError(
                f"a global batch of {batch} does not fit: the workers have room for {most}",
                why="none of them can take more samples than its memory holds",
                do=f"lower batch_size to {sum(most)} or less",
            )
