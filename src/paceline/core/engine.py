"""The step, as one straight block. It is handed parts and never asks what they are.

[Note: life of a gradient] One gradient of one parameter on its way from autograd to the weights. Each state has one
owner, the only one who changes it:

    state      what it is                                      owner               left by
    ─────────  ──────────────────────────────────────────────  ──────────────────  ───────────────────────────────────
    arrived    autograd has written p.grad                     Slot.arrived        Engine.arrive (hooks.py calls it)
    loaded     copied into its bucket's flat vector, weighed   Bucket.take         Engine._load, when the bucket is full
    ready      its bucket may leave, by the order's word       Engine._ready       Order.next
    sent       its bucket's coroutine is under way             Pipeline            Pipeline.drain
    landed     the mean, or this worker's shard of it, is here Bucket.keep         Engine.land
    bound      p.grad shows the mean                           Bucket.bind         the user: clip, unscale, step()
    decided    the workers know whether the step counts        Engine.decide       the same verdict on every worker
    applied    the optimizer has stepped                       Layout.apply        Layout.publish, Sync.on_step
    over       counters moved on, parts committed              Engine.over         the next backward

              backward                          end of backward        step()
    p.grad ──► arrived ─► loaded ─► ready ─► sent ─► landed ─► bound ─► decided ─┬─► applied ─► over
                  │                                    ▲                         └─► rolled back: no part of the
                  └── held back (no_sync, accumulate) ─┘                             step leaves a trace

An order that crosses the step barrier (overlap.py) changes one arrow: `step()` returns before `landed`, and each
bucket is decided and applied when the next forward needs it. A sync that does not exchange gradients leaves out
`ready`, `sent` and `landed`: p.grad stays this worker's own.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.comm.group import Group
from paceline.comm.protocol import Comm
from paceline.core import change, transfer
from paceline.core.bucket import Bucket, Slot
from paceline.core.buffers import Buffers
from paceline.core.by_hand import ByHand
from paceline.core.cutting import cut
from paceline.core.device_verdict import DeviceVerdict
from paceline.core.exchange import Exchange, no_scale, no_trace
from paceline.core.guard import Guard, Mode
from paceline.core.noise_meter import NoiseMeter
from paceline.core.open_window import Finished, OpenWindow
from paceline.core.overlap import Overlap
from paceline.core.parts import Event, Parts
from paceline.core.pipeline import Pipeline
from paceline.core.redeal import Redeal
from paceline.core.replicas import Replicas
from paceline.core.step_size import StepSizes, scaled_rate
from paceline.core.unstepped import Unstepped
from paceline.core.vote import GAVE_UP, NOT_FINITE, OUT_OF_MEMORY, Bad, Place, Verdict, Vote, not_finite
from paceline.core.window import BatchInHand, Window
from paceline.errors import UsageError
from paceline.telemetry.recorder import Recorder

Watch = list[RemovableHandle]
_SETTINGS = 1 << 31  # hashes of the optimizer's settings are below this


class GradientHooks(Protocol):
    """How an engine hears of gradients: hooks.py."""

    def arrivals(self, engine: Engine, b: Bucket) -> Watch:
        """Call `engine.arrive` when a gradient of this bucket is there."""

    def weights(self, engine: Engine, b: Bucket) -> Watch:
        """Multiply this bucket's gradients by `window.scale` before they are accumulated."""

    def cross(self, engine: Engine) -> None:
        """Let every layer wait for its own parameters: overlap.py."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine goes about its work."""

    accumulate: int = 1  # micro-batches to a step
    cuts: bool = False  # batches are dealt in micro-batches
    redeals: bool = False  # a batch that did not fit is dealt again: redeal.py
    summed: bool = False  # the loss is a sum over samples, not their mean
    guard: Mode = "skip"
    check_replicas: int = 0  # steps between two looks whether the replicas agree; 0: never
    measure_noise: int = 0  # steps between two measurements of the gradients' noise; 0: only if the balance asks
    bucket_bytes: int = 4 << 20
    first_bytes: int = 1 << 20  # of the first bucket: the sooner it is full, the sooner the wire is busy
    lane: str = "gradients"
    shares_backward: bool = False  # one backward may feed other engines too
    behind: bool = False  # another engine may be waited for before this one: [Note: behind], vote.py
    averages_buffers: bool = True  # another engine of the same models does it, if not
    device_verdict: bool | None = None  # the optimizer skips on the device; None: where gradients are on a GPU
    clock: Callable[[], float] = time.perf_counter  # by which a round of micro-batches ends: open_window.py


