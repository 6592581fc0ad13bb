"""The workers tell each other their speeds, and agree on the shares of the batches to come.

[Note: balancing] Every few batches (`Balance.due`) each worker puts its speed into an all_gather on the control lane,
and reads the others' one batch later, when all have long sent theirs: nobody waits. All then hold the same numbers and
come to the same shares without another word. These hold from a batch on that no worker's DataLoader processes have read
ahead: as far as the furthest of them reads.

A worker's speed is that of its own computing (telemetry/pace.py): what it waits for the others says nothing about it.
The wait tells something else. The slowest worker waits the least, and what it waits is communication that nothing
hides. It is part of the step, and where it is most of it other shares are not worth having.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.comm.protocol import Handle
from paceline.core.parts import Balance, Speed
from paceline.core.step_time import StepTime
from paceline.data.sampling import Shares
from paceline.data.schedule import checked
from paceline.errors import UsageError
from paceline.telemetry.events import Rebalance
from paceline.telemetry.pace import Clock, Pace
from paceline.telemetry.recorder import Recorder

_WAITS = 8  # laps over which the exposed communication is taken


class Balancing:
    """One loader's shares, adjusted while it is read: [Note: balancing]."""

    def __init__(self, shares: Shares, recorder: Recorder, *, reads_ahead: int = 0, clock: Clock | None = None) -> None:
        """reads_ahead: how many batches are dealt out beyond the one that is handed out next."""
        self.shares, self.recorder, self.reads_ahead = shares, recorder, reads_ahead
        self.pace = Pace(clock)
        self.time = StepTime()
        self.most = sys.maxsize  # samples that fit in this worker's memory, where that is known
        self._waits: deque[float] = deque(maxlen=_WAITS)
        self._told: tuple[int, Handle] | None = None  # the speeds on their way, and in which epoch of the group
        self._changes = 0
        self._first = self._start = 0  # the first batch of this loop: over all epochs, and in its own
        self._backwards = 0  # before the batch in hand was handed out
        self._at_once = True  # there was a backward before the loop's second batch was asked for

    def _refuse_fetching_ahead(self, batches: int) -> None:
        before, self._backwards = self._backwards, self.recorder.backwards
        if batches == 1:
            self._at_once = self._backwards > before
        elif batches == 2 and self._backwards > before and not self._at_once:
            raise UsageError(
                f"the loop takes the next batch before the backward of the one in hand, and {self.shares.balance.name} "
                "changes the workers' shares between batches",
                why="a backward counts as much as this worker's share of the batch that was handed out last",
                do="take each batch when the backward of the one before is over (num_workers=2 reads ahead as well), "
                "and pass over batches by loader.load_state_dict",
            )

    def begin(self, handed: int, start: int) -> None:
        """A loop begins with batch `start` of an epoch, after `handed` batches over all epochs."""
        self.shares.schedule.begin(handed, start)
        self._first, self._start = handed, start

    def before_batch(self, handed: int, size: int) -> None:
        """Another batch is about to be handed out. Every worker calls it before the same batches.

        handed: those before it, over all epochs. size: of a global batch.
        """
        group, past = self.shares.group, handed - self._first
        self._refuse_fetching_ahead(past)
        for lap in self.pace.take():
            self.time.add(lap.samples, lap.computed_s)
            self._waits.append(lap.waited_s)
        if self._told is not None:
            epoch, rows = self._told
            self._told = None
            if epoch == group.epoch:  # or they are those of other workers
                self._decide(rows.wait().tolist(), handed, size)
        if self.shares.balance.due(self._start + past):
            self._told = group.epoch, group.lane("control").all_gather(self._row())

    def _row(self) -> torch.Tensor:
        slope, rest = self.time.line() if self.time.known else (0.0, 0.0)
        wait = statistics.median(self._waits) if self._waits else 0.0
        return torch.tensor([slope, rest, float(self.most), wait, float(self.reads_ahead)], dtype=torch.float64)

    def _decide(self, rows: list[list[float]], handed: int, size: int) -> None:
        """All workers come to the same result."""
        schedule, balance = self.shares.schedule, self.shares.balance
        if any(row[0] <= 0 for row in rows):
            return  # not all of them have computed yet; an evaluation's never do
        speeds = [Speed(row[0], row[1], min(int(row[2]), sys.maxsize)) for row in rows]
        exposed_s = min(row[3] for row in rows)
        now, new = self.shares.all(size, schedule.latest), balance.shares(speeds, size)
        before, after = (max(map(Speed.seconds, speeds, shares)) + exposed_s for shares in (now, new))
        fits = all(b <= speed.most for b, speed in zip(now, speeds, strict=True))
        changed = new != now and (balance.worth(before, after) or not fits)
        start = handed + int(max(row[4] for row in rows))
        self.recorder.emit(
            Rebalance(
                t=time.monotonic(),
                batch=start,
                changed=changed,
                shares=new,
                per_sample_ms=[speed.per_sample * 1e3 for speed in speeds],
                per_step_ms=[speed.per_step * 1e3 for speed in speeds],
                exposed_ms=exposed_s * 1e3,
                before_ms=before * 1e3,
                after_ms=after * 1e3,
            )
        )
        if not changed:
            return
        schedule.change(handed, start, speeds)
        self._changes += 1
        if self._changes == 1 and self.shares.group.rank == 0:
            said = self.shares.describe(size, speeds)
            print(
                f"paceline: from batch {start} on shares follow the workers' speeds: {said}; a step is predicted to "
                f"take {after * 1e3:.1f} ms in place of {before * 1e3:.1f}",
                file=sys.stderr,
                flush=True,
            )

    def save(self, handed: int) -> list[Any]:
        """The shares of the batches to come, for the loader's state."""
        return self.shares.schedule.save(handed)

    def load(self, saved: Any, handed: int) -> None:
        """Go on with saved shares. Among another number of workers they are equal again."""
        entries, world_size = checked(saved)
        group = self.shares.group
        if world_size in (0, group.world_size):
            self.shares.schedule.load(entries, handed)
            return
        self.shares.schedule.forget(handed)
        if group.rank == 0:
            print(
                f"paceline: the loader's state has the speeds of {world_size} workers, and there are "
                f"{group.world_size} now: shares are equal until their speeds are known",
                file=sys.stderr,
                flush=True,
            )


