"""State that is stepped on the host while the device computes: ZeRO-Offload.

[Note: offloaded] A bucket is offloaded if the fp32 master of its parameters and the optimizer's moments are in the
host's memory (cpu.py) or on its disk (nvme.py). Its gradients leave the device as soon as they are agreed on, while
backward goes on. With Adam and AdamW the host then steps the bucket ahead of `optimizer.step()` (kernels/adam.py),
expecting that the step will be made and that the gradients are not scaled before it. The new parameters wait on the
device, in memory that backward has given back, and `optimizer.step()` has little left to do but to put them in their
place. So the parameters change where the user says so, and nowhere else.

A step ahead that was wrong is undone: when a step is given up, after a second backward, where gradients are clipped.
Undoing is Adam's formula solved for what was before. A loop that clips in one step probably clips in the next: while it
does, no bucket is stepped ahead, and the host begins when `step` is called. Under a loss scaler no bucket is ever
stepped ahead, and with step="on_step" neither.

[Note: ordinary gradients] Undoing subtracts from a moment what the gradient added to it. If that is far larger than the
moment was, the moment is lost in its rounding. So a bucket is stepped ahead only if its gradient is ordinary: not above
ORDINARY times the largest of the last steps that counted, which is forgotten slowly, about as Adam's first moment
forgets. What undoing leaves is then a few roundings of fp32. In the first step, and where moments were loaded, it is
not known what is ordinary. A bucket that is not stepped ahead waits for `step`, where nothing has to be undone.

Other optimizers step their shards in the host's memory by themselves, when `step` is called.

[Note: placeholder] On the device a gradient that has left is represented by a vector of ones without memory: the engine
may make it NaN for all to see, and a copy of it says what of the gradient the next one is to be added to.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.core.bucket import Bucket
from paceline.core.shard import Shard, ShardCut
from paceline.kernels import adam
from paceline.offload.copies import CopyStreams, Give, Ring, at_once
from paceline.offload.host_threads import StepQueue, result
from paceline.offload.params import ParameterStore
from paceline.offload.vectors import Triple, Vectors

_MOMENTS = ("exp_avg", "exp_avg_sq")
ORDINARY = 16.0  # times the largest norm of the last steps; what is above that is not stepped ahead
_FORGETTING = 0.95  # the largest norm is multiplied by that in every step

AdamOf = Mapping[int, adam.Adam | None]  # the settings a parameter (by id) is stepped with; None: not stepped here


class ShardStep(NamedTuple):
    """The step of one shard: with which settings, which step it is, and with which multiple of the gradient."""

    shard: OffloadedShard
    how: adam.Adam
    t: int
    scale: float


class BucketStep(NamedTuple):
    """A step that the host has made of a bucket."""

    steps: list[ShardStep]
    there: Tensor | None  # the new parameters on the device, if there was room
    norm: float  # of the gradient it was made with: [Note: ordinary gradients]


@dataclass(frozen=True)
class HostMeans:
    """What the buckets of one optimizer share on the host."""

    streams: CopyStreams
    ring: Ring  # of vectors that new parameters, and gradients that are not kept, pass through
    queue: StepQueue  # of the buckets that wait for the same, the device or a disk too


class OffloadedShard(Shard):
    """A shard of an offloaded bucket. Factors of its gradient are remembered, not multiplied."""

    offloaded: OffloadedBucket

    def __init__(self, cut: ShardCut, *, offloaded: OffloadedBucket) -> None:
        """Cut a shard inside `at_hand(changed=True)` of its bucket: its master takes the parameter's values."""
        self.offloaded = offloaded
        self.factors: list[Tensor | float] = []
        self.has_moments = False  # they are not zero
        super().__init__(cut)
        self.param, *moments = offloaded.vectors.show(self.here)
        self.moments = dict(zip(_MOMENTS, moments, strict=True))

    def at_hand(self, *, changed: bool) -> AbstractContextManager[Any]:
        return self.offloaded.at_hand(changed=changed)

    def now(self) -> Tensor:
        return super().now() if self.offloaded.store is None else self.offloaded.store.read(self.here)

    def look(self, x: Tensor) -> Tensor:
        with self.at_hand(changed=False):
            return x.detach().clone()

    def write(self, x: Tensor) -> None:
        with self.at_hand(changed=True):
            super().write(x)

    def published(self) -> None:
        self.offloaded.published()

    def remember(self, known: dict[str, Any]) -> dict[str, Any]:
        for key, mine in self.moments.items():
            if key in known and known[key] is not mine:
                known[key] = mine.copy_(known[key])
                self.has_moments = True
                self.offloaded.forget_norms()
        return known

    def remembers(self) -> bool:
        return self.offloaded.received

    def grad(self) -> Tensor:
        return self.offloaded.grad(self) if self.offloaded.received else super().grad()

    def scale(self, factor: Tensor | float) -> None:
        if not isinstance(factor, Tensor) and factor == 0.0:  # zero times what is not finite is zero here
            self.offloaded.zero(self)
            self.offloaded.norm_of[self] = torch.zeros_like(self.offloaded.norm_of[self])
            self.factors.clear()
        else:
            self.offloaded.check_kept("a gradient is multiplied: clipped, or divided by a loss scale")
            self.factors.append(factor)

    def apply_factors(self, x: Tensor) -> None:
        """Multiply this shard of x, a vector on the device, by all that its gradient was multiplied by."""
        for factor in self.factors:
            x[self.here].mul_(factor)

    def norm(self, p: float, dtype: torch.dtype) -> Tensor:
        known = p == 2 and self.offloaded.received
        norm = self.offloaded.norm_of[self].to(dtype) if known else super().norm(p, dtype).to(self.bucket.device)
        for factor in self.factors:
            norm = norm * (factor.abs().to(norm) if isinstance(factor, Tensor) else abs(factor))
        return norm

    def finite(self) -> Tensor:
        if not self.offloaded.received:
            return super().finite()
        return (self.offloaded.norm_of[self] * self.offloaded.placeholder[0]).isfinite()

    def take(self) -> None:
        """Give the optimizer the gradient, for a step of its own. The master is up to date already: `Offload.begin`."""
        self.show(self.grad().to(self.param.dtype, copy=True).mul_(self.take_factors({})))

    def take_factors(self, values: dict[int, float]) -> float:
        """Give the product of the factors, and forget them. values: those of the factors that are tensors, by id."""
        product = 1.0
        for factor in self.factors:
            product *= values[id(factor)] if isinstance(factor, Tensor) else factor
        self.factors.clear()
        return product


