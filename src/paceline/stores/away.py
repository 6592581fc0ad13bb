"""State that is stepped on the host while the device computes: ZeRO-Offload.

[Note: away] A bucket is away if the fp32 master of its parameters and the optimizer's moments are in the host's memory
(cpu.py) or on its disk (nvme.py). Its gradients leave the device as soon as they are agreed on, while backward goes on.
With Adam and AdamW the host then steps the bucket at once (kernels/adam.py), on a guess: that the step will be made,
and that nobody scales the gradients first. The new parameters wait on the device, in memory that backward has given
back, and `optimizer.step()` has little left to do but to put them in their place. So the parameters change where the
user says so, and nowhere else.

A guess that was wrong is undone: in a step that is given up, after a second backward, where gradients are clipped.
Undoing is Adam's formula solved for what was before, exact to rounding. Whoever clips in one step probably clips in
the next: it is then not guessed, and the host begins when `step` is called. Under a loss scaler nothing is ever
guessed. `guess=False` never does.

Other optimizers step their pieces in the host's memory by themselves, when `step` is called.

[Note: face] On the device a gradient that has left is a one in its place, without memory: the engine may make it NaN
for all to see, and a copy of it says what of the gradient the next one is to be added to.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.bucket import Bucket, Slot
from paceline.kernels import adam
from paceline.shards.piece import Piece
from paceline.stores import crew
from paceline.stores.lanes import Give, Lanes, Ring, at_once
from paceline.stores.params import Home
from paceline.stores.vectors import Triple, Vectors

_MOMENTS = ("exp_avg", "exp_avg_sq")

Groups = Mapping[int, adam.Adam | None]  # how a parameter (by id) is stepped; None: not by us


class Wish(NamedTuple):
    """A piece's step: how, which one, and with which multiple of the gradient."""

    piece: AwayPiece
    how: adam.Adam
    t: int
    scale: float


class Made(NamedTuple):
    """What became of a bucket: steps, and its new parameters on the device, if there was room."""

    wishes: list[Wish]
    there: Tensor | None


class AwayPiece(Piece):
    """A piece of a bucket that is away. Factors of its gradient are remembered, not multiplied."""

    away: Away

    def __init__(
        self, b: Bucket, slot: Slot, start: int, stop: int, source: Tensor | None, home: Tensor, *, away: Away
    ) -> None:
        """home: the bucket's masters, which are at hand."""
        self.away = away
        self.factors: list[Tensor | float] = []
        super().__init__(b, slot, start, stop, source, home)
        self.param, *moments = away.vectors.show(self.here)
        self.moments = dict(zip(_MOMENTS, moments, strict=True))

    def at_hand(self, *, changed: bool) -> AbstractContextManager[Any]:
        return self.away.at_hand(changed=changed)

    def now(self) -> Tensor:
        return super().now() if self.away.home is None else self.away.home.read(self.here)

    def look(self, x: Tensor) -> Tensor:
        with self.at_hand(changed=False):
            return x.detach().clone()

    def write(self, x: Tensor) -> None:
        with self.at_hand(changed=True):
            super().write(x)

    def published(self) -> None:
        self.away.published()

    def remember(self, known: dict[str, Any]) -> dict[str, Any]:
        for key, mine in self.moments.items():
            if key in known and known[key] is not mine:
                known[key] = mine.copy_(known[key])
        return known

    def remembers(self) -> bool:
        return self.away.handed

    def grad(self) -> Tensor:
        return self.away.grad(self) if self.away.handed else super().grad()

    def scale(self, factor: Tensor | float) -> None:
        if not isinstance(factor, Tensor) and factor == 0.0:  # of what is not finite too
            self.away.zero(self)
            self.away.norm_of[self] = torch.zeros_like(self.away.norm_of[self])
            self.factors.clear()
        else:
            self.away.check_kept("a gradient is multiplied: clipped, or divided by a loss scale")
            self.factors.append(factor)

    def scaled(self, x: Tensor) -> None:
        """What was made of its gradient becomes of x, which is on the device, in place."""
        for factor in self.factors:
            x[self.here].mul_(factor)

    def norm(self, p: float, dtype: torch.dtype) -> Tensor:
        known = p == 2 and self.away.handed
        norm = self.away.norm_of[self].to(dtype) if known else super().norm(p, dtype).to(self.bucket.device)
        for factor in self.factors:
            norm = norm * (factor.abs().to(norm) if isinstance(factor, Tensor) else abs(factor))
        return norm

    def finite(self) -> Tensor:
        return (self.away.norm_of[self] * self.away.face[0]).isfinite() if self.away.handed else super().finite()

    def take(self) -> None:
        """Before the optimizer's own step: [Note: away] has followed already."""
        self.show(self.grad().to(self.param.dtype, copy=True).mul_(self.taken({})))

    def taken(self, values: dict[int, float]) -> float:
        """The product of its factors, of which the tensors' values are given by id. They are then forgotten."""
        product = 1.0
        for factor in self.factors:
            product *= values[id(factor)] if isinstance(factor, Tensor) else factor
        self.factors.clear()
        return product