def read_ahead(source: DataLoader[Any]) -> int:
    """How many batches a DataLoader's processes may have read ahead."""
    return source.num_workers * (source.prefetch_factor or 0)


def check(sources: Sequence[Any], balance: Balance, habit: str, world_size: int) -> None:
    """Refuse, before anything is started, loaders whose batches cannot be shared out anew while they are read."""
    if not balance.measures_speed() or world_size == 1:
        return
    if not sources:
        raise UsageError(
            f"{balance.name} was given no loader",
            why="it shares out batches, and those that a script makes by itself are its own",
            do="give prepare a DataLoader with the global batch_size",
        )
    for source in sources:
        _check(source, balance, habit, world_size)


def _check(source: Any, balance: Balance, habit: str, world_size: int) -> None:
    name = balance.name
    if not isinstance(source, DataLoader):
        raise UsageError(
            f"{name} cannot share out the batches of a {type(source).__name__}",
            why="they are taken as split between the workers by you, so their sizes are yours",
            do="give prepare a DataLoader with the global batch_size",
        )
    if habit == "per_worker":
        raise UsageError(
            f"{name} and batch='per_worker' do not go together",
            why="one gives every worker the batch_size, the other gives more to the fast and less to the slow",
            do=f"leave batch= out, and make batch_size that of all {world_size} workers together",
        )
    if isinstance(source.dataset, IterableDataset) and source.num_workers:
        raise UsageError(
            f"{name} cannot share out a stream that {source.num_workers} processes of the loader read",
            why="each of them cuts batches of its own, and would have to hear of new shares in the middle of one",
            do="use num_workers=0, or a data set with a length",
        )
    if source.batch_size is not None:
        balance.check_batch(source.batch_size, world_size)
