"""What workers tell each other beside the gradients: whose are not finite, at which step each is, who used what.

[Note: whisper] Where the mean of a bucket is exact on every worker, three numbers behind the last bucket's gradients
say whether there is anything to talk about: s, s² and "I have trouble". The mean of s² is the square of the mean of s
only if all workers are at the same `Place`. All see the same three means, so all decide alike, and nearly always the
decision is to go on. (A fourth number is for the order: bytes that were under way. The last bucket to be ready is the
first that the next forward needs, so an update that crosses the step barrier hears of it in time.)

[Note: ballot] Otherwise, and where means are estimates, one small vector is summed. It leaves with the last bucket, so
it mostly costs no round trip of its own.

[Note: behind] A whisper that tells of trouble is followed by a ballot, which leaves when the means are here. Where one
backward feeds several engines, a worker may still be waiting for the mean of an earlier one, which another worker
joins at its `step` only, while that other waits for the ballot of the later one. So of several engines the first alone
whispers; the ballots of the others have left before anything is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.protocol import Comm, Handle
from paceline.core.bucket import Bucket
from paceline.errors import MismatchError

_SMALL = 251  # its square, summed over any number of workers, is exact in fp32
# What a worker says of its gradients: they have NaN or infinity; its backward raised; its memory did not suffice.
NOT_FINITE, GAVE_UP, OUT_OF_MEMORY = 1.0, 2.0, 3.0
_WHY = {
    NOT_FINITE: "the gradient of {} is not finite (NaN or infinity)",
    GAVE_UP: "the backward of {} raised an error and was given up",
    OUT_OF_MEMORY: "the memory of {} did not suffice",
}

Bad = Mapping[int, float]  # the workers whose gradients cannot be used, and why: NOT_FINITE, ...


def told(bad: Bad) -> str:
    """Say whose gradients cannot be used, and why."""
    found = []
    for why, text in _WHY.items():
        if ranks := [str(rank) for rank, said in bad.items() if said == why]:
            found.append(text.format(f"worker{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"))
    return "; ".join(found)


class Place(NamedTuple):
    """Where a worker is. All must be at the same place when they vote."""

    step: int = 0
    backwards: int = 0  # of this step
    batch: int = 0  # the number of the batch in hand, as its loader counts
    settings: int = 0  # a hash of the numbers in the optimizer's groups: learning rates and their like
    rate: float = 0.0  # the first group's learning rate

    def small(self) -> int:
        """It all in one number that a whisper can carry. Different places may share it, but seldom."""
        return hash(tuple(self)) % _SMALL


class Verdict(Enum):
    """Does the step count?"""

    COMMIT = "the optimizer steps"
    SKIP = "no worker steps, and what the step had staged is rolled back"
    SIT_OUT = "this worker's optimizer does not step, but it takes part in what the workers agree on after it"


def whisper(b: Bucket, place: Place, *, trouble: bool, backlog: float = 0.0) -> None:
    """Write this worker's numbers behind a bucket's gradients, before it leaves: [Note: whisper]."""
    s = place.small()
    b.tail.copy_(torch.tensor([s, s * s, trouble, backlog]))


def all_well(b: Bucket) -> bool:
    """After the exchange: do the means say that no worker has trouble and all are at the same step?"""
    s, square, trouble, _ = b.tail.tolist()
    return bool(trouble == 0.0 and s * s == square)


class Ballot:
    """One vote, under way from the moment it is made."""

    def __init__(
        self,
        comm: Comm,
        buckets: list[Bucket],
        place: Place,
        *,
        extremes: list[Tensor],
        backlog: float,
        gave_up: float = 0.0,
    ) -> None:
        """extremes: the smallest and largest element of every bucket, in which NaN and infinity show. gave_up: why this
        worker has no gradients (GAVE_UP, OUT_OF_MEMORY), and what it sends are zeros.
        """
        self.world_size, self.buckets = comm.world_size, buckets
        self.arrived = [[s.arrived for s in b.slots] for b in buckets]
        flags = [float(a) for bucket in self.arrived for a in bucket]
        rows = [[0.0] * comm.world_size for _ in range(_ROWS)]
        for row, mine in zip(rows, (gave_up, *place), strict=True):
            row[comm.rank] = float(mine)
        numbers = [x for row in rows for x in row] + flags + [backlog]
        device = buckets[0].device if buckets else torch.device("cpu")
        # From pinned memory, or the host would wait for the device before the copy begins.
        votes = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
        votes = votes.to(device, non_blocking=True)
        if extremes and not gave_up:
            all_finite = torch.stack([x.to(device, torch.float32) for x in extremes]).isfinite().all()
            votes[comm.rank] = all_finite.logical_not() * NOT_FINITE
        self._handle: Handle = comm.sum(votes)

    def wait(self) -> Tensor:
        """The sum of all workers' votes."""
        return self._handle.wait()

    def any_bad(self) -> Tensor:
        """Are any worker's gradients of no use? As a tensor, where the votes are."""
        return self.wait()[: self.world_size].sum() > 0

    def any_not_finite(self) -> Tensor:
        """Is any worker's gradient not finite? As a tensor, where the votes are."""
        return (self.wait()[: self.world_size] == NOT_FINITE).any()

    def used(self) -> list[list[bool]]:
        """For each bucket, which of its parameters got a gradient on any worker."""
        votes = self.wait()
        if votes.is_cuda and all(all(a) for a in self.arrived):
            return self.arrived  # all of them, as this worker knows without asking the device
        counts = iter(votes[_ROWS * self.world_size : -1].tolist())
        return [[next(counts) > 0 for _ in bucket] for bucket in self.arrived]

    def bad(self) -> Bad:
        """The workers whose gradients are of no use. Raises if the workers are not at the same place."""
        return _bad(self.wait()[: _ROWS * self.world_size].tolist())

    def read_late(self) -> LateReading:
        """The same as `bad`, to be asked for in the next step: [Note: verdict on the device], device_verdict.py."""
        return LateReading(self.wait()[: _ROWS * self.world_size], _bad)

    def backlog(self) -> float:
        """The bytes that were under way, the mean over the workers."""
        return self.wait()[-1].item() / self.world_size


