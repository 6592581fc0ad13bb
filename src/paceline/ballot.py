"""What workers tell each other beside the gradients: whose are not finite, at which step each is, who used what.

[Note: whisper] Where the mean of a bucket is exact on every worker, three numbers behind the last bucket's
gradients say whether there is anything to talk about: s, s^2 and "I have trouble". The mean of s^2 is the square of
the mean of s only if all workers are at the same step. All see the same three means, so all decide alike, and
nearly always it is: go on. (A fourth is for the order: bytes that were under way. The last bucket to be ready is the
first that the next forward needs, so who crosses the step barrier hears of it in time.)

[Note: ballot] Otherwise, and where means are estimates, one small vector is summed. It leaves with the last bucket,
so it mostly costs no round trip of its own. On a GPU it stays there until somebody asks: reading makes the host
wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.bucket import Bucket
from paceline.errors import MismatchError
from paceline.parts import Comm, Handle

_BACKWARDS = 1024  # more than anyone calls in one step: step and backward share one number
_SMALL = 251  # its square, summed over any number of workers, is exact in fp32


def whisper(b: Bucket, *, step: int, backwards: int, trouble: bool, backlog: float = 0.0) -> None:
    """[Note: whisper]. Call before the last bucket leaves."""
    s = (step * _BACKWARDS + backwards) % _SMALL
    b.tail.copy_(torch.tensor([s, s * s, trouble, backlog]))


def all_well(b: Bucket) -> bool:
    """After the exchange: was nobody's whisper anything to talk about?"""
    s, square, trouble, _ = b.tail.tolist()
    return bool(trouble == 0.0 and s * s == square)


class Ballot:
    """One vote, under way from the moment it is made."""

    def __init__(
        self, comm: Comm, buckets: list[Bucket], extremes: list[Tensor], *, step: int, backwards: int, backlog: float
    ) -> None:
        """`extremes`: the smallest and largest element of every bucket, in which NaN and infinity show."""
        self.world, self.buckets = comm.world, buckets
        stamps = [0.0] * comm.world
        stamps[comm.rank] = float(step * _BACKWARDS + backwards)
        self.arrived = [[s.arrived for s in b.slots] for b in buckets]
        flags = [float(a) for bucket in self.arrived for a in bucket]
        votes = torch.tensor([0.0] * comm.world + stamps + flags + [backlog], dtype=torch.float64)
        if extremes:
            device = extremes[0].device
            votes = votes.to(device)
            all_finite = torch.stack([x.to(device, torch.float32) for x in extremes]).isfinite().all()
            votes[comm.rank] = all_finite.logical_not()
        self._handle: Handle = comm.sum(votes)

    def wait(self) -> Tensor:
        return self._handle.wait()

    def any_bad(self) -> Tensor:
        """Is anybody's gradient not finite? As a tensor, where the votes are."""
        return self.wait()[: self.world].sum() > 0

    def used(self) -> list[list[bool]]:
        """For each bucket, which of its parameters got a gradient from anyone."""
        votes = self.wait()
        if votes.is_cuda and all(all(a) for a in self.arrived):
            return self.arrived
        counts = iter(votes[2 * self.world : -1].tolist())
        return [[next(counts) > 0 for _ in bucket] for bucket in self.arrived]

    def bad(self) -> list[int]:
        """The workers whose gradients are not finite; an error if workers are not at the same step."""
        votes = self.wait()[: 2 * self.world].tolist()
        _same_step(votes[self.world :])
        return [rank for rank, bad in enumerate(votes[: self.world]) if bad]

    def backlog(self) -> float:
        """The mean over the workers."""
        return self.wait()[-1].item() / self.world


def _same_step(stamps: list[float]) -> None:
    if len(set(stamps)) == 1:
        return
    usual = max(stamps, key=stamps.count)
    odd = next(rank for rank, stamp in enumerate(stamps) if stamp != usual)
    said = [f"step {int(s) // _BACKWARDS}, backward {int(s) % _BACKWARDS}" for s in (stamps[odd], usual)]
    raise MismatchError(
        f"worker {odd} is at {said[0]}, the others at {said[1]}",
        why="a worker ran backward more often than the others, or skipped one",
        do="call backward and step equally often on every worker",
        worker=odd,
    )