class Away:
    """One bucket: [Note: away]."""

    def __init__(self, b: Bucket, vectors: Vectors, lanes: Lanes, ring: Ring, line: crew.Line) -> None:
        self.bucket, self.vectors, self.lanes, self.ring, self.line = b, vectors, lanes, ring, line
        self.home: Home | None = None  # of this worker's slice of the parameters, if not the device
        self.dtype = b.flat.dtype
        self.g = self._memory()
        self.face = self.g  # [Note: face]
        self._left = False  # the last mean has
        self.norm_of: dict[AwayPiece, Tensor] = {}  # of g as it came
        self.pieces: list[AwayPiece] = []
        self._came: Callable[[], None] | None = None  # wait until g is here
        self._finite = lanes.vector(1, torch.float32, pin=True)  # a sum of norms, of which that can be seen
        self._job: Future[Made | None] | None = None
        self.asked = False  # the user has, for what the job does
        self.yields = 0  # bytes on the device: room for others, who need it more
        self._known: Any = None  # of the parameters, as they were published

    @contextlib.contextmanager
    def at_hand(self, *, changed: bool) -> Iterator[Triple]:
        """Inside, all that is not on the device can be looked at."""
        with self.vectors.at_hand(changed=changed) as now:
            if self.home is None:
                yield now
            else:
                with self.home.at_hand(changed=changed):
                    yield now

    @property
    def handed(self) -> bool:
        """Is what the bucket keeps here?"""
        return self.bucket.kept is self.face

    def wait(self) -> None:
        if self._came is not None:
            self._came()
            self._came = None

    def _memory(self) -> Tensor:
        """For gradients: they stay, so that a guess can be undone."""
        return self.lanes.vector(self.vectors.n, self.dtype, pin=True)

    def grad(self, piece: AwayPiece) -> Tensor:
        """That of a piece."""
        self.wait()
        return self.g[piece.here]

    def zero(self, piece: AwayPiece) -> None:
        """... becomes zero."""
        self.take_back()
        self.grad(piece).zero_()

    def check_kept(self, what: str) -> None:
        """Is its gradient still here, for somebody who wants something of it?"""

    def ready(self) -> None:
        """What was made of the last gradient is over, and the next may come."""
        self.take_back()
        self.done()  # a late step reads the last one
        if self.home is not None:
            self.home.wait()
        self.wait()

    def hand(self, mean: Tensor, guess: list[Wish] | None) -> None:
        """This worker's slice of a mean leaves the device; with a guess, the host goes on with it."""
        self.ready()
        norms = _norms([mean[piece.here] for piece in self.pieces]) or [mean.new_zeros((), dtype=torch.float32)]
        self.norm_of = dict(zip(self.pieces, norms, strict=False))
        self._came = self.lanes.out([(mean, self.g), (torch.stack(norms).sum(0, keepdim=True), self._finite)])
        self._left = True
        self.bucket.kept = self.face = mean.new_ones(1).expand_as(mean)
        for piece in self.pieces:
            piece.factors.clear()
        if guess:
            self._begin(guess, self._came, guess=True)

    def back(self, part: Tensor) -> Tensor | None:
        """The last mean with all that became of it, where `part` says so; which is itself if it has not left. None: it
        is zero.
        """
        if not self._left:
            return part
        self._left = False  # the next one has not yet
        self.wait()
        mean = torch.where(part == 0, 0.0, part * self.g.to(part.device))
        for piece in self.pieces:
            piece.scaled(mean)
        return mean

    def wishes(
        self,
        optimizer: Optimizer,
        groups: Groups,
        scales: Mapping[AwayPiece, float] | None = None,
        unscaling: float = 1.0,
    ) -> list[Wish] | None:
        """A step of every piece; None where the optimizer must do it by itself. unscaling: a factor for all."""
        if self.vectors.dtype != torch.float32:
            return None
        wishes = []
        for piece in self.pieces:
            how = groups[id(piece.slot.param)]
            if how is None:
                return None
            scale = scales[piece] if scales is not None else 1.0
            known = optimizer.state.get(piece.param)
            t = int(piece.remember(known)["step"]) if known else 0
            wishes.append(Wish(piece, how, t + 1, scale * unscaling))
        return wishes

    # ------------------------------------------------------------------------------------------------ the step

    def ask(self, wishes: list[Wish]) -> None:
        """The user's step: what was guessed, if that is what he wants; else it is begun now."""
        made = self._result() if self._job else None
        if made is None or made.wishes != wishes:
            self.take_back()
            self._begin(wishes, self.wait, guess=False)
        self.asked = True

    def take_theirs(self, pieces: Sequence[AwayPiece]) -> None:
        """Gradients that the user has put there himself, in place of ours. Nothing that was guessed is left."""
        self.wait()
        for piece in pieces:
            assert piece.slot.param.grad is not None
            self.g[piece.here] = piece.of(piece.slot.param.grad)

    def done(self) -> None:
        """Wait for what was begun."""
        if self._job is not None:
            self._result()
            if self.home is not None:
                self.home.kept()

    def finish(self, optimizer: Optimizer) -> Tensor | None:
        """... and its end: this worker's slice of the new parameters, if there was room for it on the device."""
        made = self._result()
        self._job, self.asked = None, False
        assert made is not None
        for wish in made.wishes:
            optimizer.state[wish.piece.param].update(step=torch.tensor(float(wish.t)), **wish.piece.moments)
        if made.there is not None:
            self.lanes.arrive(made.there)
        return made.there

    def stepped(self) -> Tensor:
        """This worker's slice of the parameters as their masters are, on the device."""
        out, give = self.ring.take(self.vectors.n, self.dtype)
        with self.vectors.at_hand(changed=False) as now:
            out.copy_(now.p)
        there, sent = self.lanes.back(out)
        give(sent)
        self.lanes.arrive(there)
        return there

    def go_home(self, home: Home) -> None:
        """What was stepped becomes this worker's slice of the parameters, which is not on the device."""
        if home.touched:  # after a step that was late began: `follow`
            home.drop()
        elif home.drafted:
            home.accept(self.line.crew)
        else:
            with self.vectors.at_hand(changed=False) as now:
                home.follow(now.p, self.line.crew)

    def take_back(self) -> None:
        """What was stepped on a guess, and that nobody has asked for, was not."""
        if self._job is None or self.asked:
            return
        made, self._job = self._result(), None
        if self.home is not None:
            self.home.drop()
        if made is not None:
            with self.vectors.at_hand(changed=True) as now:
                self.line.crew.all(self.vectors.n, self._work(adam.undoing, made.wishes, now))

    def _result(self) -> Made | None:
        assert self._job is not None
        return crew.result(self._job, f"the step of {self.bucket} on the host")

    def _begin(self, wishes: list[Wish], came: Callable[[], None], *, guess: bool) -> None:
        self._job = Future()
        self.line.submit(self._run, self._job, wishes, came, guess)

    def _run(self, job: Future[Made | None], wishes: list[Wish], came: Callable[[], None], guess: bool) -> None:
        """The gradient is awaited, and the team gets to work; the last of it ends the job."""
        try:
            came()
            if guess and not bool(self._finite.isfinite()):
                self._let_go()
                job.set_result(None)  # nothing would bring the moments back; and the step will hardly be made
                return
            with contextlib.ExitStack() as held:
                now = self.vectors.take()
                held.callback(self.vectors.give, changed=True)
                out, keep = self._room()
                if out is not None:
                    for piece in {*self.pieces} - {wish.piece for wish in wishes}:
                        out[piece.here].copy_(now.p[piece.here])
                work = self._work(adam.stepping, wishes, now, *([out] if out is not None else []))
                until_done = held.pop_all()
        except BaseException as error:
            self._let_go()
            job.set_exception(error)
            return

        def then(error: BaseException | None) -> None:
            try:
                until_done.close()
                if error is not None:
                    raise error
                job.set_result(Made(wishes, keep()))
            except BaseException as error:
                self._let_go()
                job.set_exception(error)

        self.line.crew.spread(self.vectors.n, work, then)

    def _room(self) -> tuple[Tensor | None, Callable[[], Tensor | None]]:
        """For the new parameters, and what becomes of them: those on the device are given."""
        if self.home is None:
            out, give = self._out()
            return out, lambda: self._send_back(out, give)
        draft = self.home.draft()
        return draft, lambda: self._keep(draft)

    def _keep(self, draft: Tensor | None) -> None:
        self._let_go()
        if self.home is not None and draft is not None:
            self.home.keep(draft)

    def _out(self) -> tuple[Tensor, Give]:
        """Where the new parameters are written, and how that is given back."""
        return self.ring.take(self.vectors.n, self.dtype)

    def _let_go(self) -> None:
        """The gradient is not needed any more."""

    def _send_back(self, out: Tensor, give: Give) -> Tensor | None:
        there, sent = None, at_once
        if self.lanes.room(self.yields):
            with contextlib.suppress(torch.OutOfMemoryError):  # later, then: Offload.take_new
                there, sent = self.lanes.back(out)
        give(sent)
        return there

    def _work(self, do: Callable[..., adam.Stretch], wishes: Sequence[Wish], now: Triple, *out: Tensor) -> adam.Stretch:
        """What a thread does with a stretch of this bucket: neighbours that wish for the same, at once."""
        runs = [
            (low, high, do(how, t, *now, self.g, *out, scale=scale))
            for (how, t, scale), some in itertools.groupby(wishes, lambda wish: wish[1:])
            for low, high in _runs(wish.piece.here for wish in some)
        ]

        def work(start: int, stop: int) -> None:
            for low, high, stretch in runs:
                if max(low, start) < min(high, stop):
                    stretch(max(low, start), min(high, stop))

        return work

    # ------------------------------------------------------------------------------------------------ the parameters

    def _marks(self) -> tuple[list[int], Tensor]:
        """Of the parameters: what torch knows of, and what was done behind its back."""
        now = [piece.now() for piece in self.pieces]
        return [x._version for x in now], torch.stack(_norms(now)) if now else torch.zeros(1, device=self.bucket.device)

    def published(self) -> None:
        """The parameters are what their masters say."""
        if self.home is None:
            self._known = self._marks()
        else:
            self.home.touched = False

    def changes(self) -> Tensor:
        """Somebody has written into the parameters since: numbers of which one is then not zero."""
        if self.home is not None:
            self.home.wait()  # until then it reads the masters
            return torch.full((1,), self.home.touched, device=self.bucket.device)
        (versions, norms), (old_versions, old_norms) = self._marks(), self._known
        return norms != old_norms if versions == old_versions else torch.ones_like(norms)

    def follow(self) -> None:
        """The masters of parameters that somebody has written into."""
        self.take_back()
        with self.at_hand(changed=True):
            for piece in self.pieces:
                piece.follow()
        self.published()


def _runs(places: Iterable[slice]) -> Iterator[tuple[int, int]]:
    """Neighbours as one."""
    start = stop = 0
    for place in places:
        if place.start != stop:
            yield start, stop
            start = place.start
        stop = place.stop
    yield start, stop


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors, 2, torch.float32)) if tensors else []