class LateNumbers:
    """Numbers on their way from the device to the host, which does not wait for them."""

    def __init__(self, x: Tensor) -> None:
        self._arrived: Any = None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = x.clone()

    def numbers(self) -> list[float]:
        """The numbers themselves."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._host.flatten().tolist()
        return found


class LateReading(LateNumbers):
    """What the workers said of their gradients, on its way to the host."""

    def __init__(self, x: Tensor, bad: Callable[[list[float]], Bad]) -> None:
        super().__init__(x)
        self._bad = bad

    def bad(self) -> Bad:
        """The workers whose gradients were of no use."""
        return self._bad(self.numbers())


_ROWS = 1 + len(Place._fields)  # of a ballot, one element for each worker: is anything bad, and where it is


def _bad(votes: list[float]) -> Bad:
    """Read a ballot's rows. Raises on every worker if the workers are not at the same place.

    One whose memory did not suffice left the others in the middle of their batch, and is only at the same step.
    """
    world_size = len(votes) // _ROWS
    said, *rows = (votes[i : i + world_size] for i in range(0, len(votes), world_size))
    places = [Place(int(row[0]), int(row[1]), int(row[2]), int(row[3]), row[4]) for row in zip(*rows, strict=True)]
    there = [place for place, why in zip(places, said, strict=True) if why != OUT_OF_MEMORY] or places[:1]
    usual = max(there, key=there.count)
    for rank, place in enumerate(places):
        if place != usual and (said[rank] != OUT_OF_MEMORY or place.step != usual.step):
            raise _differs(rank, place, usual)
    return {rank: why for rank, why in enumerate(said) if why}


def _differs(rank: int, place: Place, usual: Place) -> MismatchError:
    """The error for worker `rank`, which is elsewhere than most."""
    if place[:2] != usual[:2]:
        here, there = (f"at step {p.step}, backward {p.backwards}" for p in (place, usual))
        why = "a worker ran backward more often than the others, or skipped one"
        do = "call backward and step equally often on every worker"
    elif place.batch != usual.batch:
        here, there = (f"at batch {p.batch}" for p in (place, usual))
        why = "a worker left out the backward of a batch (a `continue`, an error that was caught) that the others ran"
        do = "decide by something all workers know: `if paceline.mean(loss) > limit: continue`"
    else:
        rates = place.rate != usual.rate
        here, there = (f"at the learning rate {p.rate:g}" if rates else "at other settings" for p in (place, usual))
        why = "their optimizers' groups differ in a number (a rate, weight decay), and the replicas would drift apart"
        do = "let schedulers see what is the same everywhere: scheduler.step(paceline.mean(loss))"
    return MismatchError(f"worker {rank} is {here}, the others {there}", why=why, do=do, worker=rank)


def not_finite(params: Iterable[Tensor]) -> Tensor | None:
    """Is any element of these parameters' gradients not finite? A tensor where they are; None: there are none."""
    grads = [_values(p.grad) for p in params if p.grad is not None]
    grads = [g for g in grads if g.numel()]
    if not grads:
        return None
    largest = torch._foreach_norm(grads, math.inf)  # one pass for all of them; NaN and infinity show in it
    device = largest[0].device
    return torch.stack([x.to(device, torch.float32) for x in largest]).isfinite().all().logical_not()