def finite(params: Iterable[Tensor]) -> bool:
    """Are all their gradients?"""
    extremes = [x for p in params if p.grad is not None for x in _extremes(p.grad)]
    if not extremes:
        return True
    return bool(torch.stack([x.to(extremes[0].device, torch.float32) for x in extremes]).isfinite().all())


def _extremes(grad: Tensor) -> Sequence[Tensor]:
    """In which NaN and infinity show."""
    values = grad._values() if grad.is_sparse else grad
    values = torch.view_as_real(values) if values.is_complex() else values
    return torch.aminmax(values) if values.numel() else ()


class Poll:
    """What the workers know of one backward: by whisper where that is enough, else by ballot."""

    def __init__(self, comm: Comm, *, guard: bool, whispers: bool, late: int = 0) -> None:
        """`late`: a step's means are used that many steps later, and so is what was said of them."""
        self.comm, self.guard, self.whispers, self.late = comm, guard, whispers, late
        self._votes: dict[int, Ballot] = {}  # by step: the last one's, and those that are not used yet
        self._extremes: list[Tensor] = []
        self.last: Bucket | None = None  # the bucket that carries the whisper
        self._at = (0, 0)

    @property
    def ballot(self) -> Ballot | None:
        """The one to go by in this step."""
        return self._votes.get(self._at[0] - self.late)

    def begin(self, step: int, backwards: int) -> None:
        self._at = (step, backwards)
        self._extremes.clear()
        self._votes = {s: ballot for s, ballot in self._votes.items() if step - self.late <= s < step}
        self.last = None

    def look(self, b: Bucket) -> None:
        """A bucket is about to leave."""
        if self.guard:
            self._extremes += torch.aminmax(b.flat)  # NaN and infinity show in them; the cheapest pass there is
        if self.late:  # the others hear of it when it has long been in somebody's memory
            b.flat.nan_to_num_(0.0, 0.0, 0.0)

    def whispers_in(self, b: Bucket) -> bool:
        return self.whispers and not b.flat.is_cuda and b.flat.itemsize >= 4

    def close(self, b: Bucket, buckets: list[Bucket], backlog: float) -> None:
        """... and it is the last one to be ready."""
        if self.whispers_in(b):
            self.last, (step, backwards) = b, self._at
            whisper(b, step=step, backwards=backwards, trouble=self._trouble(buckets), backlog=backlog)

    def _trouble(self, buckets: list[Bucket]) -> bool:
        """Is there anything the other workers must know of?"""
        absent = any(s.param.requires_grad and not s.arrived for b in buckets for s in b.slots)
        return absent or not all(math.isfinite(x) for x in self._extremes)

    def call(self, buckets: list[Bucket], backlog: float = 0.0) -> None:
        """All are loaded: vote now, unless it was whispered. `backlog`: bytes under way, for the order."""
        if self.last is None:
            self._vote(buckets, backlog)

    def used(self, buckets: list[Bucket]) -> list[list[bool]]:
        """All have come back: for each bucket, which of its parameters got a gradient from anyone."""
        if self.last and not all_well(self.last):
            self._vote(buckets)
        said = self.ballot.used() if self.ballot else []
        return said + [[s.arrived and not self.late for s in b.slots] for b in buckets[len(said) :]]

    def _vote(self, buckets: list[Bucket], backlog: float = 0.0) -> None:
        step, backwards = self._at
        self._votes[step] = Ballot(self.comm, buckets, self._extremes, step=step, backwards=backwards, backlog=backlog)

    def backlog(self) -> float:
        return self.last.tail[-1].item() if self.last else self.ballot.backlog() if self.ballot else 0.0

    def bad(self) -> list[int]:
        """The workers whose gradients, of those that this step goes by, are not finite."""
        return self.ballot.bad() if self.ballot else []

    def heard(self) -> None:
        """A step was given up for what the ballot said; the next attempt goes by the same means, and makes it."""
        self._votes.pop(self._at[0] - self.late, None)

    def bad_alone(self, params: Iterable[Tensor]) -> list[int]:
        """Gradients that nobody else sees: this worker, if they are not finite."""
        return [self.comm.rank] if self.guard and not finite(params) else []
