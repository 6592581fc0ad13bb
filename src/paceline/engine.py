"""The step, as one straight block. It is handed parts and never asks what they are.

backward fills buckets -> each leaves as the order says, while backward goes on -> the end of backward finishes what
is under way, so p.grad is the agreed mean when `backward` returns -> at `step` everyone knows whether it counts ->
parts commit, the optimizer steps, the layout publishes, the sync agrees.

[Note: weights] The mean is over samples, not over workers. With w_r of the T samples of a batch, worker r's
gradient (of its own mean loss) enters as g_r * w_r * W / T, so the mean over W workers is sum(w_r g_r) / T. In a
window of micro-batches with totals T_1, T_2, ... everything is weighed against T_1, and the sum is brought to scale
once, by T_1 / (T_1 + T_2 + ...).

[Note: ballot] Beside the gradients one small vector is summed: whose gradients are not finite, at which step each
worker is, which parameters were used by anyone. It leaves with the last bucket, so it costs no round trip of its
own.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.bucket import Bucket, Slot, cut
from paceline.errors import MismatchError, NonFiniteError
from paceline.exchange import Exchange
from paceline.method import Method
from paceline.parts import Comm, Event, Handle, Layout, Sync
from paceline.pipeline import Pipeline
from paceline.telemetry import Note, Recorder, Skip

PATIENCE = 20  # steps in a row that may fail to count before training is given up


class Batch(Protocol):
    """What the loader says of the batch in hand."""

    @property
    def weight(self) -> float: ...
    @property
    def total(self) -> float: ...
    @property
    def last(self) -> bool: ...


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
        self.method, self.comm, self.recorder = method, comm, recorder
        self.accumulate, self.guard = accumulate, guard
        self.bucket_bytes, self.first_bytes = bucket_bytes, first_bytes
        self.ex = Exchange(method, comm)
        self.pipeline = Pipeline()
        self.batch: Batch | None = None  # from the loader; none: every worker counts the same
        self.idle = comm.world == 1 and accumulate == 1  # nobody to agree with: gradients are left alone
        self.scale = 1.0  # what an arriving gradient is multiplied by: [Note: weights]
        self.holding = False
        self.skipped = 0  # steps in a row that did not count
        self.watch: Callable[[Bucket], None] = lambda b: None  # hooks.py: tell when its gradients arrive
        self.weigh: Callable[[Bucket], None] = lambda b: None  # hooks.py: multiply them by `scale` before they do
        self.buffers = cut(buffers, comm.world, bucket_bytes)
        self.buckets: list[Bucket] = []
        self._trainable: list[bool] = []
        self._unsent: list[Bucket] = []
        self._extremes: list[Tensor] = []
        self._under_way = self._sends = self._exchanged = False
        self._told = False  # of unused parameters, once
        self._weighs = False  # batches have differed
        self._counted: Batch | None = None  # the batch that is part of _totals
        self._micro = self._backwards = self._sent = 0
        self._totals: list[float] = []  # of the window's batches
        self._ballot: Handle | None = None

    # ------------------------------------------------------------------------------------------------ what is trained

    def refresh(self) -> None:
        """Take up parameters that were added or thawed since; all workers must have done the same."""
        trainable = [p.requires_grad for group in self.optimizer.param_groups for p in group["params"]]
        if self.idle or trainable == self._trainable:
            return
        known = {id(s.param) for b in self.buckets for s in b.slots}
        new = [(name, p) for name, p in self.named() if p.requires_grad and id(p) not in known]
        if self._trainable:
            now = "\n".join(f"{name} {'trained' if p.requires_grad else 'frozen'}" for name, p in self.named())
            self.comm.agree(f"trainable parameters at step {self.ex.step}", now)
        for b in cut(new, self.comm.world, self.bucket_bytes, self.first_bytes):
            b.index = len(self.buckets)
            self.buckets.append(b)
            self.watch(b)
            if self._weighs:
                self.weigh(b)
        self._trainable = trainable

    def take_batch(self, batch: Batch) -> None:
        """The loader hands out a batch. [Note: weights]."""
        self.batch = batch
        reference = self._totals[0] if self._totals else batch.total
        self.scale = batch.weight * self.comm.world / reference
        if self.scale != 1.0 and not self._weighs:
            self._weighs = True
            for b in self.buckets:
                self.weigh(b)

    # ------------------------------------------------------------------------------------------------ during backward

    def arrive(self, b: Bucket, slot: Slot) -> None:
        """Autograd has accumulated a parameter's gradient."""
        b.arrive(slot)
        if b.full and self._sends:
            self._send(Event.READY)

    def begin(self) -> None:
        """The first gradient of a backward has arrived."""
        self._begin(sends=self._closing and self.method.sync.due(self.ex.step))
        windowed = self.accumulate > 1 or self.holding or self._totals
        if windowed and (self.batch is None or self.batch is not self._counted):
            self._counted = self.batch
            self._totals.append(self.batch.total if self.batch else float(self.comm.world))

    def _begin(self, *, sends: bool) -> None:
        self._under_way, self._sends = True, sends
        self._backwards += 1
        self._unsent = [b for b in self.buckets if b.active]
        self._extremes.clear()
        for b in self._unsent:
            b.arm()

    @property
    def under_way(self) -> bool:
        return self._under_way

    @property
    def _closing(self) -> bool:
        """Is this the last micro-batch of its window?"""
        full = self._micro + 1 >= self.accumulate or (self.batch is not None and self.batch.last)
        return full and not self.holding

    def _send(self, event: Event) -> None:
        for b in list(self.method.order.next(self._unsent, event)):
            self._unsent.remove(b)
            self._load(b)
            if self.guard != "off":
                self._extremes += torch.aminmax(b.flat)  # NaN and infinity show in them; the cheapest pass there is
            self.pipeline.start(self.method.sync.on_grad(b, self.ex))

    def _load(self, b: Bucket) -> None:
        b.take()
        if self._totals:
            b.flat.mul_(self._totals[0] / sum(self._totals))

    def flush(self) -> None:
        """Backward has ended: what is not on its way yet goes now, full or not."""
        self._under_way = False
        if not self._closing:
            for b in self._unsent:
                b.take()
                b.hide()
        elif self._sends:
            self._send(Event.END)
            self._ballot = self._vote()
            for b in self.buffers:
                self.pipeline.start(self._agree_buffers(b))
        elif self._totals:
            for b in self._unsent:
                self._load(b)
                b.bind([s.arrived for s in b.slots])

    def finish(self) -> None:
        """Wait for the means; p.grad is then what the user sees."""
        if not self._sends:
            return
        began = time.perf_counter()
        try:
            self.pipeline.drain()
            used = self._used()
        except BaseException:
            self.pipeline.abandon()
            for b in self.buckets:
                b.abandon()
            raise
        self.recorder.wait_s += time.perf_counter() - began
        self.recorder.sent += self.comm.sent - self._sent
        self._sent = self.comm.sent
        for b in self.buckets:
            b.bind(used[b.index])
        self._exchanged = True
        if not self._told:
            self._tell_unused(used)

    def _tell_unused(self, used: list[list[bool]]) -> None:
        self._told = True
        names = [s.name for b in self.buckets for s, u in zip(b.slots, used[b.index], strict=True) if not u]
        if names and self.comm.rank == 0:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            text = f"{len(names)} parameters got no gradient on any worker and stay as they are: {shown}"
            self.recorder.emit(Note(t=time.monotonic(), text=text))
            warnings.warn(f"paceline: {text}", stacklevel=2)

    async def _agree_buffers(self, b: Bucket) -> None:
        tensors, views = [s.param for s in b.slots], [s.view for s in b.slots]
        torch._foreach_copy_(views, tensors)
        await self.method.sync.on_buffers(b, self.ex)
        torch._foreach_copy_(tensors, views)

    # ------------------------------------------------------------------------------------------------ the ballot

    def _vote(self) -> Handle:
        """[Note: ballot]."""
        world, rank = self.comm.world, self.comm.rank
        arrived = [s.arrived for b in self.buckets for s in b.slots]
        stamps = [0.0] * world
        stamps[rank] = self.ex.step * 1024.0 + self._backwards
        votes = torch.tensor([0.0] * world + stamps + arrived, dtype=torch.float64)
        if self._extremes:
            device = self._extremes[0].device
            extremes = torch.stack([x.to(device, torch.float32) for x in self._extremes])
            votes = votes.to(device)
            votes[rank] = extremes.isfinite().all().logical_not()
        return self.comm.sum(votes)

    def _used(self) -> list[list[bool]]:
        """For each bucket, which of its parameters got a gradient from anyone. Asks the others only if it must."""
        mine = [[s.arrived for s in b.slots] for b in self.buckets]
        assert self._ballot is not None
        votes = self._ballot.wait()
        self._poison(votes[: self.comm.world])
        if all(all(m) for m in mine) and votes.is_cuda:
            return mine  # reading the ballot would make the host wait for the device
        counts = iter(votes[2 * self.comm.world :].tolist())
        return [[next(counts) > 0 for _ in b.slots] for b in self.buckets]

    def _poison(self, bad: Tensor) -> None:
        """A reducer may hide an infinity of one worker; a loss scaler must see it on all. One element is enough."""
        if "exact mean" in self.method.reducer.gives:
            return
        nan = torch.where(bad.sum() > 0, math.nan, 0.0)
        for b in self.buckets:
            b.flat[:1].add_(nan.to(b.flat.device))

    def _bad(self) -> list[int]:
        """Workers whose gradients are not finite."""
        if self._ballot is None:
            return []
        votes = self._ballot.wait()[: 2 * self.comm.world].tolist()
        stamps = votes[self.comm.world :]
        if len(set(stamps)) > 1:
            usual = max(stamps, key=stamps.count)
            odd = next(r for r, s in enumerate(stamps) if s != usual)
            said = [f"step {int(s) // 1024}, backward {int(s) % 1024}" for s in (stamps[odd], usual)]
            raise MismatchError(
                f"worker {odd} is at {said[0]}, the others at {said[1]}",
                why="a worker ran backward more often than the others, or skipped one",
                do="call backward and step equally often on every worker",
                worker=odd,
            )
        return [r for r, bad in enumerate(votes[: self.comm.world]) if bad]

    # ------------------------------------------------------------------------------------------------ the step

    def step(self, do: Callable[[], Any]) -> Any:
        """The user called optimizer.step(); `do` is the optimizer's own."""
        if self.idle:
            self.ex.step += 1
            return do()
        if not self._closing:
            self._micro += 1
            return None
        self._micro = 0
        if not self._exchanged and self.method.sync.due(self.ex.step):
            self._begin(sends=True)  # no gradient arrived here, or all were held back: join the others now
            self.flush()
            self.finish()
        bad = self._bad()
        if not self.method.membership.commit(not bad):
            return self._skip(bad)
        for part in self.method.parts():
            part.state.commit()
        result = do()
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

    def _skip(self, bad: list[int]) -> None:
        """A step that does not count leaves no trace."""
        self.rollback()
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

    def rollback(self) -> None:
        for part in self.method.parts():
            part.state.rollback()
        self._over()

    def _over(self) -> None:
        self._exchanged, self._ballot, self._backwards = False, None, 0
        self._totals.clear()
        self._counted = None
        for b in self.buckets:
            b.reset()

    def zero_grad(self, do: Callable[[], None]) -> None:
        """The user called optimizer.zero_grad(): nothing to do in the middle of a window."""
        if self._micro:
            return
        if self._exchanged:  # ... and never stepped: a loss scaler has found infinities
            self.rollback()
        else:
            self._over()
        do()

    @property
    def in_window(self) -> bool:
        """Between the micro-batches of a window: the next step() will only count."""
        return not self._closing

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold communication back: backward inside only adds to the window."""
        if self.idle:
            self.idle = False
            self.refresh()
        before, self.holding = self.holding, True
        try:
            yield
        finally:
            self.holding = before
