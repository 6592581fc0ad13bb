"""The step, as one straight block. It is handed parts and never asks what they are.

backward fills buckets -> each leaves as the order says, while backward goes on -> the end of backward finishes what
is under way, so p.grad is the agreed mean when `backward` returns -> at `step` everyone knows whether it counts ->
parts commit, the optimizer steps, the layout publishes, the sync agrees.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.ballot import Poll
from paceline.bucket import Bucket, Slot
from paceline.crossing import Crossing
from paceline.cutting import cut
from paceline.exchange import Exchange
from paceline.guard import Guard, Mode
from paceline.method import Method
from paceline.parts import Comm, Event, Layout, Sync
from paceline.pipeline import Pipeline
from paceline.telemetry import Recorder
from paceline.window import Batch, Window

Watch = list[RemovableHandle]


class Engine:
    """One optimizer's parameters, and what happens to their gradients."""

    def __init__(
        self,
        optimizer: Optimizer,
        named: Callable[[], list[tuple[str, Tensor]]],
        method: Method,
        comm: Comm,
        *,
        recorder: Recorder,
        buffers: Sequence[tuple[str, Tensor]] = (),
        accumulate: int = 1,
        guard: Mode = "skip",
        bucket_bytes: int = 4 << 20,
        first_bytes: int = 1 << 20,
        background: Comm | None = None,
    ) -> None:
        self.optimizer, self.named = optimizer, named
        self.method, self.comm, self.recorder = method, comm, recorder
        self.guard = Guard(guard, comm.rank, recorder)
        self.bucket_bytes, self.first_bytes = bucket_bytes, first_bytes
        self.ex = Exchange(method, comm, optimizer, recorder, background)
        crosses = method.order.crosses
        self.poll = Poll(
            self.ex.background if crosses else comm,
            guard=guard != "off",
            whispers=self.ex.exact_everywhere,
            late=method.sync.lag(),
        )
        self.pipeline = Pipeline()
        self.window = Window(comm.world, accumulate)
        rests = method.layout.rests([p for group in optimizer.param_groups for p in group["params"]])
        self.idle = comm.world == 1 and accumulate == 1 and rests  # nobody to agree with: gradients are left alone
        self.watch: Callable[[Bucket], Watch] = lambda b: []  # hooks.py: tell when its gradients arrive
        self.weigh: Callable[[Bucket], Watch] = lambda b: []  # hooks.py: multiply them by window.scale before
        self.look: Callable[[], None] = lambda: None  # tuner.py: a forward begins
        self.buckets = self.ex.buckets
        self.buffers = list(cut(buffers, comm.world, bucket_bytes))
        self.under_way = False  # a backward is
        self.asked = False  # to step; hooks.py looks whether a loss scaler did
        self.exchanged = self.landed = False  # the gradients of this step have left; their means are here
        self._hooks: Watch = []
        self._trainable: list[bool] = []
        self._weighs = False  # workers' batches have differed
        self._coming: list[Bucket] = []  # of this backward, by index: not full yet, or one before them is not
        self._final: Bucket | None = None  # ... the last to be ready
        self._ready: list[Bucket] = []  # pieces that could leave
        self._out: list[Bucket] = []  # ... and those that have left
        self._sends = False
        self.company = False  # api.py: one backward may feed other engines too
        self._backwards = self._sent = 0
        self.crossing = Crossing(self)

    # ------------------------------------------------------------------------------------------------ before backward

    def refresh(self) -> None:
        """Take up parameters that were added or thawed since; all workers must have done the same."""
        trainable = [p.requires_grad for group in self.optimizer.param_groups for p in group["params"]]
        if self.idle or trainable == self._trainable:
            return
        named = self.named()
        known = {id(s.param) for b in self.buckets for s in b.slots}
        new = [(name, p) for name, p in named if p.requires_grad and id(p) not in known]
        if self._trainable:
            now = "\n".join(f"{name} {'trained' if p.requires_grad else 'frozen'}" for name, p in named)
            self.comm.agree(f"trainable parameters at step {self.ex.step}", now)
        piece_bytes = self.method.order.piece_bytes() if self.method.reducer.cuttable() else None
        for b in cut(new, self.comm.world, self.bucket_bytes, self.first_bytes, self.method.reducer.kind):
            b.index = len(self.buckets)
            if piece_bytes:
                b.divide(piece_bytes, self.comm.world)
            self.buckets.append(b)
            self._hooks += self.watch(b)
            if self._weighs:
                self._hooks += self.weigh(b)
            self.method.layout.own(b, self.ex)
        self._trainable = trainable

    def recut(self, bucket_bytes: int) -> None:
        """Other buckets for the same parameters, between two steps; what parts remember moves along."""
        self.settle()
        self.method.layout.collect(self.ex)
        saved = [part.state.save(self.buckets) for part in self.method.parts()]
        for hook in self._hooks:
            hook.remove()
        self.bucket_bytes, self.first_bytes = bucket_bytes, min(bucket_bytes, self.first_bytes)
        self._hooks, self._trainable = [], []
        self.buckets.clear()
        self.refresh()
        for part, memory in zip(self.method.parts(), saved, strict=True):
            part.state.load(memory, self.buckets)

    def take_batch(self, batch: Batch) -> None:
        """The loader hands out a batch."""
        self.window.take(batch)
        self._weigh_arrivals()

    def _weigh_arrivals(self) -> None:
        """Gradients are multiplied on arrival from the first time on that a worker's share is not the usual one."""
        if self.window.scale != 1.0 and not self._weighs:
            self._weighs = True
            for b in self.buckets:
                self._hooks += self.weigh(b)

    # ------------------------------------------------------------------------------------------------ during backward

    def begin(self) -> None:
        """The first gradient of a backward has arrived."""
        self.window.count()
        self._arm(sends=self.window.closing and self.method.sync.due(self.ex.step))

    def _arm(self, *, sends: bool) -> None:
        self.under_way, self._sends = True, sends
        self._backwards += 1
        self.poll.begin(self.ex.step, self._backwards)
        self._coming, self._ready, self._out = [b for b in self.buckets if b.active], [], []
        self._final = self._coming[-1] if self._coming else None
        for b in self._coming:
            b.arm()

    def arrive(self, b: Bucket, slot: Slot) -> None:
        """Autograd has accumulated a parameter's gradient."""
        b.arrive(slot)
        while self._sends and self._coming and self._coming[0].full:
            self._load(self._coming[0])
            self._next()

    def _next(self) -> None:
        """A bucket is ready, full or not. They become so by index, on every worker alike."""
        self._ready += self._coming.pop(0).pieces
        self._send(Event.READY)

    def _send(self, event: Event) -> None:
        for b in list(self.method.order.next(self._ready, self._out, event)):
            self._ready.remove(b)
            self._out.append(b)
            b.step = self.ex.step
            if self._final and b is self._final.pieces[0]:
                self.poll.close(self._final, self.buckets, self.pipeline.backlog())
            self.pipeline.start(self.ex.grad(b), of=b.whole, size=b.flat.nbytes)
            if len(self._out) > self.method.layout.at_once and not self.company:  # or two might wait for each other
                with self.waiting():
                    self.pipeline.drain(left=self.method.layout.at_once)

    def _load(self, b: Bucket) -> None:
        b.take()
        b.flat[b.n :].zero_()  # a mean that is not exact may have left something in the padding
        if (factor := self.window.factor()) != 1.0:
            b.flat.mul_(factor)
        if self._sends:
            self.poll.look(b)

    def flush(self) -> None:
        """Backward has ended: what is not on its way yet goes now, full or not."""
        self.under_way = False
        if not self.window.closing:
            for b in self._coming:
                b.take()
                b.hide()
            return
        if self._sends:
            self._send_rest()
        elif self.window.several:
            for b in self._coming:
                self._load(b)
                b.bind([s.arrived for s in b.slots])
        if self.window.several:
            self.window.close()
            self._weigh_arrivals()

    def _send_rest(self) -> None:
        for b in self._coming:
            self._load(b)
        early = self.crossing.on  # the next forward asks for these first
        if early and not (self._final and self.poll.whispers_in(self._final)):
            self.poll.call(self.buckets, self.pipeline.backlog())
        if early:
            self._share_buffers()
        while self._coming:
            self._next()
        self._send(Event.END)
        self.pipeline.rearrange(self.method.order.urgency)
        if not early:
            self.poll.call(self.buckets)
            self._share_buffers()

    def _share_buffers(self) -> None:
        for b in self.buffers:
            self.pipeline.start(self._agree_buffers(b), of=b)

    def finish(self) -> None:
        """The means; p.grad is then what the user sees."""
        if not self._sends:
            return
        self.exchanged, self.landed = True, False
        if not self.crossing.on:
            self.land()
            return
        for b in self.buckets:  # who asks for them waits first, and then finds them there
            b.bind([s.arrived for s in b.slots])

    def land(self) -> None:
        """Wait for the means."""
        with self.waiting():
            self.pipeline.drain()
            used = self.poll.used(self.buckets)
        self.landed = True
        if self.poll.ballot and not self.ex.exact_everywhere:
            self._poison(self.poll.ballot.any_bad())
        for b in self.buckets:
            b.bind(used[b.index])

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time and bytes go to telemetry; after a failure nothing that was under way is used again."""
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            self.pipeline.abandon()
            for b in self.buckets:
                b.abandon()
            raise
        self.recorder.wait_s += time.perf_counter() - began
        self._count()

    def _count(self) -> None:
        """What was sent since goes to telemetry."""
        self.recorder.sent, self._sent = self.recorder.sent + self.ex.sent - self._sent, self.ex.sent

    async def _agree_buffers(self, b: Bucket) -> None:
        tensors, views = [s.param for s in b.slots], [s.view for s in b.slots]
        torch._foreach_copy_(views, tensors)
        await self.method.sync.on_buffers(b, self.ex)
        torch._foreach_copy_(tensors, views)

    def _poison(self, bad: Tensor) -> None:
        """A reducer may hide an infinity of one worker; a loss scaler must see it on all. One element is enough."""
        nan = torch.where(bad, math.nan, 0.0)
        for b in filter(lambda b: b.active, self.buckets):
            b.kept[:1].add_(nan.to(b.kept.device))

    # ------------------------------------------------------------------------------------------------ the step

    def step(self, do: Callable[[], Any]) -> Any:
        """The user called optimizer.step(); `do` is the optimizer's own."""
        self.asked = True
        if self.idle:
            self.ex.step += 1
            return do()
        if not self.window.closing:
            self.window.micro += 1
            return None
        if not self.exchanged and self.method.sync.due(self.ex.step):
            self._arm(sends=True)  # no gradient arrived here, or all were held back: join the others now
            self.flush()
            self.finish()
        if self.exchanged and not self.landed:
            self.window.over()
            return self.crossing.defer(do)
        alone = not self.exchanged
        bad = self.poll.bad_alone(s.param for b in self.buckets for s in b.slots) if alone else self.poll.bad()
        if bad and (alone or self.poll.late):  # others have made their step, or this one's gradients have left
            return self._make(lambda: self.guard.skipped(self.ex.step - self.poll.late, bad, alone=alone))
        if not self.method.membership.commit(not bad):
            self.rollback()
            self.window.over()
            return self.guard.skipped(self.ex.step, bad)
        self.guard.counted(self.buckets)
        return self._make(do)

    def left_out(self) -> None:
        """A loss scaler found infinities and did not call `step`. Where gradients are agreed on, so did all the others.
        Where they are this worker's own, the others go on, and it must not miss what they agree on after it."""
        if not (self.idle or self.exchanged or self.method.sync.due(self.ex.step)):
            self._make(lambda: None)

    @torch.no_grad()
    def _make(self, do: Callable[[], Any]) -> Any:
        """The step: of the optimizer, and of everybody together."""
        sync, layout = self.method.sync, self.method.layout
        if type(sync).before_step is not Sync.before_step:
            self._together(self.ex.before_step)
        self.commit()
        with torch.enable_grad():
            result = sync.apply(lambda: layout.apply(do, self.ex), self.ex)
        if type(sync).on_step is not Sync.on_step or type(layout).publish is not Layout.publish:
            self._together(self.ex.after_step, buffers=not self.exchanged and sync.agrees(self.ex.step))
            self.commit()
        self.over(made=True)
        self.window.over()
        return result

    def _together(self, what: Callable[[Bucket], Coroutine[Any, None, None]], *, buffers: bool = False) -> None:
        with self.waiting():
            for b in self.buckets:
                b.step = self.ex.step
                self.pipeline.start(what(b))
                self.pipeline.drain(left=self.method.layout.at_once)
            if buffers:
                self._share_buffers()
            self.pipeline.drain()

    def commit(self) -> None:
        for part in self.method.parts():
            part.state.commit()

    def rollback(self) -> None:
        for part in self.method.parts():
            part.state.rollback()
        if self.exchanged:
            self.poll.heard()
        self.over(made=False)

    def over(self, *, made: bool) -> None:
        """The step was made, or given up."""
        self._count()
        self.ex.step += made
        self.exchanged, self._backwards = False, 0
        self.poll.begin(self.ex.step, 0)
        for b in self.buckets:
            b.reset()

    def zero_grad(self, do: Callable[[], None]) -> None:
        """The user called optimizer.zero_grad(): nothing to do in the middle of a window."""
        if self.window.micro or self.crossing.zeroes(do):
            return
        self.rollback()  # of a step that was exchanged and never made: a loss scaler has found infinities
        self.window.over()
        do()
        for b in self.buckets:
            b.drop()

    def settle(self) -> None:
        """Before an evaluation, a checkpoint and the end: what is under way arrives."""
        self.crossing.land()
        self.method.sync.settle(self.ex)
        self.method.layout.settle(self.ex)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold communication back: backward inside only adds to the window."""
        if self.idle:
            self.idle = False
            self.refresh()
        before, self.window.holding = self.window.holding, True
        try:
            yield
        finally:
            self.window.holding = before