class Engine:
    """One optimizer's parameters, and what happens to their gradients: [Note: life of a gradient]."""

    def __init__(
        self,
        optimizer: Optimizer,
        named: Callable[[], list[tuple[str, Tensor]]],
        method: Parts,
        group: Group,
        *,
        recorder: Recorder,
        hooks: GradientHooks,
        buffers: Buffers | None = None,
        options: EngineOptions | None = None,
        loss_scale: Callable[[], Tensor | None] = no_scale,
        on_resume: Callable[[object], None] | None = None,
    ) -> None:
        """named: the optimizer's parameters with their names, in the order the models registered them."""
        self.optimizer, self.named, self.group, self.recorder = optimizer, named, group, recorder
        self.options = options or EngineOptions()
        self.bucket_bytes, self.first_bytes = self.options.bucket_bytes, self.options.first_bytes
        self.ex = Exchange(
            method,
            group,
            optimizer,
            recorder,
            lane=self.options.lane,
            loss_scale=loss_scale,
            about=on_resume or no_trace,
        )
        self.guard = Guard(self.options.guard, group, recorder)
        self.window = self._window()
        self.pipeline = Pipeline(on_resume)
        self.buckets = self.ex.buckets
        self.by_hand = ByHand(self)
        self.redeal = Redeal(self, on=self.options.redeals)
        self.replicas = Replicas(self, self.options.check_replicas)
        self.noise = NoiseMeter(self)
        self.sizes = StepSizes(self)
        self.unstepped = Unstepped(self)
        self.under_way = False  # a backward is
        self.making = False  # the optimizer is stepping
        self.asked = False  # to step; loss_scale.py looks whether a loss scaler did
        self.exchanged = self.landed = False  # the gradients of this step have left; their means are here
        self.gradient_hooks = hooks
        self._hooks: Watch = []
        self._listeners: list[Callable[[], None]] = []
        self._round_listeners: list[Callable[[int | None, list[int]], None]] = []
        self.buffers = buffers or Buffers()
        self._trainable: list[tuple[int, bool, torch.dtype, torch.device]] = []
        self._weighs = False  # workers' batches have differed
        self._coming: list[Bucket] = []  # of this backward, by index: not full yet, or one before them is not
        self._final: Bucket | None = None  # the last of them to be ready
        self._ready: list[Bucket] = []  # chunks that could leave
        self._out: list[Bucket] = []  # chunks that have left
        self._sends = False
        self._backwards = 0
        self._raised = False  # a backward of this step raised here, and the others know that the step does not count
        self.gave_up: Bad = {}  # by the last verdict: the workers whose backward raised
        self.sent_before = 0  # payload bytes that telemetry has heard of
        self.on_device = DeviceVerdict(self)
        self.stored: transfer.Luggage | None = None  # what the parts remembered, while this worker is alone
        self.settle_in()

    def _window(self) -> Window:
        sync, summed = self.method.sync, self.options.summed
        if sync.open_ended:
            closes = lambda elapsed, usual: self.method.sync.closes(elapsed, usual)  # noqa: E731  # the method may change
            return OpenWindow(self.group, closes, self.options.clock, summed=summed)
        multiple = lambda: self.method.balance.multiple()  # noqa: E731  # likewise
        return Window(self.group, self.options.accumulate, summed=summed, multiple=multiple)

    def settle_in(self) -> None:
        """What depends on who is in the group and which method is used."""
        if isinstance(self.window, OpenWindow) != self.method.sync.open_ended:
            self.window = self._window()
        self.parts = list(self.method.parts())  # wrapped ones included
        method, params = self.method, [p for group in self.optimizer.param_groups for p in group["params"]]
        rests = method.layout.rests(params)
        # Alone there is nobody to agree with, and gradients are left as they are.
        alone = self.group.world_size == 1 and not self.options.cuts and not method.balance.adapts
        self.idle = alone and self.window.accumulate == 1 and rests and not self.window.no_sync
        self.vote = Vote(
            self._vote_lane,
            guard=self.guard.mode != "off",
            whispers=self.ex.exact_everywhere and not (self.options.device_verdict or self.options.behind),
            late=method.sync.lag(),
        )
        self.overlap = Overlap(self)
        if self.options.averages_buffers:
            self.buffers.cut(self.group.world_size, self.bucket_bytes)
        if not self.idle:
            self.buffers.keep()
        self.window.scale = self.window.usual
        self._weighs = self._weighs or self.window.scale != 1.0

    @property
    def method(self) -> Parts:
        """One part for each axis."""
        return self.ex.method

    @property
    def comm(self) -> Comm:
        """The lane of the gradients."""
        return self.ex.comm

    @property
    def buffer_buckets(self) -> list[Bucket]:
        """The buffers that this engine averages over the workers."""
        return self.buffers.buckets if self.options.averages_buffers else []

    def _vote_lane(self) -> Comm:
        """An update that crosses the barrier is decided while the gradients' lane is still busy."""
        return self.ex.background if self.method.order.crosses else self.ex.comm

    # ------------------------------------------------------------------------------------------------ before backward

    def refresh(self) -> None:
        """Take up parameters that were added or thawed since; all workers must have done the same."""
        if self.idle:
            return
        groups = self.optimizer.param_groups
        now = [(id(p), p.requires_grad, p.dtype, p.device) for group in groups for p in group["params"]]
        if now == self._trainable:
            return
        self._follow_cast()
        named = self.named()
        known = {id(s.param) for b in self.buckets for s in b.slots}
        new = [(name, p) for name, p in named if p.requires_grad and id(p) not in known]
        if self._trainable:
            said = "\n".join(f"{name} {'trained' if p.requires_grad else 'frozen'}" for name, p in named)
            self.comm.agree(f"trainable parameters at step {self.ex.step}", said)
        chunk_bytes = self.method.order.chunk_bytes() if self.method.reducer.cuttable() else None
        world_size = self.group.world_size
        for b in cut(new, world_size, self.bucket_bytes, self.first_bytes, self.method.reducer.kind):
            b.index = len(self.buckets)
            if chunk_bytes:
                b.divide(chunk_bytes, world_size)
            self.buckets.append(b)
            self._hooks += self.gradient_hooks.arrivals(self, b)
            if self._weighs:
                self._hooks += self.gradient_hooks.weights(self, b)
            self.method.layout.own(b, self.ex)
        self._trainable = now

    def _follow_cast(self) -> None:
        """The user has cast or moved parameters: their gradients need other buckets."""
        if self._cast():
            if self.exchanged or self.window.several or self.under_way:
                self._refuse_cast()
            with self.cut_anew():
                pass

    def _cast(self) -> list[Slot]:
        """The parameters that are not what their bucket was made for any more, where the layout can follow that."""
        if not self.method.layout.follows_casts:
            return []
        return [s for b in self.buckets for s in b.slots if (s.param.dtype, s.param.device) != (s.view.dtype, b.device)]

    def _refuse_cast(self) -> None:
        """Refuse a backward, or a step, of parameters that were cast or moved, and no forward has come since."""
        if cast := self._cast():
            raise UsageError(
                f"{cast[0].name} became {cast[0].param.dtype} on {cast[0].param.device} in the middle of a step",
                why="a model that is cast or moved after prepare is followed when its forward is called",
                do="cast it before prepare, or between optimizer.step() and a call of the prepared model itself",
            )

    def on_forward(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when a forward in training begins."""
        self._listeners.append(listener)

    def on_round(self, listener: Callable[[int | None, list[int]], None]) -> None:
        """Have `listener` called when a round ends ([Note: rounds], open_window.py), with the number of the loader and
        how many micro-batches of it every worker has been handed in this epoch.
        """
        self._round_listeners.append(listener)

    def forward(self) -> None:
        """A forward in training begins."""
        self._raised = False
        self.window.forward()
        self._weigh_arrivals()
        self.refresh()
        for listener in self._listeners:
            listener()

    def take_batch(self, batch: BatchInHand, loader: int = 0) -> None:
        """A loader hands out a batch. loader: its number."""
        self.window.take(batch, loader, trains=torch.is_grad_enabled())
        if self.redeal.on:
            self.method.layout.begin_micro_batch()
        self._weigh_arrivals()

    def loop_ended(self, loader: int) -> None:
        """The loop over a loader has come to its end."""
        self.window.ended(loader)
        self._weigh_arrivals()

    def _weigh_arrivals(self) -> None:
        """Gradients are multiplied on arrival from the first time on that a worker's share is not the usual one."""
        if self.window.scale != 1.0 and not self._weighs:
            self._weighs = True
            for b in self.buckets:
                self._hooks += self.gradient_hooks.weights(self, b)

    # ------------------------------------------------------------------------------------------------ during backward

    def begin(self) -> None:
        """The first gradient of a backward has arrived."""
        self._raised = False
        keeps = any(part.state.staged for part in self.parts)
        self.unstepped.backward(matters=keeps or not self.method.sync.due(self.ex.step))
        if self.exchanged and self.landed and self._thrown_away():
            self.rollback()
            self.window.over()
        self._refuse_cast()
        if self.method.balance.measures_speed() and self.group.world_size > 1:
            self.window.refuse_several(f"{self.method.balance.name} adjusts the shares of each loader by itself")
        self.window.count()
        self._arm(sends=self.window.closing and self.method.sync.due(self.ex.step) and not self.redeal.lost)

    def _arm(self, *, sends: bool) -> None:
        self.under_way, self._sends = True, sends
        self.noise.begin(first=self._backwards == 0)
        if self.window.closing:
            self.sizes.begin()
        self._backwards += 1
        self.vote.begin(self._place())
        self._coming, self._ready, self._out = [b for b in self.buckets if b.active], [], []
        self._final = self._coming[-1] if self._coming else None
        for b in self._coming:
            b.arm()

    def _thrown_away(self) -> bool:
        """Has the user thrown all gradients of an earlier backward away, though not by `optimizer.zero_grad()`?

        Then what the parts have kept back of them goes too. The first gradient of the next backward is there by now.
        """
        slots = [s for b in self.buckets for s in b.slots if s.known is not None]
        kept = [s for s in slots if s.param.grad is not None]
        return bool(slots) and len(kept) <= 1 and all(s.param.grad is not s.known for s in kept)

    def _place(self) -> Place:
        """Where this worker is: all must be there together."""
        groups = self.optimizer.param_groups
        values = (
            x for group in groups for value in group.values() for x in (value if type(value) is tuple else (value,))
        )
        numbers = (x for x in values if isinstance(x, (int, float)))
        settings = hash((*numbers, self.ex.rate, self.window.accumulate)) % _SETTINGS
        alike = not self.method.sync.open_ended  # else each worker has its own number of micro-batches
        return Place(self.ex.step, alike * self._backwards, alike * self.window.number, settings, self.rates()[0])

    def rates(self) -> list[float]:
        """Each group's learning rate; zero where it is a tensor, which may be on a GPU."""
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        return [float(rate) if isinstance(rate, (int, float)) else 0.0 for rate in rates]

    def _date(self, b: Bucket) -> None:
        """An exchange of this bucket begins."""
        b.step, b.rate = self.ex.step, sum(self.rates())

    def arrive(self, b: Bucket, slot: Slot) -> None:
        """Autograd has accumulated a parameter's gradient."""
        b.arrive(slot)
        while self._sends and self._coming and self._coming[0].full:
            self._load(self._coming[0])
            self._next()

    def _next(self) -> None:
        """A bucket is ready, full or not. Buckets become ready by index, on every worker alike."""
        self._ready += self._coming.pop(0).chunks
        self._send(Event.READY)

    def _send(self, event: Event) -> None:
        at_once = self.method.layout.at_once
        for b in list(self.method.order.next(self._ready, self._out, event)):
            self._ready.remove(b)
            self._out.append(b)
            self._date(b)
            if self._final and b is self._final.chunks[0]:
                self.vote.close(self._final, self.buckets, self.pipeline.backlog())
            self.pipeline.start(self.ex.grad(b), b.whole, b.flat.nbytes)
            # Two engines that share a backward might wait for each other.
            if len(self._out) > at_once and not self.options.shares_backward:
                with self.waiting():
                    self.pipeline.drain(left=at_once)

    def _load(self, b: Bucket) -> None:
        self.noise.take(b)
        b.flat[b.n :].zero_()  # a mean that is not exact may have left something in the padding
        if (factor := self.window.factor()) != 1.0:
            b.flat.mul_(factor)
        if self._sends:
            self.vote.look(b)

    def flush(self) -> None:
        """Backward has ended: what is not on its way yet goes now, full or not."""
        self.under_way = False
        for b, s in self.by_hand.changed():
            if not s.arrived and s.param.grad is not s.view:
                self._weigh_by_hand(s)
                b.arrive(s)
        if self._round_ends():
            self._sends = self.method.sync.due(self.ex.step)
        if not self.window.closing:
            for b in self._coming:
                self.noise.take(b)
                b.hide()
            self.noise.backward_ended()
            return
        if self._sends:
            for b in self._coming:
                self._load(b)
            self.noise.backward_ended()
            self._send_rest()
        elif self.window.several:
            for b in self._coming:
                self._load(b)
                b.bind([s.arrived for s in b.slots])
        if self.window.several:
            self.window.close()
            self._weigh_arrivals()

    def _round_ends(self) -> bool:
        """A micro-batch is finished. Does this worker's round end with it? Then hear what the others have finished."""
        window = self.window
        if not (isinstance(window, OpenWindow) and window.ends()):
            return False
        device = self.buckets[0].device if self.buckets else None
        with self.waiting():
            own = torch.tensor(window.finished(), dtype=torch.float64, device=device)
            rows = self.comm.all_gather(own).wait().tolist()
        everyone = [Finished(samples, int(batches), s, int(handed)) for samples, batches, s, handed in rows]
        window.learn(everyone)
        self.method.sync.learn(everyone, window.asked_for, self.ex)
        for listener in self._round_listeners:
            listener(window.loader, [one.handed for one in everyone])
        return True

    def drop_gradients(self) -> None:
        """The backward under way has raised: no gradient of this step may reach a later one."""
        for b in self.buckets:
            b.drop_fresh()

    def give_up(self) -> None:
        """The backward under way has raised: what the others wait for is sent as zeros, and its step does not count."""
        if self.redeal.on:
            self.redeal.ran_out(None)
            self.redeal.take_part()
            return
        self.under_way = False
        self.guard.gave_up()
        self.window.uncount()
        if self._sends:
            self._send_zeros(GAVE_UP)
            self._lose()
            self._raised = True

    def run_out_of_memory(self) -> None:
        """This worker's memory did not suffice for the step under way: redeal.py.

        Where gradients are exchanged in it the others are told, in the exchange that they are in or will come to.
        """
        self.overlap.land()
        began, self.under_way = self.under_way and self._sends, False
        if not began:
            self._arm(sends=self.method.sync.due(self.ex.step))
            self.under_way = False
        if self._sends:
            with self.method.layout.joining(self.ex, self.window.left):
                self._send_zeros(OUT_OF_MEMORY)
            self.redeal.hear(self.vote.bad())
        self.give_up_lost()

    def _send_zeros(self, why: float) -> None:
        """Send zeros in the place of the gradients that the others wait for."""
        self.vote.gave_up = why
        self._send_rest(zeros=True)
        with self.waiting():
            self.pipeline.drain()
            self.vote.used(self.buckets)
        self.exchanged = True

    def _lose(self) -> None:
        """The step under way is given up, and with it what forwards have written into buffers."""
        self.buffers.give_back()
        self.rollback()
        self.window.over()

    def give_up_lost(self) -> None:
        """The step under way is given up because its batch is dealt again, in this window's place."""
        self._lose()
        self.drop_gradients()
        self.window.use()
        self.window.renumber()
        self.method.layout.give_up(self.ex)

    def _send_rest(self, *, zeros: bool = False) -> None:
        early = self.overlap.on  # the next forward asks for the verdict and the buffers first
        if early and not (self._final and self.vote.whispers_in(self._final)):
            self.vote.call(self.buckets, self.pipeline.backlog())
        if early:
            self._share_buffers()
        while self._coming:
            if zeros:
                self._coming[0].zero()
            self._next()
        self._send(Event.END)
        self.pipeline.rearrange(self.method.order.urgency)
        if not early:
            self.vote.call(self.buckets)
            self._share_buffers()

    def _share_buffers(self) -> None:
        if self.options.averages_buffers:
            self.buffers.follow()
        for b in self.buffer_buckets:
            self.pipeline.start(self.buffers.agree(b, lambda b: self.method.sync.on_buffers(b, self.ex)), b)

    def finish(self) -> None:
        """Wait for the means, so that p.grad is what the user sees; an overlap waits later."""
        if not self._sends:
            return
        self.exchanged, self.landed = True, False
        seen = self.overlap.watched() and not self.noise.due
        if not seen or any(s.sparse for b in self.buckets for s in b.slots):
            self.land()
            return
        for b in self.buckets:  # whoever asks for them waits first, and then finds them there
            b.bind([s.arrived for s in b.slots])
        self.by_hand.bound()

    def land(self) -> None:
        """Wait for the means and bind them to p.grad."""
        with self.waiting():
            self.pipeline.drain()
            used = self.vote.used(self.buckets)
        self.landed = True
        if self.redeal.asks:
            self.redeal.hear(self.vote.bad())
        if self.vote.ballot and not self.ex.exact_everywhere:
            self._poison(self.vote.ballot.any_not_finite())
        self.noise.landed()
        for b in self.buckets:
            b.bind(used[b.index])
        self.by_hand.bound()

    def land_beside(self) -> None:
        """Wait for the means, and leave what the user has put in their place, None included."""
        own = [(s, s.param.grad) for b in self.buckets for s in b.slots if s.param.grad is not s.known]
        self.land()
        for s, g in own:
            s.param.grad = g

    def _poison(self, bad: Tensor) -> None:
        """A reducer may hide an infinity of one worker; a loss scaler must see it on all. One element is enough."""
        nan = torch.where(bad, math.nan, 0.0)
        for b in filter(lambda b: b.active, self.buckets):
            b.kept[:1].add_(nan.to(b.kept.device))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time and bytes go to telemetry; after a failure nothing that was under way is used again."""
        try:
            with self.recorder.waiting():
                yield
        except BaseException:
            self.pipeline.abandon()
            for b in self.buckets:
                b.abandon()
            raise
        self._count_bytes()

    def _count_bytes(self) -> None:
        """Tell telemetry what was sent since the last time."""
        sent = self.ex.sent
        self.recorder.sent += sent - self.sent_before
        self.sent_before = sent

    # ------------------------------------------------------------------------------------------------ the step

    def step(self, do: Callable[[], Any], *, brings_gradients: bool = False) -> Any:
        """The user called optimizer.step(); `do` is the optimizer's own. brings_gradients: it runs backward itself."""
        self.asked = True
        self.sizes.scheduled = int(self.idle)
        self.unstepped.step()
        if self.idle:
            self.ex.step += 1
            return do()
        self.overlap.land()  # of a step that was called before, without a forward since
        if not self._backwards:  # gradients made by hand: the end of a backward has said so otherwise
            self.window.use()
        due = self.method.sync.due(self.ex.step)
        if due and not self.exchanged and (new := self.by_hand.changed()):
            self.take_up(new)
        if self.redeal.given_up or self._raised:
            self._raised = False
            return None
        if not self.exchanged and self._round_ends():  # no backward has come to find it out
            self._arm(sends=due)
            self.flush()
            self.finish()
        if not self.window.closing:
            self._refuse_step_in_batch()
            self.window.hold()
            return None
        self.on_device.read()
        if not self.exchanged and due:
            if brings_gradients:
                return self._make(do)
            self._arm(sends=True)  # no gradient arrived here, or all were held back: join the others now
            self.flush()
            self.finish()
        if self.exchanged and not self.landed:
            if self.overlap.can_wait():
                self.window.over()
                self.sizes.scheduled = 1
                return self.overlap.defer(do)
            self.overlap.barrier()
        self.agree_by_hand()
        if self.on_device.possible():
            return self._make(lambda: self.on_device.step(do))
        verdict = self.decide()
        if verdict is Verdict.SKIP:
            self.window.over()
            return None
        return self._make(do if verdict is Verdict.COMMIT else lambda: None)

    def agree_by_hand(self) -> None:
        """Average the gradients that the user has changed since they were agreed on, where workers differ."""
        if self.exchanged and not self.vote.late:
            self.by_hand.agree()

    @property
    def will_step(self) -> bool:
        """Will the next step() be a real one?"""
        return self.window.closing and not (self.redeal.given_up or self.under_way or self._raised)

    def _refuse_step_in_batch(self) -> None:
        """Refuse a loop that steps by a count of its own, where the loader deals micro-batches."""
        if self.exchanged and self.window.in_batch:
            raise UsageError(
                "optimizer.step() was left out at the end of a batch, and is called in the middle of the next one",
                why="with micro_batch= an iteration of the loop is a part of a batch, and one batch makes a step",
                do="call step() and zero_grad() in every iteration, and say accumulate=N for several batches to a step",
            )

    def take_up(self, new: Sequence[tuple[Bucket, Slot]]) -> None:
        """Exchange gradients that no hook has announced, as if a backward had brought them: [Note: by hand]."""
        self.recorder.backward_ended()
        self.begin()
        for b, s in new:
            self._weigh_by_hand(s)
            self.arrive(b, s)
        self.flush()
        self.finish()

    def _weigh_by_hand(self, s: Slot) -> None:
        """What `GradientHooks.weights` does with a gradient that a hook announces."""
        if (scale := self.window.scale) != 1.0:
            assert s.param.grad is not None
            s.param.grad = s.param.grad * scale if scale else torch.zeros_like(s.param.grad)

    def before_clipping(self, grads: Sequence[Tensor]) -> bool:
        """Torch is about to clip these gradients. Gives: are any of them ours?"""
        if self.idle:
            return False
        # An open round may end with the gradients that are about to be clipped: `flush` finds out.
        closing = self.window.closing or self.method.sync.open_ended
        due = closing and (self.exchanged or self.method.sync.due(self.ex.step))
        return due and self.by_hand.before_clipping(grads)

    def after_clipping(self) -> None:
        """Torch has clipped, alike on all workers."""
        self.by_hand.note()

    def decide(self) -> Verdict:
        """Does the step count? Decided here and nowhere else, alike on all workers that step together."""
        alone = not self.exchanged
        bad = self._bad_alone() if alone else self.vote.bad()
        self.gave_up = {rank: why for rank, why in bad.items() if why == GAVE_UP}
        if bad:
            self.buffers.give_back()
        if bad and (alone or self.vote.late):  # the others have made their step, or these gradients have left
            self.guard.skipped(self.ex.step - self.vote.late, bad, alone=alone)
            return Verdict.SIT_OUT
        if not self.method.membership.commit(not bad):
            step = self.ex.step
            self.redeal.hear(bad)
            self.rollback()
            self.guard.skipped(step, bad)
            return Verdict.SKIP
        self.guard.counted()
        self.guard.name_unused(self.buckets, self.overlap.used if self.overlap.under_way else None)
        self.buffers.keep()
        return Verdict.COMMIT

    def _bad_alone(self) -> Bad:
        """Gradients that no other worker sees: this worker, if they are not finite."""
        if self.guard.mode == "off":
            return {}
        bad = not_finite(s.param for b in self.buckets for s in b.slots)
        return {self.group.rank: NOT_FINITE} if bad is not None and bool(bad) else {}

    def left_out(self) -> None:
        """A loss scaler found infinities and did not call `step`.

        Where gradients are agreed on, all the other workers' scalers found them too. Where they are this worker's own,
        the others go on, and it must not miss what they agree on after the step.
        """
        if not (self.idle or self.exchanged or self.method.sync.due(self.ex.step)):
            self._make(lambda: None)

    @torch.no_grad()
    def _make(self, do: Callable[[], Any]) -> Any:
        """Make the step: the optimizer's, and what all workers do together around it."""
        sync, layout = self.method.sync, self.method.layout
        self.making = True
        if sync.acts_before_step:
            self._together(self.ex.before_step)
        if not self.exchanged:
            self._add_carry()
        self.commit()
        self.noise.made()
        with torch.enable_grad(), scaled_rate(self.optimizer, self.ex.rate):
            result = sync.apply(lambda: layout.apply(do, self.ex), self.ex)
        if sync.acts_after_step or layout.publishes:
            agrees = not self.exchanged and sync.agrees(self.ex.step)
            self._together(self.ex.after_step, buffers=agrees)
            self.commit()
            if agrees:
                self.buffers.keep()
        self.sizes.made()
        self.over(made=True)
        self.window.over()
        self.making = False
        return result

    def _add_carry(self) -> None:
        """Gradients that are not exchanged take what an earlier method had kept back here."""
        for b in self.buckets:
            if (kept := self.ex.carry.take(b)) is not None:
                for s, x in zip(b.slots, b.views(kept), strict=True):
                    s.param.grad = x.clone() if s.param.grad is None else s.param.grad.add_(x)

    def _together(self, what: Callable[[Bucket], Coroutine[Any, None, None]], *, buffers: bool = False) -> None:
        with self.waiting():
            for b in self.buckets:
                self._date(b)
                self.pipeline.start(what(b), b)
                self.pipeline.drain(left=self.method.layout.at_once)
            if buffers:
                self._share_buffers()
            self.pipeline.drain()

    def commit(self) -> None:
        """What the parts have staged becomes real."""
        for part in self.parts:
            part.state.commit()
        self.ex.carry.commit()

    def rollback(self) -> None:
        """The step is given up: what the parts have staged is forgotten."""
        for part in self.parts:
            part.state.rollback()
        self.ex.carry.rollback()
        if self.exchanged:
            self.vote.heard()
        self.over(made=False)

    def over(self, *, made: bool) -> None:
        """The step was made, or given up."""
        self._count_bytes()
        self.ex.step += made
        self.exchanged, self._backwards = False, 0
        self.vote.begin(self._place())
        for b in self.buckets:
            b.reset()
        if made:
            self.replicas.step_made()
            for part in self.parts:
                for event in part.news(self.ex.step):
                    self.recorder.emit(event)

    def zero_grad(self, do: Callable[[], None], *, in_place: bool = False) -> None:
        """The user called optimizer.zero_grad(): nothing to do in the middle of a window."""
        if self.window.micro:
            return
        if self.overlap.under_way:
            self.overlap.zero_grad(do, in_place=in_place)
            return
        self.overlap.barrier()
        self.rollback()  # of a step that was exchanged and never made: a loss scaler has found infinities
        self.window.over()
        do()
        for b in self.buckets:
            b.drop()

    def settle(self) -> None:
        """Let what is under way arrive: before an evaluation, a checkpoint, a change and the end."""
        self.overlap.settle()
        self.on_device.read()
        self.noise.read()
        self.method.sync.settle(self.ex)
        self.method.layout.settle(self.ex)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold communication back: backward inside only adds to the window."""
        if self.idle:
            self.idle = False
            self.refresh()
        before, self.window.no_sync = self.window.no_sync, True
        try:
            yield
        finally:
            self.window.no_sync = before

    # ------------------------------------------------------------------------------------------------ between two steps

    def recut(self, bucket_bytes: int) -> None:
        """Cut other buckets for the same parameters, between two steps; what parts remember moves along."""
        self.settle()
        with self.cut_anew():
            self.bucket_bytes, self.first_bytes = bucket_bytes, min(bucket_bytes, self.first_bytes)

    def change(self, method: Parts) -> None:
        """Go on by another method, between two steps: change.py. All workers must call it, with the same method."""
        change.method(self, method)

    def regroup(self, group: Group) -> None:
        """Go on with the workers of another group, between two steps: change.py. Old and new members call it."""
        change.group(self, group)

    @contextlib.contextmanager
    def cut_anew(self, *, parts: bool = True) -> Iterator[None]:
        """Inside there are no buckets; after it they are cut anew. parts: what these remember moves along."""
        self.method.layout.collect(self.ex)
        saved = [part.state.save(self.buckets) for part in self.parts] if parts else []
        carried = self.ex.carry.save(self.buckets)
        self.forget_cut()
        yield
        self.refresh()
        for part, memory in zip(self.parts, saved, strict=False):
            part.state.load(memory, self.buckets)
        self.ex.carry.load(carried, self.buckets)

    def forget_cut(self) -> None:
        """There are no buckets any more; the next `refresh` cuts them anew."""
        for part in self.parts:
            part.recut()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._trainable = [], []
        self.buckets.clear()