class OffloadedBucket:
    """One bucket whose state is stepped on the host: [Note: offloaded]."""

    def __init__(self, b: Bucket, vectors: Vectors, means: HostMeans) -> None:
        self.bucket, self.vectors = b, vectors
        self.streams, self.ring, self.queue = means.streams, means.ring, means.queue
        self.store: ParameterStore | None = None  # of this worker's shard of the parameters, if not on the device
        self.dtype = b.flat.dtype
        self.g = self._gradient_memory()
        self.placeholder = self.g  # [Note: placeholder]
        self._gradient_left = False  # whether the last mean has left the device
        self.norm_of: dict[OffloadedShard, Tensor] = {}  # norms of g as it came
        self.shards: list[OffloadedShard] = []
        self._wait_for_copy: Callable[[], None] | None = None  # until g is here
        self._norm = self.streams.host_vector(1, torch.float32, pin=True)  # the sum of norm_of, copied along with g
        self._largest_norm = 0.0  # of the gradients of the last steps that counted: [Note: ordinary gradients]
        self._job: Future[BucketStep | None] | None = None
        self.requested = False  # the user has called `step` for what the job does
        self.leave_free = 0  # bytes of the device that are for the new parameters of other buckets
        self._published: Any = None  # marks of the parameters as they were published: `_marks`

    @contextlib.contextmanager
    def at_hand(self, *, changed: bool) -> Iterator[Triple]:
        """Have all that is not on the device in memory inside the context. changed: it is written there."""
        with self.vectors.at_hand(changed=changed) as now:
            if self.store is None:
                yield now
            else:
                with self.store.at_hand(changed=changed):
                    yield now

    @property
    def received(self) -> bool:
        """Whether what the bucket keeps of the last mean has been received here."""
        return self.bucket.kept is self.placeholder

    def wait_for_gradient(self) -> None:
        """Wait until g is here."""
        if self._wait_for_copy is not None:
            self._wait_for_copy()
            self._wait_for_copy = None

    def _gradient_memory(self) -> Tensor:
        """Take memory for the gradients. They stay there until the next ones come, so that a step can be undone."""
        return self.streams.host_vector(self.vectors.n, self.dtype, pin=True)

    def grad(self, shard: OffloadedShard) -> Tensor:
        """Give the gradient of a shard."""
        self.wait_for_gradient()
        return self.g[shard.here]

    def zero(self, shard: OffloadedShard) -> None:
        """Make the gradient of a shard zero."""
        self.undo()
        self.grad(shard).zero_()
        self._norm.zero_()  # what is left of it is not known

    def check_kept(self, what: str) -> None:
        """Refuse `what`, which needs the gradient, if the gradient is not kept."""

    def make_ready(self) -> None:
        """End all that reads the last gradient, so that the next may come."""
        self.undo()
        self.wait_for_step()  # a late step reads the last gradient
        if self.store is not None:
            self.store.wait()
        self.wait_for_gradient()

    def receive(self, mean: Tensor, ahead: list[ShardStep] | None) -> None:
        """Copy this worker's shard of a mean to the host. With `ahead`, make these steps when it is there."""
        self.make_ready()
        norms = _norms([mean[shard.here] for shard in self.shards]) or [mean.new_zeros((), dtype=torch.float32)]
        self.norm_of = dict(zip(self.shards, norms, strict=False))
        copies = [(mean, self.g), (torch.stack(norms).sum(0, keepdim=True), self._norm)]
        self._wait_for_copy = self.streams.copy_to_host(copies)
        self._gradient_left = True
        self.placeholder = mean.new_ones(1).expand_as(mean)
        self.bucket.keep(self.placeholder)
        for shard in self.shards:
            shard.factors.clear()
        if ahead:
            self._begin(ahead, self._wait_for_copy, ahead=True)

    def bring_back(self, part: Tensor) -> Tensor | None:
        """Give the last mean with all that it was multiplied by, on the device, where `part` is not zero.

        `part` is a copy of the placeholder, or the mean itself where that has not left. None: the mean is zero.
        """
        if not self._gradient_left:
            return part
        self._gradient_left = False  # the next one is still on the device
        self.wait_for_gradient()
        mean = torch.where(part == 0, 0.0, part * self.g.to(part.device))
        for shard in self.shards:
            shard.apply_factors(mean)
            shard.factors.clear()
        return mean

    def plan_steps(
        self,
        optimizer: Optimizer,
        adam_of: AdamOf,
        scales: Mapping[OffloadedShard, float] | None = None,
        unscaling: float = 1.0,
    ) -> list[ShardStep] | None:
        """Give the next step of every shard. None: the optimizer must make it by itself.

        scales: a factor of each gradient; unscaling: a factor of all.
        """
        if self.vectors.dtype != torch.float32:
            return None
        steps = []
        for shard in self.shards:
            how = adam_of[id(shard.slot.param)]
            if how is None:
                return None
            scale = scales[shard] if scales is not None else 1.0
            known = optimizer.state.get(shard.param)
            if not known and shard.has_moments:  # the user has emptied the optimizer's state
                self._forget_moments(shard)
            t = int(shard.remember(known)["step"]) if known else 0
            steps.append(ShardStep(shard, how, t + 1, scale * unscaling))
        return steps

    def _forget_moments(self, shard: OffloadedShard) -> None:
        self.undo()
        self.wait_for_step()
        with self.vectors.at_hand(changed=True):
            for moment in shard.moments.values():
                moment.zero_()
        shard.has_moments = False
        self.forget_norms()

    # ------------------------------------------------------------------------------------------------ the step

    def request(self, steps: list[ShardStep]) -> None:
        """Make the user's step: take what was stepped ahead if it is the same, else begin now."""
        made = self._result() if self._job else None
        if made is None or made.steps != steps:
            self.undo()
            self._begin(steps, self.wait_for_gradient, ahead=False)
        self.requested = True

    def replace_gradients(self, shards: Sequence[OffloadedShard]) -> None:
        """Take the gradients that the user has put into p.grad in place of ours. Nothing is stepped ahead by now."""
        self.wait_for_gradient()
        for shard in shards:
            assert shard.slot.param.grad is not None
            self.g[shard.here] = shard.of(shard.slot.param.grad)
            self._norm.zero_()  # that of the user's gradients is not known

    def wait_for_step(self) -> None:
        """Wait for the step that was begun."""
        if self._job is not None:
            self._result()
            if self.store is not None:
                self.store.wait_for_draft()

    def finish(self, optimizer: Optimizer) -> Tensor | None:
        """End the step, and give this worker's shard of the new parameters if there was room on the device."""
        made = self._result()
        self._job, self.requested = None, False
        assert made is not None
        self._largest_norm = max(_FORGETTING * self._largest_norm, made.norm)
        for step in made.steps:
            step.shard.has_moments = True
            optimizer.state[step.shard.param].update(step=torch.tensor(float(step.t)), **step.shard.moments)
        if made.there is not None:
            self.streams.arrive(made.there)
        return made.there

    def new_parameters(self) -> Tensor:
        """Give this worker's shard of the parameters as their masters are, on the device."""
        out, give = self.ring.take(self.vectors.n, self.dtype)
        with self.vectors.at_hand(changed=False) as now:
            out.copy_(now.p)
        there, sent = self.streams.send_to_device(out)
        give(sent)
        self.streams.arrive(there)
        return there

    def update_store(self, store: ParameterStore) -> None:
        """Make what was stepped this worker's shard of the parameters, which is not on the device."""
        if store.touched:  # after a late step began: `follow`
            store.drop_draft()
        elif store.drafted:
            store.accept_draft(self.queue.threads)
        else:
            with self.vectors.at_hand(changed=False) as now:
                store.round_from(now.p, self.queue.threads)

    def undo(self) -> None:
        """Undo a step that was made ahead, unless the user's step has come meanwhile."""
        if self._job is None or self.requested:
            return
        made, self._job = self._result(), None
        if self.store is not None:
            self.store.drop_draft()
        if made is not None:
            with self.vectors.at_hand(changed=True) as now:
                self.queue.threads.all(self.vectors.n, self._work(adam.undoing, made.steps, now))

    def _result(self) -> BucketStep | None:
        assert self._job is not None
        return result(self._job, f"the step of {self.bucket} on the host")

    def _begin(self, steps: list[ShardStep], wait: Callable[[], None], *, ahead: bool) -> None:
        self._job = Future()
        self.queue.submit(self._run, self._job, steps, wait, ahead)

    def _run(
        self, job: Future[BucketStep | None], steps: list[ShardStep], wait: Callable[[], None], ahead: bool
    ) -> None:
        """Wait for the gradient, and let the host's threads step. The last of them ends the job."""
        try:
            wait()
            if ahead and not self._can_be_undone():
                self._release_gradient()
                job.set_result(None)
                return
            with contextlib.ExitStack() as held:
                now = self.vectors.take()
                held.callback(self.vectors.give, changed=True)
                out, keep = self._output()
                if out is not None:
                    for shard in {*self.shards} - {step.shard for step in steps}:
                        out[shard.here].copy_(now.p[shard.here])
                norm = float(self._norm) * max((abs(step.scale) for step in steps), default=0.0)
                work = self._work(adam.stepping, steps, now, *([out] if out is not None else []))
                until_done = held.pop_all()
        except BaseException as error:
            self._release_gradient()
            job.set_exception(error)
            return

        def then(error: BaseException | None) -> None:
            try:
                until_done.close()
                if error is not None:
                    raise error
                job.set_result(BucketStep(steps, keep(), norm))
            except BaseException as error:
                self._release_gradient()
                job.set_exception(error)

        self.queue.threads.spread(self.vectors.n, work, then)

    def _can_be_undone(self) -> bool:
        """Say whether a step with the gradient that has come could be undone: [Note: ordinary gradients]."""
        norm = float(self._norm)  # nothing compares with NaN, and nothing is above infinity
        return 0.0 < self._largest_norm < math.inf and norm <= ORDINARY * self._largest_norm

    def forget_norms(self) -> None:
        """Note that the moments were written from outside: which gradients are ordinary is not known any more."""
        self._largest_norm = 0.0

    def _output(self) -> tuple[Tensor | None, Callable[[], Tensor | None]]:
        """Give memory for the new parameters, and what keeps them: it gives those that are on the device."""
        if self.store is None:
            out, give = self._output_vector()
            return out, lambda: self._send(out, give)
        draft = self.store.draft_memory()
        return draft, lambda: self._keep(draft)

    def _keep(self, draft: Tensor | None) -> None:
        self._release_gradient()
        if self.store is not None and draft is not None:
            self.store.keep_draft(draft)

    def _output_vector(self) -> tuple[Tensor, Give]:
        """Give a vector for new parameters on their way to the device, and how it is given back."""
        return self.ring.take(self.vectors.n, self.dtype)

    def _release_gradient(self) -> None:
        """Give the gradient's memory back, where it is not this bucket's own."""

    def _send(self, out: Tensor, give: Give) -> Tensor | None:
        there, sent = None, at_once
        if self.streams.has_room(self.leave_free):
            with contextlib.suppress(torch.OutOfMemoryError):  # they are sent later then: Offload.take_new
                there, sent = self.streams.send_to_device(out)
        give(sent)
        return there

    def _work(
        self, do: Callable[..., adam.Stretch], steps: Sequence[ShardStep], now: Triple, *out: Tensor
    ) -> adam.Stretch:
        """Give what a thread does with a stretch of this bucket. Neighbours with the same settings are one call."""
        runs = [
            (low, high, do(how, t, *now, self.g, *out, scale=scale))
            for (how, t, scale), some in itertools.groupby(steps, lambda step: step[1:])
            for low, high in _runs(step.shard.here for step in some)
        ]

        def work(start: int, stop: int) -> None:
            for low, high, stretch in runs:
                if max(low, start) < min(high, stop):
                    stretch(max(low, start), min(high, stop))

        return work

    # ------------------------------------------------------------------------------------------------ the parameters

    def _marks(self) -> tuple[list[int], Tensor]:
        """Give marks of the parameters by which a change is seen: torch's version counters, and norms.

        The norms show what was written through `p.data`, of which torch does not know.
        """
        now = [shard.now() for shard in self.shards]
        return [x._version for x in now], torch.stack(_norms(now)) if now else torch.zeros(1, device=self.bucket.device)

    def published(self) -> None:
        """Note that the parameters are their masters now, rounded."""
        if self.store is None:
            self._published = self._marks()
        else:
            self.store.touched = False

    def changes(self) -> Tensor:
        """Give numbers of which one is not zero if the parameters were written into since they were published."""
        if self.store is not None:
            self.store.wait()  # until then the masters are being read
            return torch.full((1,), self.store.touched, device=self.bucket.device)
        (versions, norms), (old_versions, old_norms) = self._marks(), self._published
        return norms != old_norms if versions == old_versions else torch.ones_like(norms)

    def follow(self) -> None:
        """Let the masters follow parameters that the user has written into."""
        self.undo()
        with self.at_hand(changed=True):
            for shard in self.shards:
                shard.follow()
        self.published()


def _runs(places: Iterable[slice]) -> Iterator[tuple[int, int]]:
    """Join places that lie side by side."""
    start = stop = 0
    for place in places:
        if place.start != stop:
            yield start, stop
            start = place.start
        stop = place.stop
    yield start, stop


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms in fp32 at least."""
    if not tensors:
        return []
    return list(torch._foreach_norm(tensors, 2, torch.promote_types(tensors[0].dtype, torch.float32)))
