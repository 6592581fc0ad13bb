"""The step, as one straight block. It is handed parts and never asks what they are.

backward fills buckets -> each leaves as the order says, while backward goes on -> the end of backward finishes what
is under way, so p.grad is the agreed mean when `backward` returns -> at `step` everyone knows whether it counts ->
parts commit, the optimizer steps, the layout publishes, the sync agrees.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.ballot import Ballot, all_well, whisper
from paceline.bucket import Bucket, Slot, cut
from paceline.errors import NonFiniteError
from paceline.exchange import Exchange
from paceline.method import Method
from paceline.parts import Comm, Event, Layout, Sync
from paceline.pipeline import Pipeline
from paceline.telemetry import Note, Recorder, Skip
from paceline.window import Batch, Window

PATIENCE = 20  # steps in a row that may fail to count before training is given up


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
        guard: Literal["skip", "raise", "off"] = "skip",
        bucket_bytes: int = 4 << 20,
        first_bytes: int = 1 << 20,
    ) -> None:
        self.optimizer, self.named = optimizer, named
        self.method, self.comm, self.recorder, self.guard = method, comm, recorder, guard
        self.bucket_bytes, self.first_bytes = bucket_bytes, first_bytes
        self.ex = Exchange(method, comm, optimizer)
        self.pipeline = Pipeline()
        self.window = Window(comm.world, accumulate)
        self.idle = comm.world == 1 and accumulate == 1  # nobody to agree with: gradients are left alone
        self.watch: Callable[[Bucket], None] = lambda b: None  # hooks.py: tell when its gradients arrive
        self.weigh: Callable[[Bucket], None] = lambda b: None  # hooks.py: multiply them by window.scale before
        self.buckets: list[Bucket] = []
        self.buffers = cut(buffers, comm.world, bucket_bytes)
        self.under_way = False  # a backward is
        self.skipped = 0  # steps in a row that did not count
        self._trainable: list[bool] = []
        self._weighs = False  # workers' batches have differed
        self._unsent: list[Bucket] = []
        self._extremes: list[Tensor] = []
        self._last: Bucket | None = None  # the bucket that carries the whisper
        self._sends = self._exchanged = self._told = False
        self._backwards = self._sent = 0
        self._ballot: Ballot | None = None

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
        for b in cut(new, self.comm.world, self.bucket_bytes, self.first_bytes, self.method.reducer.kind):
            b.index = len(self.buckets)
            self.buckets.append(b)
            self.watch(b)
            if self._weighs:
                self.weigh(b)
        self._trainable = trainable

    def take_batch(self, batch: Batch) -> None:
        """The loader hands out a batch."""
        self.window.take(batch)
        self._weigh_arrivals()

    def _weigh_arrivals(self) -> None:
        """Gradients are multiplied on arrival from the first time on that a worker's share is not the usual one."""
        if self.window.scale != 1.0 and not self._weighs:
            self._weighs = True
            for b in self.buckets:
                self.weigh(b)

    # ------------------------------------------------------------------------------------------------ during backward

    def begin(self) -> None:
        """The first gradient of a backward has arrived."""
        self.window.count()
        self._arm(sends=self.window.closing and self.method.sync.due(self.ex.step))

    def _arm(self, *, sends: bool) -> None:
        self.under_way, self._sends = True, sends
        self._backwards += 1
        self._extremes.clear()
        self._ballot = self._last = None
        self._unsent = [b for b in self.buckets if b.active]
        for b in self._unsent:
            b.arm()

    def arrive(self, b: Bucket, slot: Slot) -> None:
        """Autograd has accumulated a parameter's gradient."""
        b.arrive(slot)
        if b.full and self._sends:
            self._send(Event.READY)

    def _send(self, event: Event) -> None:
        for b in list(self.method.order.next(self._unsent, event)):
            self._unsent.remove(b)
            b.step = self.ex.step
            self._load(b)
            if self.guard != "off":
                self._extremes += torch.aminmax(b.flat)  # NaN and infinity show in them; the cheapest pass there is
            if not self._unsent and self.ex.exact_everywhere and not b.flat.is_cuda and b.flat.itemsize >= 4:
                self._last = b
                whisper(b, step=self.ex.step, backwards=self._backwards, trouble=self._trouble())
            self.pipeline.start(self.ex.grad(b))

    def _trouble(self) -> bool:
        """Is there anything the other workers must know of?"""
        absent = any(s.param.requires_grad and not s.arrived for b in self.buckets for s in b.slots)
        return absent or not all(math.isfinite(x) for x in self._extremes)

    def _load(self, b: Bucket) -> None:
        b.take()
        b.flat[b.n :].zero_()  # a mean that is not exact may have left something in the padding
        if (factor := self.window.factor()) != 1.0:
            b.flat.mul_(factor)

    def flush(self) -> None:
        """Backward has ended: what is not on its way yet goes now, full or not."""
        self.under_way = False
        if not self.window.closing:
            for b in self._unsent:
                b.take()
                b.hide()
            return
        if self._sends:
            self._send(Event.END)
            if self._last is None:
                self._ballot = self._vote()
            for b in self.buffers:
                self.pipeline.start(self._agree_buffers(b))
        elif self.window.several:
            for b in self._unsent:
                self._load(b)
                b.bind([s.arrived for s in b.slots])
        if self.window.several:
            self.window.close()
            self._weigh_arrivals()

    def finish(self) -> None:
        """Wait for the means; p.grad is then what the user sees."""
        if not self._sends:
            return
        began = time.perf_counter()
        try:
            self.pipeline.drain()
            if self._last and not all_well(self._last):
                self._ballot = self._vote()
            used = self._ballot.used() if self._ballot else None
        except BaseException:
            self.pipeline.abandon()
            for b in self.buckets:
                b.abandon()
            raise
        self.recorder.wait_s += time.perf_counter() - began
        self.recorder.sent += self.comm.sent - self._sent
        self._sent = self.comm.sent
        if self._ballot and not self.ex.exact_everywhere:
            self._poison(self._ballot)
        for b in self.buckets:
            b.bind(used[b.index] if used else [s.arrived for s in b.slots])
        self._exchanged = True

    def _vote(self) -> Ballot:
        return Ballot(self.comm, self.buckets, self._extremes, step=self.ex.step, backwards=self._backwards)

    async def _agree_buffers(self, b: Bucket) -> None:
        tensors, views = [s.param for s in b.slots], [s.view for s in b.slots]
        torch._foreach_copy_(views, tensors)
        await self.method.sync.on_buffers(b, self.ex)
        torch._foreach_copy_(tensors, views)

    def _poison(self, ballot: Ballot) -> None:
        """A reducer may hide an infinity of one worker; a loss scaler must see it on all. One element is enough."""
        nan = torch.where(ballot.any_bad(), math.nan, 0.0)
        for b in self.buckets:
            b.flat[:1].add_(nan.to(b.flat.device))

    # ------------------------------------------------------------------------------------------------ the step

    def step(self, do: Callable[[], Any]) -> Any:
        """The user called optimizer.step(); `do` is the optimizer's own."""
        if self.idle:
            self.ex.step += 1
            return do()
        if not self.window.closing:
            self.window.micro += 1
            return None
        if not self._exchanged and self.method.sync.due(self.ex.step):
            self._arm(sends=True)  # no gradient arrived here, or all were held back: join the others now
            self.flush()
            self.finish()
        bad = self._ballot.bad() if self._ballot else []
        if not self.method.membership.commit(not bad):
            return self._skip(bad)
        for part in self.method.parts():
            part.state.commit()
        self._tell_unused()
        result = self.method.sync.apply(do, self.ex)
        self._agree()
        self.ex.step += 1
        self.skipped = 0
        self._over()
        return result

    def _agree(self) -> None:
        sync, layout = self.method.sync, self.method.layout
        if type(sync).on_step is Sync.on_step and type(layout).publish is Layout.publish:
            return  # nothing to say after a step
        for b in self.buckets:
            self.pipeline.start(self._publish(b))
        self.pipeline.drain()

    async def _publish(self, b: Bucket) -> None:
        await self.method.layout.publish(b, self.ex)
        await self.method.sync.on_step(b, self.ex)

    def _tell_unused(self) -> None:
        """Once, at the first step: parameters that no worker used are a mistake more often than not."""
        if self._told:
            return
        self._told = True
        names = [s.name for b in self.buckets for s in b.slots if s.param.requires_grad and s.param.grad is None]
        if names and self.comm.rank == 0:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            text = f"{len(names)} parameters got no gradient on any worker and stay as they are: {shown}"
            self.recorder.emit(Note(t=time.monotonic(), text=text))
            warnings.warn(f"paceline: {text}", stacklevel=4)

    def _skip(self, bad: list[int]) -> None:
        """A step that does not count leaves no trace."""
        self._rollback()
        self.skipped += 1
        who = f"worker{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"
        why = f"the gradient of {who} is not finite (NaN or infinity)"
        self.recorder.emit(Skip(t=time.monotonic(), step=self.ex.step, workers=bad, why=why))
        if self.guard == "raise" or self.skipped >= PATIENCE:
            raise NonFiniteError(
                f"step {self.ex.step} does not count, {self.skipped} in a row: {why}",
                do="look at that worker's data and loss; lower the learning rate; guard='off' turns this check off",
            )
        if self.comm.rank == 0 or self.comm.rank in bad:
            warnings.warn(f"paceline: step {self.ex.step} is skipped on all workers: {why}", stacklevel=4)

    def _rollback(self) -> None:
        for part in self.method.parts():
            part.state.rollback()
        self._over()

    def _over(self) -> None:
        self._exchanged, self._ballot, self._backwards = False, None, 0
        self.window.over()
        for b in self.buckets:
            b.reset()

    def zero_grad(self, do: Callable[[], None]) -> None:
        """The user called optimizer.zero_grad(): nothing to do in the middle of a window."""
        if self.window.micro:
            return
        self._rollback()  # of a step that was exchanged and never made: a loss scaler has found infinities
        do()

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
