"""The step barrier, crossed: `optimizer.step()` returns at once, and each bucket is updated when it is needed.

[Note: crossing] Whether the step counts is known before the first update, while most of the means are still on their
way: it is whispered with the bucket that is needed first, or voted on at the end of backward, on a lane of its own.
Before a layer's forward begins, its bucket's means are waited for and the user's optimizer steps the parameters of that
bucket alone, with the learning rate of the moment it was asked to. Before a gradient of the next backward arrives all
have landed. Calling an elementwise optimizer bucket by bucket gives the same bits as calling it once.

Who asks for gradients between `backward` and `step` (clipping by torch.nn.utils does) gets them, and that step has
its barrier back. Where it can never be crossed, `off` says why, once.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.bucket import Bucket
from paceline.telemetry import Note

if TYPE_CHECKING:
    from paceline.engine import Engine


class Crossing:
    """One engine's update under way: [Note: crossing]."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.on = engine.method.order.crosses and not engine.idle
        self._step: Callable[[], Any] | None = None  # the optimizer's own: the user has called it
        self._zero: Callable[[], None] | None = None  # ... and then zero_grad
        self._groups: list[dict[str, Any]] = []  # as they were: a scheduler may have changed them by now
        self._due: dict[int, Bucket] = {}  # by index: not updated yet
        self._judged = False  # it is known that the step counts
        self._called: set[int] = set()  # parameters (by id) whose module's forward has begun
        self._shy: set[int] = set()  # those that are used without it: they must be there when any forward begins
        self.told: set[str] = set()  # why a barrier was kept

    def off(self, why: str) -> None:
        """Never here."""
        if self.on:
            self.on = False
            self.say(why)

    def say(self, why: str) -> None:
        if why not in self.told and self.engine.comm.rank == 0:
            text = f"{self.engine.method.order.name}: a step waits for all its gradients: {why}"
            self.engine.recorder.emit(Note(t=time.monotonic(), text=text))
            warnings.warn(f"paceline: {text}", stacklevel=2)
        self.told.add(why)

    @property
    def under_way(self) -> bool:
        """An update that the user has asked for and that is not whole yet."""
        return self._step is not None

    # ------------------------------------------------------------------------------------------------ the user's calls

    def defer(self, step: Callable[[], Any]) -> None:
        """`optimizer.step()`: later."""
        self._step, self._judged = step, False
        self._called.clear()
        self.engine.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
        self._groups = [dict(group) for group in self.engine.optimizer.param_groups]
        self._due = {b.index: b for b in self.engine.buckets}

    def zeroes(self, zero_grad: Callable[[], None]) -> bool:
        """`optimizer.zero_grad()`: later, if an update is under way."""
        if self._step is not None:
            self._zero = zero_grad
        return self._step is not None

    def forward(self, params: Iterable[Tensor], *, root: bool) -> None:
        """A module's forward begins, which uses these."""
        own = [id(p) for p in params]
        self._called.update(own)
        if self._step is not None:
            own += self._shy if root else ()
            some = [b for b in self._due.values() if any(id(s.param) in own for s in b.slots)]
            if some or not self._judged:
                self._land(some)

    def gradient(self, param: Tensor) -> None:
        """One is about to be added to p.grad."""
        if id(param) not in self._called:
            self._shy.add(id(param))
        self.land()
        self.barrier()

    def land(self) -> None:
        """The update under way is made."""
        if self._step is not None:
            self._land(list(self._due.values()))

    def asked_for(self, grads: Iterable[Tensor]) -> None:
        """Somebody clips these gradients."""
        mine = {id(s.view) for b in self.engine.buckets for s in b.slots}
        if any(id(grad) in mine for grad in grads) and self.barrier():
            self.say("gradients are clipped before it")

    def barrier(self) -> bool:
        """Wait for the means of a step that nobody has called yet, if there is one."""
        waits = self.on and self.engine.exchanged and not self.engine.landed and self._step is None
        if waits:
            self.engine.land()
        return waits

    # ------------------------------------------------------------------------------------------------ the update

    def _land(self, some: Sequence[Bucket]) -> None:
        with self.engine.recorder.timed():  # whoever made it necessary
            if not self._judged:
                self._judge()
            for b in some:
                if b.index in self._due:  # the step counts
                    with self.engine.waiting():
                        self.engine.pipeline.drain(of=b)
                    self._update(self._due.pop(b.index))
            if self._step is not None and not self._due:
                self.engine.commit()
                self.engine.over(made=True)
                self._close()

    def _judge(self) -> None:
        """Before the first update: does the step count?"""
        engine = self.engine
        self._judged = True
        with engine.waiting():
            if engine.poll.last is not None:
                engine.pipeline.drain(of=engine.poll.last)
            used, bad = engine.poll.used(engine.buckets), engine.poll.bad()
            for b in engine.buffers:
                engine.pipeline.drain(of=b)
        engine.method.order.hear(engine.poll.backlog())
        for b in engine.buckets:
            b.bind(used[b.index])
        if engine.method.membership.commit(not bad):
            engine.guard.counted(engine.buckets)
            return
        with engine.waiting():
            engine.pipeline.drain()
        engine.rollback()
        self._due.clear()
        self._close()
        engine.guard.skipped(engine.ex.step, bad)

    def _update(self, b: Bucket) -> None:
        """The optimizer's step, for this bucket's parameters."""
        here, optimizer = {id(s.param) for s in b.slots}, self.engine.optimizer
        groups = [{**group, "params": [p for p in group["params"] if id(p) in here]} for group in self._groups]
        whole, optimizer.param_groups = optimizer.param_groups, [group for group in groups if group["params"]]
        try:
            with torch.enable_grad():
                assert self._step is not None
                self._step()
        finally:
            optimizer.param_groups = whole

    def _close(self) -> None:
        self._step, zero_grad, self._zero = None, self._zero, None
        if zero_grad is not None:
            zero_grad()


_clipped: list[weakref.ref[Crossing]] = []


def watch_clipping(crossing: Crossing) -> None:
    """torch's functions that clip look at p.grad. All of them come by here, under whatever name they were imported."""
    theirs: Any = torch.nn.utils.clip_grad
    group = theirs._group_tensors_by_device_and_dtype

    def landed(tensors: list[list[Tensor]], *args: Any, **kwargs: Any) -> Any:
        for one in [ref() for ref in _clipped]:
            if one is not None:
                one.asked_for(tensors[0])
        return group(tensors, *args, **kwargs)

    if group.__name__ != landed.__name__:
        theirs._group_tensors_by_device_and_dtype = landed
    _clipped[:] = [*(ref for ref in _clipped if ref() is not None), weakref.ref(crossing)]