def finite(params: Iterable[Tensor]) -> bool:
    """Are all elements of these parameters' gradients finite? Waits for the device."""
    bad = not_finite(params)
    return bad is None or not bool(bad)


def _values(grad: Tensor) -> Tensor:
    values = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values


class Vote:
    """What the workers know of one backward: by whisper where that is enough, else by ballot."""

    def __init__(self, lane: Callable[[], Comm], *, guard: bool, whispers: bool, late: int = 0) -> None:
        """lane: where ballots are summed. late: a step's means are used that many steps later, and so is what the
        workers said of them.
        """
        self._lane, self.guard, self.whispers, self.late = lane, guard, whispers, late
        self._ballots: dict[int, Ballot] = {}  # by step: the last one's, and those that are not used yet
        self._extremes: list[Tensor] = []
        self.last: Bucket | None = None  # the bucket that carries the whisper
        self.gave_up = 0.0  # why this worker has no gradients to send
        self._at = Place()

    @property
    def ballot(self) -> Ballot | None:
        """The one to go by in this step."""
        return self._ballots.get(self._at.step - self.late)

    def begin(self, place: Place) -> None:
        """A backward begins: forget what was said of the one before."""
        self._at, step, self.gave_up = place, place.step, 0.0
        self._extremes.clear()
        self._ballots = {s: ballot for s, ballot in self._ballots.items() if step - self.late <= s < step}
        self.last = None

    def look(self, b: Bucket) -> None:
        """A bucket is about to leave: look whether its gradients are finite."""
        if self.guard:
            self._extremes += torch.aminmax(b.flat)  # one pass over the bucket; NaN and infinity show in both
        if self.late:  # the others hear of it only when it has long been part of what somebody remembers
            b.flat.nan_to_num_(0.0, 0.0, 0.0)

    def whispers_in(self, b: Bucket) -> bool:
        """Can this bucket carry the whisper? On a GPU reading it would make the host wait."""
        return self.whispers and not b.flat.is_cuda and b.flat.itemsize >= 4

    def close(self, b: Bucket, buckets: list[Bucket], backlog: float) -> None:
        """The last bucket to be ready is about to leave: it carries the whisper, if it can."""
        if self.whispers_in(b):
            self.last = b
            whisper(b, self._at, trouble=self._trouble(buckets), backlog=backlog)

    def _trouble(self, buckets: list[Bucket]) -> bool:
        """Is there anything the other workers must know of?"""
        absent = any(s.param.requires_grad and not s.arrived for b in buckets for s in b.slots)
        return absent or bool(self.gave_up) or not all(math.isfinite(x) for x in self._extremes)

    def call(self, buckets: list[Bucket], backlog: float = 0.0) -> None:
        """All buckets are loaded: vote now, unless it was whispered. backlog: bytes under way, for the order."""
        if self.last is None:
            self._call_ballot(buckets, backlog)

    def used(self, buckets: list[Bucket]) -> list[list[bool]]:
        """All means are here: for each bucket, which of its parameters got a gradient on any worker."""
        if self.last and not all_well(self.last):
            self._call_ballot(buckets)
        said = self.ballot.used() if self.ballot else []
        return said + [[s.arrived and not self.late for s in b.slots] for b in buckets[len(said) :]]

    def _call_ballot(self, buckets: list[Bucket], backlog: float = 0.0) -> None:
        self._ballots[self._at.step] = Ballot(
            self._lane(), buckets, self._at, extremes=self._extremes, backlog=backlog, gave_up=self.gave_up
        )

    def backlog(self) -> float:
        """The bytes that were under way at the end of backward, the mean over the workers."""
        if self.last is not None:
            return self.last.tail[-1].item()
        return self.ballot.backlog() if self.ballot else 0.0

    def bad(self) -> Bad:
        """The workers whose gradients, of those that this step goes by, are of no use."""
        return self.ballot.bad() if self.ballot else {}

    def heard(self) -> None:
        """A step was given up for what the ballot said; the next attempt goes by the same means, and makes it."""
        self._ballots.pop(self._at.step - self.late, None)
